"""The backward functions: what torch's give, and an ordinary backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.pipelining._backward as theirs
from torch import nn

import pipeloom.torch_api._backward as ours


def make() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    x, grad = (torch.randn(3, 4, dtype=torch.float64) for _ in range(2))
    return module, x.requires_grad_(), grad


def truth() -> dict[str, torch.Tensor]:
    module, x, grad = make()
    module(x).backward(grad)
    assert x.grad is not None
    return {"x": x.grad, **{k: p.grad for k, p in module.named_parameters() if p.grad is not None}}


def require_equal(module: nn.Module, found: Any) -> None:
    expected = truth()
    assert torch.allclose(found, expected.pop("x"))
    for key, parameter in module.named_parameters():
        assert parameter.grad is not None
        assert torch.allclose(parameter.grad, expected[key])


@pytest.mark.parametrize("package", [theirs, ours])
def test_full(package: Any) -> None:
    module, x, grad = make()
    output = module(x)
    gradients = package.stage_backward((output, None), (grad, None), [x, 3])
    require_equal(module, gradients[0])
    assert gradients[1] is None
    assert x.grad is None


@pytest.mark.parametrize("package", [theirs, ours])
def test_input_then_weight(package: Any) -> None:
    module, x, grad = make()
    output = module(x)
    found, rest = package.stage_backward_input([output], [grad], [x], module.parameters())
    assert all(p.grad is None or not p.grad.any() for p in module.parameters())
    grads = package.stage_backward_weight(module.parameters(), rest)
    require_equal(module, found[0])
    assert len(grads) == 4


@pytest.mark.parametrize("package", [theirs, ours])
def test_of_a_loss(package: Any) -> None:
    module, x, _ = make()
    loss = (module(x) ** 2).mean()
    found = package.stage_backward(loss, None, [x])
    other, y, _ = make()
    (other(y) ** 2).mean().backward()
    assert y.grad is not None
    assert torch.allclose(found[0], y.grad)


def test_a_branch_of_parameters_alone() -> None:
    """Torch's weight backward forgets what no input leads to."""

    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, dtype=torch.float64))
            self.bias = nn.Parameter(torch.full((4,), 2.0, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight + torch.tanh(self.bias)

    module = Branch()
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    output = module(x)
    grad = torch.ones_like(output)
    _, rest = ours.stage_backward_input([output], [grad], [x], module.parameters())
    ours.stage_backward_weight(module.parameters(), rest)
    expected = Branch()
    expected(x).backward(grad)
    for one, other in zip(module.parameters(), expected.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.allclose(one.grad, other.grad)


def test_dictionaries_and_frozen_outputs() -> None:
    x = torch.ones(2, requires_grad=True)
    output = {"a": 2 * x, "b": torch.zeros(2)}
    assert ours.stage_backward(output, {"a": torch.ones(2), "b": None}, [x])[0].tolist() == [2, 2]
    assert ours.stage_backward([torch.zeros(2)], [None], [x]) == (None,)
    with pytest.raises(AssertionError, match="Expected 1 gradients"):
        ours.stage_backward([2 * x], [torch.ones(2)] * 2, [x])
