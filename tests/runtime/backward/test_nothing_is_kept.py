"""What I, W and a dropped microbatch must let go of, found kept once."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeloom.runtime.backward import choose_method
from pipeloom.runtime.backward.compiled.halves import Halves
from tests.runtime.backward.compiling import COMPILED, EAGER, compile_all
from tests.runtime.backward.harness import accumulate, assert_same_parameters, run_forward
from tests.runtime.backward.memory import bytes_of, watched_saves, weight_storages
from tests.runtime.backward.small import every_method, one_step, three_layers, x_of
from tests.runtime.backward.zoo import DTYPE

torch.set_num_threads(1)
pytestmark = pytest.mark.usefixtures("nothing_compiled_before")


class Distances(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.points = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cdist(x, self.points)


class Exponential(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Bilinear(4, 4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(self.mix(x, x))


@every_method
@pytest.mark.parametrize("end", ["I and W", "no gradient", "dropped", "B"])
@pytest.mark.parametrize("kind", [Distances, Exponential])
def test_nodes_that_save_their_own_result(kind: type[nn.Module], end: str, method: str) -> None:
    """Its box held the result, the result its node, and the node the box."""
    module = kind().to(DTYPE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        backward = choose_method(module, method=method)
        seen: list[weakref.ref[Tensor]] = []
        for index in range(4):
            [x] = x_of()
            with backward.forward():
                y = module(x)
            seen += [weakref.ref(x), weakref.ref(y)]
            saved = backward.save(microbatch=index, inputs=[x], outputs=[y])
            grad = torch.ones_like(y)
            del x, y
            if end == "B":
                backward.full(saved, [grad])
            elif end != "dropped" or index == 0:
                backward.input(saved, [grad if end == "I and W" else None])
                backward.weight(saved)
            del saved
    gc.collect()
    assert [one() for one in seen] == [None] * len(seen)


class Conditioned(nn.Module):
    """A branch whose own input needs no gradient, beside the data."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.branch = nn.Sequential(
            nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 8), nn.Tanh()
        )

    def forward(self, x: Tensor, beside: Tensor) -> Tensor:
        return self.layer(x) + self.branch(beside)


def test_what_a_branch_beside_the_data_keeps_until_w_is_counted() -> None:
    torch.manual_seed(0)
    module = Conditioned().to(DTYPE)
    batches = [[*x_of(6, 8), torch.randn(6, 8, dtype=DTYPE)] for _ in range(2)]
    truth = accumulate(module, batches)
    with watched_saves() as alive:
        backward = choose_method(module, self_check="off")
        for index, inputs in enumerate(batches):
            saved = run_forward(backward, module, inputs, index)
            backward.input(saved, truth.output_grads[index])
            kept = bytes_of(alive(), excluded=weight_storages(module))
            counted = {t.untyped_storage().data_ptr() for t in saved.pending.tensors()}
            assert not bytes_of(alive(), excluded=weight_storages(module) | counted)
            assert backward.held_bytes(saved) > kept > 6 * (8 + 3 * 32) * 8
            backward.weight(saved)
            assert backward.held_bytes(saved) == 0
            del saved
    assert_same_parameters(module, truth.module)


def test_held_bytes_answers_whatever_was_overwritten() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.layer(x))

    module = Normed().to(DTYPE)
    backward = choose_method(module)
    saved = run_forward(backward, module, x_of(), 0)
    backward.input(saved, [torch.ones(3, 4, dtype=DTYPE)])
    before = backward.held_bytes(saved)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1)
    assert 0 < backward.held_bytes(saved) <= before


def test_a_first_convolution_that_i_does_not_run_keeps_no_cast() -> None:
    class Casting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv1d(3, 4, 3), nn.Conv1d(4, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            weight = self.first.weight.double()
            self.cast = weakref.ref(weight)
            return self.second(torch.tanh(F.conv1d(x, weight)).float())

    module = Casting()
    backward = choose_method(module)
    x = torch.randn(2, 3, 8).double()
    with backward.forward():
        y = module(x)
    saved = backward.save(microbatch=0, inputs=[x], outputs=[y])
    grad = torch.ones_like(y)
    del y
    backward.input(saved, [grad])
    assert module.cast() is None
    backward.weight(saved)


class Stashing(torch.autograd.Function):
    """Leaves something on its context that nobody clears."""

    last: Any = None

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.stashed = torch.sin(x)
        Stashing.last = weakref.ref(ctx.stashed)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.stashed


@pytest.mark.parametrize("backend", [None, EAGER, COMPILED])
def test_what_compiled_code_leaves_for_w_keeps_no_graph(backend: str | None) -> None:
    class Region(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Sequential(nn.Linear(4, 4, dtype=DTYPE))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(Stashing.apply(x))

    module = Region()
    if backend is not None:
        compile_all(module.layer, backend)
    backward = choose_method(module)
    for _ in range(2):
        [x] = x_of()
        with backward.forward():
            y = module(x)
        saved = backward.save(microbatch=0, inputs=[x], outputs=[y])
        grad = torch.ones_like(y)
        del x, y
        backward.input(saved, [grad])
        assert Stashing.last() is None
        backward.weight(saved)
    assert set(backward.choice.deferred) >= {"layer.0.weight"}


def test_compiled_code_that_is_dropped_is_gone() -> None:
    def count() -> int:
        torch._dynamo.reset()
        gc.collect()
        return sum(type(one) is Halves for one in gc.get_objects())

    before = count()
    for _ in range(3):
        module = three_layers()
        compile_all(module)
        one_step(choose_method(module), module, *x_of())
        del module
    assert count() <= before


def alternate_checkpoints(module: nn.Module, x: Tensor, index: int) -> Tensor:
    return checkpoint(module, x, use_reentrant=False) if index % 2 else module(x)


def alternate_dimensions(module: nn.Module, x: Tensor, index: int) -> Tensor:
    weight = module[0].weight
    return x @ (weight.transpose(0, 1) if index % 2 else weight.transpose(-1, -2))


@pytest.mark.parametrize("run", [alternate_checkpoints, alternate_dimensions])
def test_two_kinds_of_microbatch_with_one_shape_of_graph_have_two_plans(
    run: Callable[[nn.Module, Tensor, int], Tensor],
) -> None:
    module, plain = three_layers(), three_layers()
    backward = choose_method(module, self_check="off")
    for index in range(8):
        [x] = x_of()
        with backward.forward():
            y = run(module, x, index)
        saved = backward.save(microbatch=index, inputs=[x], outputs=[y])
        backward.input(saved, [torch.ones_like(y)])
        backward.weight(saved)
        run(plain, x.detach(), index).backward(torch.ones_like(y))
    assert_same_parameters(module, plain)
    assert [len(found) for found in backward._decisions.values()] == [2]
    assert len(backward._early) == len(backward._weights_hooked) == 2
