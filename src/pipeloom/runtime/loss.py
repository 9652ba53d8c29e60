"""The loss of a step, and how each microbatch's share of it is scaled.

::

    default        loss_fn(output, target) is a mean:    step's loss = Σ loss_m / M
    loss_weight    loss_fn(output, target) is a sum:     step's loss = Σ loss_m / Σ weight(target_m)

The scaling happens here, in the loss and before its backward; no gradient is rescaled afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pipeloom.errors import ShapeError

__all__ = ["LossFunction", "StepLoss"]

LossFunction = Callable[..., Tensor]


class StepLoss:
    """Computes and keeps the losses of one step on the rank of a last stage.

    Microbatches may come in any order: each loss is kept under its number.
    """

    def __init__(
        self,
        loss_fn: LossFunction,
        *,
        targets: Sequence[Any],
        loss_weight: Callable[[Any], float | Tensor] | None = None,
        loss_kwargs: Mapping[str, Any] | None = None,
        require_finite: bool = False,
    ) -> None:
        self._loss_fn = loss_fn
        self._targets = targets
        self._kwargs = dict(loss_kwargs or {})
        self._require_finite = require_finite
        self.total_weight = _add_weights(loss_weight, targets)
        #: What ``loss_fn`` returned, by microbatch.
        self.losses: dict[int, Tensor] = {}

    def compute(self, output: Any, microbatch: int) -> Tensor:
        """The microbatch's share of the step's loss, ready for its backward."""
        loss: Any = self._loss_fn(output, self._targets[microbatch], **self._kwargs)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else repr(type(loss))
            raise ShapeError(
                f"loss_fn must return one number as a tensor, not {what}; take the mean or, with "
                "loss_weight, the sum"
            )
        if loss.is_complex():
            raise ShapeError(
                f"loss_fn must return a real number, not one of type {loss.dtype}; take its "
                "absolute value or its real part"
            )
        # A copy: the storage behind a mean may be as large as what it was taken of.
        kept = loss.detach().clone()
        self.losses[microbatch] = kept.reshape(()) if kept.dim() else kept
        if self._require_finite and not torch.isfinite(loss).item():
            raise FloatingPointError(f"the loss of microbatch {microbatch} is {loss.item()}")
        share: Tensor = loss / self.total_weight
        return share


def _add_weights(
    loss_weight: Callable[[Any], float | Tensor] | None, targets: Sequence[Any]
) -> float | Tensor:
    if loss_weight is None:
        return len(targets)
    total: float | Tensor = sum(loss_weight(target) for target in targets)
    # A tensor on a device is not asked: that would wait for the device.
    if (not isinstance(total, Tensor) or total.device.type == "cpu") and float(total) == 0:
        raise ShapeError("loss_weight gave 0 for every microbatch; the step's loss has no scale")
    return total
