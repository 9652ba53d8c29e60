"""Nodes of the graph, and what they saved, that are not as usual."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from pipeloom.errors import BackwardMethodError
from pipeloom.runtime.backward import choose_method
from tests.runtime.backward.harness import (
    accumulate,
    assert_same_inputs,
    assert_same_parameters,
    run_forward,
    run_split,
)
from tests.runtime.backward.small import every_method, one_step, three_layers, x_of
from tests.runtime.backward.zoo import DTYPE

torch.set_num_threads(1)


class NamesakeVariable(torch.autograd.Function):
    """Has an attribute that nodes of parameters have as well."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.variable = weight.detach()
        return 2 * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


class WithNamesake(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) @ NamesakeVariable.apply(self.weight)


class ForwardMode(nn.Module):
    """Forward-mode derivatives inside: their zeros have no memory."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(4, 4)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.jvp(lambda z: torch.tanh(z @ self.a), (x,), (x,))[1] @ self.b


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return 1 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Ungiven(nn.Module):
    """A parameter whose Function gives no gradient for it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.layer = nn.Parameter(torch.randn(4)), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(NoGradient.apply(x, self.weight))


@every_method
@pytest.mark.parametrize("kind", [WithNamesake, ForwardMode, Ungiven])
def test_unusual_nodes(kind: type[nn.Module], method: str) -> None:
    torch.manual_seed(0)
    module, batches = kind().to(DTYPE), [x_of() for _ in range(3)]
    truth = accumulate(module, batches)
    gradients = run_split(choose_method(module, method=method), module, batches, truth)
    assert_same_parameters(module, truth.module)
    assert_same_inputs(gradients, truth.input_grads)


def test_those_who_listen_hear_also_of_a_gradient_that_is_not_there() -> None:
    module, heard = Ungiven().to(DTYPE), []
    module.weight.register_post_accumulate_grad_hook(heard.append)
    backward = choose_method(module)
    for num_heard in (1, 2, 3):
        one_step(backward, module, *x_of())
        assert len(heard) == num_heard


@pytest.mark.filterwarnings("ignore:.*may give each of them out only once")
@pytest.mark.filterwarnings("ignore:.*hooks keep its saved tensors elsewhere")
@every_method
def test_saved_tensors_that_hooks_give_out_once(method: str) -> None:
    """As offloading does that frees the host's copy."""
    module, batches = three_layers(), [x_of() for _ in range(3)]
    truth = accumulate(module, batches)
    backward = choose_method(module, method=method, self_check="numeric")
    store: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> int:
        store[len(store)] = tensor
        return len(store) - 1

    for index, inputs in enumerate(batches):
        store.clear()
        [x] = inputs
        with backward.forward(), saved_tensors_hooks(pack, store.pop):
            y = module(x)
        saved = backward.save(microbatch=index, inputs=[x], outputs=[y])
        backward.input(saved, truth.output_grads[index])
        backward.weight(saved)
    assert_same_parameters(module, truth.module)


class TransformInside(nn.Module):
    """A product without a recipe, and code that allows no hooks on saved tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Bilinear(4, 4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.grad(lambda z: torch.tanh(z).sum())(self.mix(x, x))


def test_code_that_allows_no_hooks_is_told_what_to_do() -> None:
    module = TransformInside().to(DTYPE)
    backward = choose_method(module, stage=6)
    one_step(backward, module, *x_of())
    with pytest.raises(BackwardMethodError, match=r'stage 6 runs code .* method="deferred"'):
        one_step(backward, module, *x_of())
    backward = choose_method(module, method="deferred", stage=6)
    with pytest.warns(UserWarning, match="not split"):
        one_step(backward, module, *x_of())
    one_step(backward, module, *x_of())


class NormInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


def test_the_numeric_check_undoes_what_a_recomputation_does_to_buffers() -> None:
    module, batches = NormInside().to(DTYPE), [x_of() for _ in range(2)]
    truth = accumulate(module, batches)
    run_split(choose_method(module, self_check="numeric"), module, batches, truth)
    for mine, theirs in zip(module.buffers(), truth.module.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs)


class NormedConvolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.utils.parametrizations.weight_norm(nn.Conv1d(16, 16, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


def test_a_convolution_does_not_hold_its_weight() -> None:
    module = NormedConvolution().to(DTYPE)
    [x] = x_of(2, 16, 5)
    backward = choose_method(module)
    saved = run_forward(backward, module, [x], 0)
    backward.input(saved, [torch.ones(2, 16, 3, dtype=DTYPE)])
    norms = 16  # that the weight is made with
    assert backward.held_bytes(saved) == 8 * (2 * 16 * 5 + 2 * 16 * 3 + norms)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 1  # an optimizer step of somebody in a hurry
    plain = nn.Conv1d(3, 3, 3)
    backward = choose_method(plain)
    saved = run_forward(backward, plain, [torch.randn(1, 3, 5, requires_grad=True)], 0)
    backward.input(saved, [torch.ones(1, 3, 3)])
    with torch.no_grad():
        plain.weight += 1
    backward.weight(saved)
