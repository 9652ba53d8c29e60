"""What a step gives back, and how the losses of all ranks become known to each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeloom.runtime.loss import StepLoss

__all__ = ["StepResult", "share_losses", "type_of_losses"]


@dataclass(frozen=True)
class StepResult:
    """The outcome of ``step`` or ``eval``.

    ``loss`` and ``losses`` are detached, and ``None`` where there is no loss or it was not shared;
    ``output`` is ``None`` unless it was asked for and a last stage is on this rank.
    """

    #: The step's loss: the mean over microbatches, or with ``loss_weight`` the weighted sum.
    loss: Tensor | None
    #: What ``loss_fn`` returned, by microbatch.
    losses: tuple[Tensor, ...] | None
    #: The outputs of the last stage, merged.
    output: Any = None


def share_losses(
    own: Mapping[int, StepLoss],
    *,
    num_microbatches: int,
    weighing_stage: int,
    device: torch.device,
    sum_over_processes: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """The step's loss and those of the microbatches, from the last stages to every process.

    They travel as one sum in double precision, which holds every type of loss exactly: each entry
    comes from one rank, the others add zero. Returns the step's loss, the losses, their number.

    ::

        [ loss_0, loss_1, …, loss_M−1, total weight, number of losses ]
    """
    values = torch.zeros(num_microbatches + 2, dtype=torch.float64, device=device)
    for stage, loss in own.items():
        if not loss.losses:
            continue
        order = sorted(loss.losses)
        stacked = torch.stack([loss.losses[microbatch] for microbatch in order])
        # A chain's microbatches are consecutive: no index has to travel to the device.
        values[order[0] : order[-1] + 1] = stacked.to(values)
        values[-1] += len(order)
        if stage == weighing_stage:  # one of them, and one that has losses
            values[-2] = loss.total_weight
    values = sum_over_processes(values)
    total = values[:num_microbatches].sum() / values[-2]
    return total, values[:num_microbatches], values[-1]


def type_of_losses(own: Mapping[int, StepLoss]) -> torch.dtype | None:
    """The type of the losses that this process knows."""
    for loss in own.values():
        for value in loss.losses.values():
            return value.dtype
    return None
