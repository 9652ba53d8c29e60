"""Gradients where they come together: several consumers, several copies of a stage, the arguments.

::

    stage 1 ──► stage 2        the gradient of stage 1's output is the sum over 2 and 3,
           └──► stage 3        in the order of its successors

    stage 0 = stage 7          copies of one part of the model: after REDUCE_GRAD each of them
                               has the sum of what both found in this step
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

__all__ = ["CopyExchange", "StepGradients", "add_gradients", "finish_arguments"]


def add_gradients(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """The sum, where a missing gradient is zero and costs nothing."""
    if one is None:
        return other
    if other is None:
        return one
    return one + other


def finish_arguments(gradients: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Bring the gradients of a step's own arguments to where these came from.

    Several stages may have used one argument, and the microbatches are cuts of it: one backward
    through the cutting, and through whatever made the argument, after the step.
    """
    pairs = list(gradients)
    if pairs:
        torch.autograd.backward([tensor for tensor, _ in pairs], [part for _, part in pairs])


class StepGradients:
    """This step's gradients of a module, kept apart from those of earlier steps.

    ``.grad`` from before the step is set aside meanwhile: those who reduce the gradients agree on
    it already, and reducing it again would count it once for each of them.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parameters: list[nn.Parameter] = []
        self._before: list[Tensor | None] = []

    def begin_step(self) -> None:
        """Set aside what the gradients are before the step. Parameters are asked for anew: they
        may have been frozen, thawed or replaced since the last one."""
        self._parameters = [p for p in self._module.parameters() if p.requires_grad]
        self._before = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None

    def contribution(self) -> list[Tensor]:
        """What the step found, to be reduced in place; the last tensor says who found anything."""
        found = [
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for parameter in self._parameters
        ]
        there = [float(parameter.grad is not None) for parameter in self._parameters]
        device = self._parameters[0].device if self._parameters else None
        return [*found, torch.tensor(there, device=device)]

    @torch.no_grad()
    def finish(self, reduced: Sequence[Tensor]) -> None:
        """Add what was set aside; the tensors of ``.grad`` stay the ones users know."""
        *gradients, counts = reduced
        for position, parameter in enumerate(self._parameters):
            # Only where this copy found nothing must the host know whether another one did.
            if parameter.grad is None and counts[position].item():
                parameter.grad = gradients[position].detach()
        self.restore()

    @torch.no_grad()
    def restore(self) -> None:
        """Put back what was set aside, plus what the step found."""
        for parameter, before in zip(self._parameters, self._before, strict=False):
            if before is not None:
                if parameter.grad is not None:
                    before += parameter.grad
                parameter.grad = before
        self._before = []


class CopyExchange:
    """Sums this step's gradients over all copies of one part of the model.

    A rank may hold several of the copies: they are added up here and exchanged as one, when the
    last of them has come.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._copies = [StepGradients(module) for module in modules]
        self._contributions: list[list[Tensor]] = []

    def begin_step(self) -> None:
        """Set aside the gradients from before the step."""
        for copy in self._copies:
            copy.begin_step()

    @torch.no_grad()
    def contribution(self) -> list[Tensor]:
        """What the copies of this rank found together, to be summed in place over the ranks."""
        self._contributions = [copy.contribution() for copy in self._copies]
        total, *others = self._contributions
        for other in others:
            for tensor, part in zip(total, other, strict=True):
                tensor += part
        return total

    @torch.no_grad()
    def finish(self) -> None:
        """Give every copy of this rank the sum."""
        total = self._contributions[0]
        for copy, own in zip(self._copies, self._contributions, strict=True):
            if own is not total:
                for tensor, part in zip(own, total, strict=True):
                    tensor.copy_(part)
            copy.finish(own)
        self._contributions = []

    def restore(self) -> None:
        """After a failure: put back what was set aside."""
        self._contributions = []
        for copy in self._copies:
            copy.restore()
