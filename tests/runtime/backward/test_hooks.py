"""Hooks on parameters fire as in a plain backward: once per microbatch, with its whole gradient."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from pipeloom.runtime.backward import SplitBackwardWarning, choose_method, listeners
from tests.runtime.backward.harness import (
    accumulate,
    assert_same_inputs,
    assert_same_parameters,
    run_forward,
    run_split,
)
from tests.runtime.backward.stages import WIDTH
from tests.runtime.backward.zoo import DTYPE, build, feed

torch.set_num_threads(1)

STAGES = [
    "mlp",
    "transformer",
    "reused",
    "shared subgraph",
    "merged lora",
    "first stage",
    "experts",
]
Event = tuple[str, str, Tensor]


def listen(module: nn.Module) -> tuple[list[Event], list[Any]]:
    """Note every hook of every parameter; the nodes are kept since their hooks live with them."""
    events: list[Event] = []
    nodes = []
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue

        def tensor_hook(grad: Tensor, name: str = name) -> Tensor:
            events.append(("tensor", name, grad.clone()))
            return grad * 2  # what a hook returns is what counts

        def post_hook(parameter: Tensor, name: str = name) -> None:
            events.append(("post", name, parameter.grad.clone()))

        parameter.register_hook(tensor_hook)
        parameter.register_post_accumulate_grad_hook(post_hook)
        nodes.append(get_gradient_edge(parameter).node)
    return events, nodes


@pytest.mark.parametrize("method", ["auto", "graph", "whole"])
@pytest.mark.parametrize("self_check", ["structural", "numeric"])
@pytest.mark.parametrize("name", STAGES)
def test_hooks_see_what_a_plain_backward_shows(name: str, self_check: str, method: str) -> None:
    torch.manual_seed(0)
    batches = [feed(name) for _ in range(3)]
    plain, split = build(name), build(name)
    truth_events, _nodes = listen(plain)
    events, _more_nodes = listen(split)
    torch.manual_seed(1)
    output_grads = []
    for inputs in batches:
        outputs = plain(*[x.detach().requires_grad_(x.requires_grad) for x in inputs])
        output_grads.append([torch.randn_like(outputs)])
        outputs.backward(output_grads[-1][0])

    backward = choose_method(split, method=method, self_check=self_check)
    saved = [run_forward(backward, split, x, i) for i, x in enumerate(batches)]
    for index, one in enumerate(saved):
        backward.input(one, output_grads[index])
    if method != "whole":
        assert not events, "hooks fired at I"
    for one in saved:
        backward.weight(one)

    def by_parameter(found: list[Event]) -> dict[tuple[str, str], list[Tensor]]:
        grouped: dict[tuple[str, str], list[Tensor]] = {}
        for kind, parameter, value in found:
            grouped.setdefault((kind, parameter), []).append(value)
        return grouped

    mine, theirs = by_parameter(events), by_parameter(truth_events)
    assert mine.keys() == theirs.keys()
    for key, values in theirs.items():
        assert len(mine[key]) == len(values) == 3, key
        for a, b in zip(mine[key], values, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    assert_same_parameters(split, plain)


@pytest.mark.parametrize("name", STAGES)
def test_those_who_listen_at_accumulation_hear_of_gradients_added_in_place(name: str) -> None:
    """Gradient reducers hook the place where a parameter's gradient is accumulated."""
    module = build(name)
    heard: list[str] = []
    nodes = []
    trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
    for pname, parameter in trainable.items():
        node = get_gradient_edge(parameter).node
        node.register_hook(lambda *_, pname=pname: heard.append(pname))
        nodes.append(node)
    torch.manual_seed(0)
    batches = [feed(name) for _ in range(2)]
    truth = accumulate(module, batches)
    backward = choose_method(module)
    for index, inputs in enumerate(batches):
        saved = run_forward(backward, module, inputs, index)
        backward.input(saved, truth.output_grads[index])
        assert not heard
        backward.weight(saved)
        assert sorted(heard) == sorted(trainable)
        heard.clear()
    assert_same_parameters(module, truth.module)


def listen_at(parameter: Tensor, heard: list[object]) -> object:
    """Hook the place where a parameter's gradient is accumulated; the hook lives with the node."""
    node = get_gradient_edge(parameter).node
    node.register_hook(lambda *_: heard.append(parameter))
    return node


def test_those_who_begin_to_listen_between_or_within_microbatches_hear_of_it() -> None:
    module = build("mlp")
    torch.manual_seed(0)
    batches = [feed("mlp") for _ in range(5)]
    truth = accumulate(module, batches)
    backward = choose_method(module)
    heard: list[object] = []
    nodes = []
    counts = []
    for index, inputs in enumerate(batches):
        if index == 1:  # between two microbatches
            nodes.append(listen_at(module[0].weight, heard))
        saved = run_forward(backward, module, inputs, index)
        if index == 2:  # after F
            nodes.append(listen_at(module[2].weight, heard))
        backward.input(saved, truth.output_grads[index])
        if index == 3:  # after I
            nodes.append(listen_at(module[0].bias, heard))
        backward.weight(saved)
        counts.append(len(heard))
        heard.clear()
    assert counts == [0, 1, 2, 3, 3]
    assert_same_parameters(module, truth.module)


def test_those_who_begin_to_listen_while_others_are_in_flight_hear_of_it() -> None:
    module = build("mlp")
    torch.manual_seed(0)
    batches = [feed("mlp") for _ in range(4)]
    truth = accumulate(module, batches)
    backward = choose_method(module)
    first = run_forward(backward, module, batches[0], 0)
    backward.input(first, truth.output_grads[0])
    backward.weight(first)
    second = run_forward(backward, module, batches[1], 1)
    heard: list[object] = []
    node = listen_at(module[0].weight, heard)
    third = run_forward(backward, module, batches[2], 2)
    for index, saved in ((1, second), (2, third)):
        backward.input(saved, truth.output_grads[index])
        backward.weight(saved)
    fourth = run_forward(backward, module, batches[3], 3)
    backward.input(fourth, truth.output_grads[3])
    backward.weight(fourth)
    assert node is not None
    assert len(heard) == 3
    assert_same_parameters(module, truth.module)


def test_where_nobody_listens_no_time_is_spent_on_telling(monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[int] = []
    monkeypatch.setattr(listeners, "pass_parameters", lambda ps: passed.append(len(ps)))
    module = build("mlp")
    torch.manual_seed(0)
    batches = [feed("mlp") for _ in range(3)]
    truth = accumulate(module, batches)
    backward = choose_method(module)
    for index, inputs in enumerate(batches):
        saved = run_forward(backward, module, inputs, index)
        backward.input(saved, truth.output_grads[index])
        backward.weight(saved)
    assert passed == [3, 0, 0]  # nothing is known before the first W


def test_a_gradient_that_was_there_is_added_to_in_its_storage() -> None:
    module = build("mlp")
    before = {}
    for name, parameter in module.named_parameters():
        parameter.grad = torch.ones_like(parameter)
        before[name] = parameter.grad
    batches = [feed("mlp") for _ in range(2)]
    truth = accumulate(module, batches)  # the copy has the ones as well
    run_split(choose_method(module), module, batches, truth)
    assert_same_parameters(module, truth.module)
    for name, parameter in module.named_parameters():
        assert parameter.grad is before[name]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gradients_can_be_accumulated_in_float32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 4)).to(dtype)
    backward = choose_method(module, accumulate_fp32=True)
    sums = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in module.named_parameters()}
    for index in range(6):
        x = torch.randn(5, 8, dtype=dtype, requires_grad=True)
        y = module(x)
        for (name, _), g in zip(
            module.named_parameters(),
            torch.autograd.grad(y.sum(), list(module.parameters()), retain_graph=True),
            strict=True,
        ):
            sums[name] += g
        saved = backward.save(microbatch=index, inputs=[x], outputs=[y])
        backward.input(saved, [torch.ones_like(y)])
        backward.weight(saved)
    for name, parameter in module.named_parameters():
        assert parameter.grad.dtype == torch.float32
        torch.testing.assert_close(parameter.grad, sums[name], rtol=1e-6, atol=1e-6)


def test_autocast_keeps_gradients_in_the_parameters_type() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    x = torch.randn(4, 8, requires_grad=True)
    grads = []
    for split in (False, True):
        backward = choose_method(module, method="deferred" if split else "whole")
        for parameter in module.parameters():
            parameter.grad = None
        for index in range(2):
            with torch.autocast("cpu", torch.bfloat16), backward.forward():
                y = module(x)
            saved = backward.save(microbatch=index, inputs=[x], outputs=[y])
            backward.input(saved, [torch.ones_like(y)])
            backward.weight(saved)
        assert backward.choice.method == ("deferred" if split else "whole")
        grads.append([p.grad for p in module.parameters()])
    for a, b in zip(*grads, strict=True):
        assert a.dtype == b.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=2e-2, atol=1e-2)


def doubled(weight: Tensor) -> Tensor:
    """The tensor, with a hook on it."""
    weight.register_hook(lambda grad: 2 * grad)
    return weight


class HookedInside(nn.Module):
    """Hooks on what lies between parameters and their uses, and on results."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.free = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.mixed = nn.Parameter(torch.randn(WIDTH, WIDTH, WIDTH) / 16)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        if self.kind == "transposed":
            x = x @ doubled(self.free.t())
        elif self.kind == "cast":
            x = F.linear(x.float(), doubled(self.free.float())).double()
        elif self.kind == "computed":
            x = x @ doubled(self.free.exp())
        elif self.kind == "multiplied":
            x = x * doubled(self.free.exp())[0]
        elif self.kind == "both":
            weight = doubled(torch.tanh(self.free))
            x = (x @ weight) * weight[0]
        elif self.kind == "product":  # on the result of the product itself, no view of it
            x = doubled(doubled(x.flatten(0, 1)) @ self.free).view_as(x)
        elif self.kind == "result":
            x = doubled(F.bilinear(x, x, self.mixed))
        return self.second(x)


@pytest.mark.parametrize("self_check", ["structural", "numeric"])
@pytest.mark.parametrize("method", ["auto", "deferred", "graph", "whole"])
@pytest.mark.parametrize("kind", ["transposed", "cast", "computed", "multiplied", "both", "result"])
def test_hooks_on_other_tensors_than_parameters_are_passed_once(
    kind: str, method: str, self_check: str
) -> None:
    torch.manual_seed(0)
    module = HookedInside(kind).to(DTYPE)
    batches = [feed("mlp") for _ in range(4)]
    truth = accumulate(module, batches)
    backward = choose_method(module, method=method, self_check=self_check)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        gradients = run_split(backward, module, batches, truth)
    assert_same_inputs(gradients, truth.input_grads)
    if kind == "cast":  # in single precision, where the order of sums shows
        for parameter, other in zip(module.parameters(), truth.module.parameters(), strict=True):
            if other.grad is not None:
                torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-4, atol=1e-5)
    else:
        assert_same_parameters(module, truth.module)
    warned = [str(one.message) for one in said if one.category is SplitBackwardWarning]
    if method == "graph":
        assert "there may be hooks on its tensors" in warned[0]
        assert backward.choice.method == "whole"
    else:
        assert not warned
    if method in ("auto", "deferred"):
        assert {"first.weight", "second.weight"} <= set(backward.choice.deferred)


@pytest.mark.parametrize("needs_grad", [True, False])
def test_hooks_on_a_stages_output_and_first_result(needs_grad: bool) -> None:
    """Both are results of products, the first with and without anything below it to run."""

    class TwoLayers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return doubled(self.second(torch.tanh(doubled(self.first(x)))))

    torch.manual_seed(0)
    module = TwoLayers().to(DTYPE)
    batches = [[torch.randn(5, WIDTH, dtype=DTYPE, requires_grad=needs_grad)] for _ in range(3)]
    truth = accumulate(module, batches)
    backward = choose_method(module)
    gradients = run_split(backward, module, batches, truth)
    assert_same_parameters(module, truth.module)
    assert_same_inputs(gradients, truth.input_grads)
    assert len(backward.choice.deferred) == 4


class Remembering(nn.Module):
    """Keeps an activation within reach, and a view of a weight that is older than any forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.make_view()

    def make_view(self) -> None:
        self.turned = self.weight.t()

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = self.first(x)
        return torch.tanh(self.second(torch.tanh(self.hidden)) @ self.turned)


@pytest.mark.filterwarnings("ignore::pipeloom.runtime.backward.SplitBackwardWarning")
@pytest.mark.parametrize("on", ["hidden", "output", "view"])
@pytest.mark.parametrize("method", ["auto", "deferred", "graph", "whole"])
def test_hooks_from_before_or_after_forward_are_passed_once(method: str, on: str) -> None:
    torch.manual_seed(0)
    module, batches = Remembering().to(DTYPE), [feed("mlp") for _ in range(3)]
    plain = Remembering().to(DTYPE)
    plain.load_state_dict(module.state_dict())
    for one in (module, plain):
        one.make_view()
        if on == "view":
            one.turned.register_hook(lambda grad: 2 * grad)
    backward = choose_method(module, method=method)
    for index, [x] in enumerate(batches):
        mine, theirs = (x.detach().clone().requires_grad_() for _ in range(2))
        with backward.forward():
            y = module(mine)
        saved = backward.save(microbatch=index, inputs=[mine], outputs=[y])
        z = plain(theirs)
        for hooked in {"hidden": (module.hidden, plain.hidden), "output": (y, z)}.get(on, ()):
            hooked.register_hook(lambda grad: 2 * grad)
        torch.autograd.backward(z, torch.ones_like(z), retain_graph=True)
        [dx] = backward.input(saved, [torch.ones_like(y)])
        backward.weight(saved)
        torch.testing.assert_close(dx, theirs.grad)
    assert_same_parameters(module, plain)


@pytest.mark.parametrize("method", ["auto", "graph", "whole"])
def test_hooks_on_several_parameters_see_them_together(method: str) -> None:
    module, batches = build("mlp"), [feed("mlp") for _ in range(3)]
    truth = accumulate(module, batches)
    seen: list[list[bool]] = []
    torch.autograd.graph.register_multi_grad_hook(
        list(module.parameters()),
        lambda grads: seen.append([grad is not None for grad in grads]),
    )
    run_split(choose_method(module, method=method), module, batches, truth)
    assert seen == [[True] * 3] * 3
