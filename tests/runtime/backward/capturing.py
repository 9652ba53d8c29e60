"""A stage to capture, and what it is fed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from pipeloom.runtime.backward.cuda_graphs import (
    Recorder,
)

NewRecorder = Callable[[], Recorder]


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(8, 16), nn.LayerNorm(16)
        self.second = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(nn.functional.gelu(self.norm(self.first(x))))


def stage(recorder: Recorder, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Layers().to(recorder.device)


def sample(recorder: Recorder, *, grad: bool = True) -> Tensor:
    return torch.zeros(4, 8, device=recorder.device, requires_grad=grad)


def batches(recorder: Recorder, num: int) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(4, 8, device=recorder.device) for _ in range(num)]
