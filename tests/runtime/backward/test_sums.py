"""Products added to sums of a wider type, by one call where the device has it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeloom.runtime.backward import choose_method
from pipeloom.runtime.backward.sums import _adds_wide, takes_products

HALF = [torch.bfloat16, torch.float16]


class Device:
    """Gives the CPU the products that only CUDA has, and counts them."""

    def __init__(self, *, error: float = 0.0, in_half: bool = False) -> None:
        self.calls, self.error, self.in_half = 0, error, in_half
        self.library = torch.library.Library("aten", "IMPL")
        for name in ("addmm", "baddbmm"):
            self.library.impl(f"{name}.dtype_out", self.add, "CPU")

    def add(
        self,
        total: Tensor,
        left: Tensor,
        right: Tensor,
        out_dtype: torch.dtype,
        *,
        beta: Any = 1,
        alpha: Any = 1,
        out: Tensor,
    ) -> Tensor:
        self.calls += 1
        assert total.dtype == out_dtype == out.dtype == torch.float32
        product = torch.matmul(left.double(), right.double()).float()  # autocast leaves it alone
        if self.in_half:
            product = product.to(left.dtype).float()
        return out.copy_(beta * total + alpha * product + self.error)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    _adds_wide.cache_clear()
    made = Device(**getattr(request, "param", {}))
    yield made
    made.library._destroy()
    _adds_wide.cache_clear()


def run(module: nn.Module, inputs: list[Tensor], **options: Any) -> list[Tensor]:
    """F of all, then I and W of each; gives the gradients of the outputs."""
    backward = choose_method(module, **options)
    flights, grads = [], []
    for index, x in enumerate(inputs):
        with backward.forward():
            y = module(x)
        grads.append(torch.randn_like(y))
        flights.append(backward.save(microbatch=index, inputs=[x], outputs=[y]))
    for saved, grad in zip(flights, grads, strict=True):
        backward.input(saved, [grad])
        backward.weight(saved)
    return grads


def exact_gradient(inputs: list[Tensor], grads: list[Tensor]) -> Tensor:
    """Of a linear layer's weight, without any rounding on the way."""
    return torch.stack(
        [g.double().mT @ x.detach().double() for x, g in zip(inputs, grads, strict=True)]
    ).sum(0)


def off_by(gradient: Tensor, truth: Tensor) -> float:
    return float((gradient.double() - truth).abs().max() / truth.abs().max())


@pytest.mark.parametrize("dtype", HALF)
def test_products_are_not_rounded_before_they_are_added(device: Device, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = nn.Linear(24, 40, bias=False, dtype=dtype)
    inputs = [torch.randn(16, 24, dtype=dtype, requires_grad=True) for _ in range(3)]
    grads = run(module, inputs, accumulate_fp32=True)
    assert module.weight.grad is not None
    assert module.weight.grad.dtype == torch.float32
    assert device.calls == 1 + 3  # the first to try it
    assert off_by(module.weight.grad, exact_gradient(inputs, grads)) < 1e-6


@pytest.mark.parametrize("dtype", HALF)
def test_without_such_a_call_they_are(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = nn.Linear(24, 40, bias=False, dtype=dtype)
    inputs = [torch.randn(16, 24, dtype=dtype, requires_grad=True) for _ in range(3)]
    grads = run(module, inputs, accumulate_fp32=True)
    assert module.weight.grad is not None
    assert 1e-5 < off_by(module.weight.grad, exact_gradient(inputs, grads)) < 1e-2


@pytest.mark.parametrize("device", [{"error": 1.0}, {"in_half": True}], indirect=True)
def test_a_device_that_computes_something_else_is_not_used(device: Device) -> None:
    total = torch.zeros(3, 3)
    assert not takes_products(total.dtype, torch.ones(3, 3, dtype=torch.bfloat16))
    assert device.calls == 1
    assert not takes_products(total.dtype, torch.ones(4, 4, dtype=torch.bfloat16))
    assert device.calls == 1, "asked once"
    assert takes_products(total.dtype, total)
    assert not takes_products(torch.float64, total)
    assert not takes_products(torch.bfloat16, total)


class Experts(nn.Module):
    """Batched products, one with a transposed weight."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(2, 8, 12))
        self.down = nn.Parameter(torch.randn(2, 8, 12))

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(torch.tanh(torch.bmm(x, self.up)), self.down.mT)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("batched", [False, True])
def test_autocast(device: Device, batched: bool, compiled: bool) -> None:
    """Weights in float32, products in bfloat16: the casts between them take no part."""
    torch.manual_seed(0)
    module: nn.Module = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8))
    if batched:
        module = Experts()
    called = torch.compile(module, backend="pipeloom_eager") if compiled else module
    inputs = [torch.randn(2, 6, 8, requires_grad=True) for _ in range(3)]
    with torch.autocast("cpu", torch.bfloat16):
        grads = run(called, inputs, hold_at_most=None, self_check="numeric")
    assert device.calls == 1 + 3 * 2
    found = {name: p.grad for name, p in module.named_parameters()}
    module.zero_grad()
    for x, grad in zip(inputs, grads, strict=True):
        with torch.autocast("cpu", torch.bfloat16):
            y = module(x)
        y.backward(grad)
    for name, parameter in module.named_parameters():
        grad, plain = found[name], parameter.grad
        assert grad is not None
        assert plain is not None
        assert grad.dtype == torch.float32
        assert off_by(grad, plain) < 2**-7, "two roundings to bfloat16"
        if parameter.dim() > 1:
            assert (grad != grad.bfloat16()).any(), "not rounded"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", HALF)
def test_on_a_device(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = nn.Linear(24, 40, bias=False, dtype=dtype, device="cuda")
    inputs = [torch.randn(16, 24, dtype=dtype, device="cuda", requires_grad=True) for _ in range(3)]
    grads = run(module, inputs, accumulate_fp32=True)
    assert module.weight.grad is not None
    is_wide = takes_products(torch.float32, grads[0])
    limit = 1e-6 if is_wide else 1e-2
    assert off_by(module.weight.grad, exact_gradient(inputs, grads)) < limit
