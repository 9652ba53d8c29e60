"""What a step gives back, and how the losses of all ranks become known to each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeloom.ir.schedule import Schedule
from pipeloom.ir.topology import Topology
from pipeloom.runtime.loss import StepLoss
from pipeloom.runtime.microbatches import merge_outputs
from pipeloom.runtime.options import Options
from pipeloom.runtime.transport.protocol import Transport

__all__ = ["Results", "StepResult"]


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


class Results:
    """Makes the results of one pipeline's steps: shares the losses, merges the outputs."""

    def __init__(
        self, transport: Transport, options: Options, topology: Topology, device: torch.device
    ) -> None:
        self._transport = transport
        self._options = options
        self._topology = topology
        self._device = device
        #: What ``loss_fn`` returns, agreed on once between the processes.
        self._loss_type: torch.dtype | None = None
        self._loss_type_is_known = False

    def make(
        self, program: Schedule, losses: Mapping[int, StepLoss], outputs: Mapping[int, Any]
    ) -> StepResult:
        """The result of a step, from the losses and the kept outputs of this process."""
        output = None
        if outputs:
            output = merge_outputs([outputs[m] for m in sorted(outputs)], self._options.merge)
        if self._options.loss_fn is None or not (self._options.share_loss or losses):
            return StepResult(None, None, output)
        share = self._transport.sum_over_processes if self._options.share_loss else _alone
        num_microbatches = program.num_microbatches
        total, each, known = _share_losses(
            losses,
            num_microbatches=num_microbatches,
            weighing_stage=self._topology.last_stages[
                self._topology.chain_of_microbatch(0, num_microbatches)
            ],
            device=self._device,
            sum_over_processes=share,
        )
        if not program.has_backward and not known.item():
            return StepResult(None, None, output)
        loss_type = self._find_loss_type(losses)
        return StepResult(total.to(loss_type), each.to(loss_type).unbind(), output)

    def _find_loss_type(self, losses: Mapping[int, StepLoss]) -> torch.dtype:
        own = _type_of_losses(losses)
        if not self._loss_type_is_known and self._options.share_loss:
            types = self._transport.gather_objects([own] * len(self._transport.local_ranks))
            self._loss_type = next((one for one in types if one is not None), None)
            self._loss_type_is_known = True
        return own or self._loss_type or torch.float64


def _alone(values: Tensor) -> Tensor:
    return values


def _share_losses(
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


def _type_of_losses(own: Mapping[int, StepLoss]) -> torch.dtype | None:
    """The type of the losses that this process knows."""
    for loss in own.values():
        for value in loss.losses.values():
            return value.dtype
    return None
