"""The self-checks fail when something is wrong: plans and recipes are broken on purpose."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from pipeloom.errors import BackwardMethodError
from pipeloom.runtime.backward import (
    SplitBackwardWarning,
    choose_method,
    decide,
    plan,
    recipes,
    ways,
)
from pipeloom.runtime.backward.checkpointing import is_packed
from pipeloom.runtime.backward.compiled.cut import Cut
from pipeloom.runtime.backward.compiled.halves import halves_of
from pipeloom.runtime.backward.plan import InInput, Plan, make_plan
from pipeloom.runtime.backward.self_check import differing, structural_faults
from pipeloom.runtime.backward.walk import Graph, read_graph
from tests.runtime.backward.compiling import compile_all, skip_where_torch_cannot
from tests.runtime.backward.harness import (
    accumulate,
    assert_same_inputs,
    assert_same_parameters,
    run_split,
)
from tests.runtime.backward.zoo import ZOO, build, feed, flat

torch.set_num_threads(1)


def planned(name: str, how: str) -> tuple[Graph, Plan]:
    torch.manual_seed(0)
    module, inputs = build(name), feed(name)
    if how == "cuts":
        torch._dynamo.reset()
        compile_all(module)
    graph = read_graph(inputs, flat(module(*inputs)))

    def halve(node: Any, operands: frozenset[int]) -> Cut | None:
        halves = halves_of(node)
        return halves and halves.cut(operands)

    made = make_plan(
        graph,
        use_recipes=how != "reruns",
        hooked=False,
        rerun=lambda node, kind: how == "reruns" and not hasattr(node, "saved_tensors"),
        packed=lambda node, recipe: is_packed(node, recipe.saved),
        halve=halve,
    )
    return graph, made


def mutations(made: Plan) -> Iterator[tuple[str, Plan]]:
    """Every way to lose a part of the plan, or to have it twice."""
    for name in ("deferred", "reruns", "halved", "in_input"):
        parts = getattr(made, name)
        for index, part in enumerate(parts):
            without = parts[:index] + parts[index + 1 :]
            yield f"{name}[{index}] lost", replace(made, **{name: without})
            yield f"{name}[{index}] twice", replace(made, **{name: (*parts, part)})
    for index, use in enumerate(made.deferred):
        leaf_edge = (made.leaves[0], 0)
        if use.target != leaf_edge:
            moved = replace(use, target=leaf_edge)
            changed = (*made.deferred[:index], moved, *made.deferred[index + 1 :])
            yield f"deferred[{index}] goes to another parameter", replace(made, deferred=changed)
    for index, half in enumerate(made.halved):
        for place, (finish, uses) in enumerate(half.uses):
            for what, changed_uses in (("lost", ()), ("twice", (*uses, *uses))):
                parts = list(half.uses)
                parts[place] = finish, changed_uses
                changed_half = replace(half, uses=tuple(parts))
                changed_halves = (*made.halved[:index], changed_half, *made.halved[index + 1 :])
                yield f"a part of halved[{index}] {what}", replace(made, halved=changed_halves)
    # Asked of the engine although it is deferred. What a compiled node leaves undone may be asked
    # for: it gives nothing.
    undone = {use.leaf for half in made.halved for _, uses in half.uses for use in uses}
    for leaf in made.deferred_leaves - undone:
        asked = InInput(len(made.captures), (leaf, 0))
        yield (
            f"leaf {leaf} also in I",
            replace(made, captures=(*made.captures, (leaf, 0)), in_input=(*made.in_input, asked)),
        )


@pytest.mark.parametrize("how", ["recipes", "reruns", "cuts"])
@pytest.mark.parametrize("name", ZOO)
def test_every_broken_plan_is_found(name: str, how: str) -> None:
    if name == "reentrant checkpoint":
        pytest.skip("has parameters that no graph shows; never gets as far as a plan")
    if (name, how) == ("complex", "cuts"):
        skip_where_torch_cannot("aot_eager", build(name), feed(name))
    graph, made = planned(name, how)
    assert structural_faults(graph.shape, made) == set()
    for what, broken in mutations(made):
        assert structural_faults(graph.shape, broken), what


@pytest.fixture
def forgetful_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans that lose their first deferred product."""

    def forget(*args: object, **options: object) -> Plan:
        made = plan.make_plan(*args, **options)
        return replace(made, deferred=made.deferred[1:])

    monkeypatch.setattr(decide, "make_plan", forget)


@pytest.mark.usefixtures("forgetful_plans")
def test_a_wrong_plan_falls_back_and_names_the_parameters() -> None:
    module = build("mlp")
    batches = [feed("mlp") for _ in range(3)]
    truth = accumulate(module, batches)
    backward = choose_method(module, stage=9)
    with pytest.warns(SplitBackwardWarning, match=r"stage 9, microbatch 0: .*2\.weight"):
        run_split(backward, module, batches, truth)
    assert_same_parameters(module, truth.module)
    assert backward.choice.method == "whole"


@pytest.mark.usefixtures("forgetful_plans")
def test_a_wrong_plan_raises_when_strict() -> None:
    module = build("mlp")
    batches = [feed("mlp") for _ in range(3)]
    truth = accumulate(module, batches)
    with pytest.raises(BackwardMethodError, match=r"2\.weight"):
        run_split(choose_method(module, strict=True), module, batches, truth)


@pytest.mark.usefixtures("forgetful_plans")
def test_without_a_check_a_wrong_plan_goes_unnoticed() -> None:
    """The structural check is what found it above."""
    module = build("mlp")
    batches = [feed("mlp") for _ in range(3)]
    truth = accumulate(module, batches)
    run_split(choose_method(module, self_check="off"), module, batches, truth)
    with pytest.raises(AssertionError, match=r"2\.weight"):
        assert_same_parameters(module, truth.module)


@pytest.fixture
def wrong_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of weights without bias come out a little too large."""
    right = recipes.RECIPES["MmBackward0"][1]
    wrong = replace(
        right, compute=lambda grad, taken, turned: 1.001 * right.compute(grad, taken, turned)
    )
    table = {**recipes.RECIPES, "MmBackward0": {1: wrong}}
    monkeypatch.setattr(ways, "RECIPES", table)


@pytest.mark.usefixtures("wrong_products")
def test_the_numeric_check_finds_a_wrong_product_and_puts_it_right() -> None:
    module = build("mlp")  # its last layer has no bias
    batches = [feed("mlp") for _ in range(4)]
    truth = accumulate(module, batches)
    backward = choose_method(module, self_check="numeric", stage=4)
    with pytest.warns(SplitBackwardWarning, match=r"stage 4, microbatch 0: .*differ.*2\.weight"):
        gradients = run_split(backward, module, batches, truth)
    assert_same_parameters(module, truth.module)
    assert_same_inputs(gradients, truth.input_grads)
    assert backward.choice.method == "whole"


@pytest.mark.parametrize("name", ["convolution", "transformer", "checkpointed"])
def test_the_numeric_check_leaves_no_trace(name: str) -> None:
    """Gradients, buffers and random numbers are as if it had not run."""
    states = []
    for self_check in ("structural", "numeric"):
        module = nn.Sequential(build(name), nn.Dropout(0.5))
        torch.manual_seed(5)
        backward = choose_method(module, self_check=self_check)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for index in range(2):
                inputs = feed(name)
                y = module(*inputs)
                saved = backward.save(microbatch=index, inputs=inputs, outputs=[y])
                grads = backward.input(saved, [torch.ones_like(y)])
                before = [p.grad.clone() for p in module.parameters() if p.grad is not None]
                states.append((index, "I", *grads, *before, *module.buffers()))
                backward.weight(saved)
        states.append((*(p.grad for p in module.parameters()), torch.get_rng_state()))
    half = len(states) // 2
    for plain, checked in zip(states[:half], states[half:], strict=True):
        assert len(plain) == len(checked)
        for a, b in zip(plain, checked, strict=True):
            assert a == b if isinstance(a, (int, str)) else torch.equal(a, b)


def test_differing_sees_what_rounding_does_not_explain() -> None:
    a = torch.tensor([1.0, 2.0], dtype=torch.float64)
    assert not differing(a, a + 1e-14)
    assert differing(a, a * (1 + 1e-6))
    assert differing(a, None)
    assert not differing(torch.zeros(2), None)
    assert differing(a, a[:1])
    assert differing(a, torch.tensor([1.0, float("nan")], dtype=torch.float64))
    assert differing(a.to(torch.float32), a.to(torch.float32) + 0.1)
    infinite = torch.tensor([1.0, float("inf")])
    assert not differing(infinite, infinite.clone())


def test_rounding_on_the_way_to_a_parameter_is_no_difference() -> None:
    """W adds to ``.grad`` what a backward would round to the type in which the weight is used."""
    torch.manual_seed(0)
    module = nn.Linear(24, 24, bias=False).to(torch.float64)
    parametrize.register_parametrization(module, "weight", InFloat32())
    batches = [[torch.randn(6, 24, dtype=torch.float64, requires_grad=True)] for _ in range(4)]
    truth = accumulate(module, batches)
    run_split(choose_method(module, self_check="numeric", strict=True), module, batches, truth)
    for mine, theirs in zip(module.parameters(), truth.module.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-5)


class InFloat32(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.view(24, 24).float().double()
