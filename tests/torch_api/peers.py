"""Stand-in stages of torch's package and of ours, and schedules made of them."""

from __future__ import annotations

import importlib
from typing import Any

import torch

TORCH, OURS = "torch.distributed.pipelining", "pipeloom.torch_api"
SINGLE = ("Schedule1F1B", "ScheduleGPipe")
MULTI = (
    "ScheduleInterleaved1F1B",
    "ScheduleLoopedBFS",
    "ScheduleInterleavedZeroBubble",
    "ScheduleZBVZeroBubble",
    "ScheduleDualPipeV",
)


def stand_in(package: str, stage_index: int, num_stages: int, ranks: int, rank: int = 0) -> Any:
    """What programs write: a subclass that sets a few attributes and never calls ``__init__``."""
    base = importlib.import_module(f"{package}.stage")._PipelineStageBase

    class StandIn(base):  # type: ignore[misc]
        def __init__(self) -> None:
            self.submod = torch.nn.Identity()
            self.num_stages = num_stages
            self.group_size = ranks
            self.group_rank = rank
            self.group = None
            self.stage_index = stage_index
            self.device = torch.device("cpu")

    StandIn.__abstractmethods__ = frozenset()
    return StandIn()


def construct(
    package: str, name: str, ranks: int, microbatches: int, chunks: int = 2, **options: Any
) -> Any:
    """A schedule of stand-in stages."""
    schedules = importlib.import_module(f"{package}.schedules")
    chunks = 1 if name in SINGLE else chunks
    stages = [stand_in(package, i, ranks * chunks, ranks) for i in range(chunks)]
    loss_fn = torch.nn.functional.mse_loss
    given = stages[0] if name in SINGLE else stages
    return getattr(schedules, name)(given, microbatches, loss_fn=loss_fn, **options)


def as_text(order: dict[int, Any]) -> dict[int, list[str]]:
    return {
        rank: ["" if action is None else str(action) for action in row]
        for rank, row in order.items()
    }


def convert(order: dict[int, Any]) -> dict[int, Any]:
    """Torch's actions as ours."""
    action = importlib.import_module(f"{OURS}.schedules")._Action
    return {
        rank: [None if one is None else action.from_str(str(one)) for one in row]
        for rank, row in order.items()
    }
