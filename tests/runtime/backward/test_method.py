"""The interface: choosing, phases, losses, missing gradients, messages, memory."""

from __future__ import annotations

import gc
import warnings
import weakref

import pytest
import torch
from torch import Tensor, nn

from pipeloom.errors import BackwardError, BackwardMethodError
from pipeloom.runtime.backward import SplitBackwardWarning, choose_method
from tests.runtime.backward.harness import (
    accumulate,
    assert_same_parameters,
    fresh,
    run_forward,
)
from tests.runtime.backward.memory import bytes_saved_by_forward
from tests.runtime.backward.stages import WIDTH, Block
from tests.runtime.backward.zoo import DTYPE, build, feed

torch.set_num_threads(1)


def test_a_loss_starts_with_one() -> None:
    for method in ("auto", "graph", "whole"):
        module = build("mlp")
        [x] = feed("mlp")
        expected = torch.autograd.grad(module(x).square().mean(), [x, *module.parameters()])
        backward = choose_method(module, method=method)
        with backward.forward():
            loss = module(x).square().mean()
        saved = backward.save(microbatch=0, inputs=[x], outputs=[loss])
        [dx] = backward.input(saved, None)
        backward.weight(saved)
        for mine, theirs in zip(
            [dx, *(p.grad for p in module.parameters())], expected, strict=True
        ):
            torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("phase", ["full", "input"])
@pytest.mark.parametrize("method", ["auto", "graph", "whole"])
def test_a_loss_that_is_no_scalar_is_an_error_not_silence(method: str, phase: str) -> None:
    module = build("mlp")
    backward = choose_method(module, method=method, stage=3)
    saved = run_forward(backward, module, feed("mlp"), 5)
    with pytest.raises(BackwardError, match=r"stage 3, microbatch 5: .*not a scalar"):
        getattr(backward, phase)(saved, None)


@pytest.mark.parametrize("method", ["auto", "graph", "whole"])
def test_a_missing_gradient_is_zero(method: str) -> None:
    module = build("dict outputs")
    backward = choose_method(module, method=method)
    grads = {}
    for split in (True, False):
        for parameter in module.parameters():
            parameter.grad = None
        [x] = feed("dict outputs")
        with backward.forward():
            out = module(x)
        outputs = [out["hidden"], out["extra"]["logits"]]
        saved = backward.save(microbatch=0, inputs=[x], outputs=outputs)
        given = [None, torch.ones_like(outputs[1])]
        if split:
            backward.input(saved, given)
            backward.weight(saved)
        else:
            backward.full(saved, given)
        assert module.left.weight.grad is None
        assert module.right.weight.grad is not None
        grads[split] = module.right.weight.grad
    assert grads[True].shape == grads[False].shape


@pytest.mark.parametrize("method", ["auto", "graph", "whole"])
def test_no_gradient_at_all_is_no_work(method: str) -> None:
    module = build("mlp")
    [x] = feed("mlp")
    backward = choose_method(module, method=method)
    with backward.forward():
        y = module(x)
    saved = backward.save(microbatch=0, inputs=[x], outputs=[y])
    assert backward.input(saved, [None]) == [None]
    backward.weight(saved)
    assert all(p.grad is None for p in module.parameters())


def test_grad_of_inputs_is_left_alone() -> None:
    module = build("mlp")
    for phase in ("full", "input"):
        [x] = feed("mlp")
        x.grad = kept = torch.ones_like(x)
        backward = choose_method(module, method="whole")
        y = module(x)
        saved = backward.save(microbatch=0, inputs=[x], outputs=[y])
        [dx] = getattr(backward, phase)(saved, [torch.ones_like(y)])
        assert x.grad is kept
        assert torch.equal(x.grad, torch.ones_like(x))
        assert not torch.equal(dx, kept)


@pytest.mark.parametrize("method", ["auto", "whole"])
def test_phases_out_of_order_say_where(method: str) -> None:
    module = build("mlp")
    backward = choose_method(module, method=method, stage=4)
    saved = run_forward(backward, module, feed("mlp"), 7)
    with pytest.raises(BackwardError, match="stage 4, microbatch 7: W needs I before it"):
        backward.weight(saved)
    grad = [torch.ones(2, 6, WIDTH, dtype=DTYPE)]
    backward.input(saved, grad)
    with pytest.raises(BackwardError, match="B needs F before it, but the last was I"):
        backward.full(saved, grad)
    backward.weight(saved)
    with pytest.raises(BackwardError, match="the last was W") as caught:
        backward.weight(saved)
    assert (caught.value.stage, caught.value.microbatch) == (4, 7)


def test_overwriting_what_weight_needs_is_an_error_that_names_the_parameter() -> None:
    module = build("mlp")
    backward = choose_method(module, stage=1)
    [x] = feed("mlp")
    y = module(x)
    saved = backward.save(microbatch=2, inputs=[x], outputs=[y])
    backward.input(saved, [torch.ones_like(y)])
    with torch.no_grad():
        x.zero_()
    with pytest.raises(BackwardError, match=r"stage 1, microbatch 2: .*overwritten") as caught:
        backward.weight(saved)
    assert caught.value.parameters == ("0.weight",)


def test_unknown_choices_are_refused() -> None:
    with pytest.raises(BackwardMethodError, match="none of auto, deferred, graph, whole"):
        choose_method(nn.Linear(1, 1), method="lazy")
    with pytest.raises(BackwardMethodError, match="self_check 'some' is none of"):
        choose_method(nn.Linear(1, 1), self_check="some")
    with pytest.raises(BackwardMethodError, match="exclude each other"):
        choose_method(nn.Linear(1, 1), method="graph", weight_backward=lambda: lambda: None)


def test_a_stage_with_its_own_weight_backward() -> None:
    calls: list[str] = []

    def builder():
        calls.append("build")
        return lambda: calls.append("run")

    module = build("mlp")
    backward = choose_method(module, weight_backward=builder)
    first, second, third = (run_forward(backward, module, feed("mlp"), i) for i in range(3))
    grad = [torch.ones(2, 6, WIDTH, dtype=DTYPE)]
    backward.input(first, grad)
    backward.input(second, grad)
    assert calls == ["build", "build"]
    backward.weight(second)
    backward.weight(first)
    assert calls == ["build", "build", "run", "run"]
    backward.full(third, grad)
    assert calls[4:] == ["build", "run"]


def test_strict_raises_where_a_split_was_asked_for_and_cannot_be() -> None:
    for name, method, words in [
        ("reentrant checkpoint", "auto", "use_reentrant=False"),
        ("only a custom function", "deferred", "TwoResultsBackward"),
    ]:
        module = build(name)
        backward = choose_method(module, method=method, strict=True, stage=3)
        with pytest.raises(BackwardMethodError, match=f"stage 3, microbatch 0: .*{words}.*weight"):
            run_forward(backward, module, feed(name), 0)


class Hidden(torch.autograd.Function):
    """Adds to a parameter's gradient behind autograd's back."""

    @staticmethod
    def forward(ctx, x: Tensor, module: nn.Module) -> Tensor:
        ctx.save_for_backward(x)
        ctx.module = module
        return module.inner(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            ctx.module.inner(leaf).backward(grad)
        return leaf.grad, None


class HiddenParameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(Hidden.apply(x, self))


def test_parameters_that_the_graph_does_not_show_are_named_and_the_stage_stays_whole() -> None:
    module = HiddenParameters().to(DTYPE)
    [x] = feed("mlp")
    truth = accumulate(module, [[x]])
    backward = choose_method(module, stage=6)
    [leaf] = fresh([x])
    y = module(leaf)
    saved = backward.save(microbatch=0, inputs=[leaf], outputs=[y])
    with pytest.warns(SplitBackwardWarning, match=r"stage 6, microbatch 0: .*inner\.weight"):
        backward.input(saved, truth.output_grads[0])
    backward.weight(saved)
    for mine, theirs in zip(module.parameters(), truth.module.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-10, atol=1e-10)


def test_hidden_parameters_raise_when_strict_before_anything_has_run() -> None:
    module = HiddenParameters().to(DTYPE)
    backward = choose_method(module, strict=True)
    with pytest.raises(BackwardMethodError, match=r"may hide them.*inner\.weight"):
        run_forward(backward, module, feed("mlp"), 0)
    assert all(p.grad is None for p in module.parameters())


class UnusedBeside(nn.Module):
    """A custom Function that hides nothing, and a layer that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.function, self.unused = build("custom function"), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@pytest.mark.parametrize("had_gradient", [False, True])
def test_parameters_that_are_just_not_used_cost_one_whole_backward(had_gradient: bool) -> None:
    module = UnusedBeside().to(DTYPE)
    if had_gradient:
        module.unused.weight.grad = torch.ones_like(module.unused.weight)
    batches = [feed("mlp") for _ in range(3)]
    truth = accumulate(module, batches)
    backward = choose_method(module)
    methods = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", SplitBackwardWarning)
        for index, inputs in enumerate(batches):
            saved = run_forward(backward, module, inputs, index)
            backward.input(saved, truth.output_grads[index])
            methods.append(backward.choice.method)
            backward.weight(saved)
    assert methods == ["whole", "deferred", "deferred"]
    assert {"function.head.weight", "function.head.bias"} == set(backward.choice.deferred)
    assert_same_parameters(module, truth.module)


# ── memory ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("method", ["auto", "graph", "whole"])
def test_nothing_waits_for_the_garbage_collector(method: str) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(Block(), Block()).to(DTYPE)
    backward = choose_method(module, method=method)
    gc.disable()
    try:
        for index in range(3):
            [x] = feed("mlp")
            with backward.forward():
                y = module(x)
            saved = backward.save(microbatch=index, inputs=[x], outputs=[y])
            grad = torch.ones_like(y)
            watched = [weakref.ref(t) for t in (x, y, grad)]
            del x, y
            backward.input(saved, [grad])
            kept = getattr(saved.pending, "tensors", list)()
            watched += [weakref.ref(t) for t in kept if not isinstance(t, nn.Parameter)]
            del kept
            del grad
            backward.weight(saved)
            del saved
            assert [ref for ref in watched if ref() is not None] == []
    finally:
        gc.enable()


def test_a_transformer_holds_less_between_input_and_weight_than_after_forward() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(*(Block(32) for _ in range(4)))
    x = torch.randn(1, 48, 32, requires_grad=True)
    saved_by_forward = bytes_saved_by_forward(module, [x])
    held = {}
    for limit in (None, 0.77):
        backward = choose_method(module, hold_at_most=limit)
        y = module(x)
        saved = backward.save(microbatch=0, inputs=[x], outputs=[y])
        backward.input(saved, [torch.ones_like(y)])
        held[limit] = backward.held_bytes(saved)
        backward.weight(saved)
    assert held[0.77] <= 0.77 * saved_by_forward < held[None] <= 0.9 * saved_by_forward


def test_products_computed_early_are_counted_once_and_heard_of_at_weight() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(*(Block(32) for _ in range(4))).to(DTYPE)
    batches = [[torch.randn(1, 48, 32, dtype=DTYPE, requires_grad=True)] for _ in range(3)]
    truth = accumulate(module, batches)
    backward = choose_method(module, hold_at_most=0.77)
    for index, inputs in enumerate(batches):
        saved = run_forward(backward, module, inputs, index)
        backward.input(saved, truth.output_grads[index])
        early = [n for n, p in module.named_parameters() if index == 0 and p.grad is not None]
        if index == 0:
            assert early
            assert all(".attention.out." in name for name in early)
        backward.weight(saved)
    for mine, theirs in zip(module.parameters(), truth.module.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-10, atol=1e-10)
