"""Small stages and what they are fed, for tests of single points."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pipeloom.runtime.backward import BackwardMethod
from tests.runtime.backward.harness import run_forward
from tests.runtime.backward.zoo import DTYPE

METHODS = ["auto", "deferred", "graph", "whole"]
every_method = pytest.mark.parametrize("method", METHODS)


def x_of(*shape: int, grad: bool = True) -> list[Tensor]:
    return [torch.randn(shape or (3, 4), dtype=DTYPE, requires_grad=grad)]


def three_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).to(DTYPE)


def one_step(backward: BackwardMethod, module: nn.Module, *inputs: Tensor) -> None:
    saved = run_forward(backward, module, list(inputs), 0)
    backward.input(saved, [torch.ones(3, 4, dtype=DTYPE)])
    backward.weight(saved)
