"""Backward in one piece: B, and the methods that do at I what B does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from pipeloom.errors import BackwardError
from pipeloom.runtime.backward.method import (
    Choice,
    Gradients,
    Root,
    SavedMicrobatch,
    hold_roots,
    require_leaves,
)
from pipeloom.runtime.backward.phases import enter_phase, failed_unless_done, where

__all__ = ["UserWeightBackward", "WholeBackward", "output_roots", "run_full"]


def output_roots(
    outputs: Sequence[Root], output_grads: Sequence[Tensor | None] | None, *, place: str = ""
) -> tuple[list[int], list[Tensor]]:
    """Which outputs the backward starts from, and their gradients.

    Without gradients the outputs are losses: one each. A gradient that nobody sent is zero, and
    so starts nothing.

    >>> y = torch.ones(2, requires_grad=True) * 3
    >>> output_roots([y, y.detach()], [torch.ones(2), None])
    ([0], [tensor([1., 1.])])
    """
    if output_grads is None:
        if not all(isinstance(output, Tensor) for output in outputs):
            raise BackwardError(
                f"{place}: without gradients for them, outputs are losses, but one is "
                "not a scalar; return its mean or its sum, or give the gradients of all outputs"
            )
        losses = [
            (index, output)
            for index, output in enumerate(outputs)
            if isinstance(output, Tensor) and output.requires_grad
        ]
        return [index for index, _ in losses], [torch.ones_like(loss) for _, loss in losses]
    if len(output_grads) != len(outputs):
        raise BackwardError(
            f"{place}: {len(output_grads)} gradients were given for {len(outputs)} outputs; give "
            "one for each, None for zero"
        )
    positions: list[int] = []
    grads: list[Tensor] = []
    for index, (output, grad) in enumerate(zip(outputs, output_grads, strict=True)):
        if grad is not None and (not isinstance(output, Tensor) or output.requires_grad):
            positions.append(index)
            grads.append(grad)
    return positions, grads


def run_full(
    saved: SavedMicrobatch,
    output_grads: Sequence[Tensor | None] | None,
    *,
    stage: int | None,
) -> Gradients:
    """An ordinary backward; ``.grad`` of the inputs stays as it was."""
    place = where(stage, saved.microbatch)
    positions, grads = output_roots(saved.outputs, output_grads, place=place)
    outputs: Any = [saved.outputs[index] for index in positions]
    inputs = saved.inputs
    saved.release_graph()
    before = [leaf.grad for leaf in inputs]
    for leaf in inputs:
        leaf.grad = None
    try:
        if outputs:
            torch.autograd.backward(outputs, grads)
        return [leaf.grad for leaf in inputs]
    finally:
        for leaf, grad in zip(inputs, before, strict=True):
            leaf.grad = grad


class WholeBackward:
    """B at I, nothing at W: always right, and what every other method falls back to."""

    def __init__(self, *, stage: int | None, reason: str) -> None:
        self.stage = stage
        self.choice: Choice | None = Choice("whole", reason)

    def forward(self) -> AbstractContextManager[object]:
        return nullcontext()

    def save(
        self, *, microbatch: int, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> SavedMicrobatch:
        require_leaves(inputs, where(self.stage, microbatch))
        return SavedMicrobatch(microbatch, list(inputs), hold_roots(outputs))

    def full(
        self, saved: SavedMicrobatch, output_grads: Sequence[Tensor | None] | None
    ) -> Gradients:
        enter_phase(saved, "B", self.stage)
        with failed_unless_done(saved, self.stage):
            return run_full(saved, output_grads, stage=self.stage)

    def input(
        self, saved: SavedMicrobatch, output_grads: Sequence[Tensor | None] | None
    ) -> Gradients:
        enter_phase(saved, "I", self.stage)
        with failed_unless_done(saved, self.stage):
            return run_full(saved, output_grads, stage=self.stage)

    def weight(self, saved: SavedMicrobatch) -> None:
        enter_phase(saved, "W", self.stage)

    def held_bytes(self, saved: SavedMicrobatch) -> int:
        return 0


class UserWeightBackward(WholeBackward):
    """The module defers its own weight gradients: ``builder()``, called after each backward of the
    stage, returns the runner that computes what this microbatch left for W.
    """

    def __init__(self, builder: Callable[[], Callable[[], object]], *, stage: int | None) -> None:
        super().__init__(stage=stage, reason="the stage brings its own weight_backward")
        self.choice = Choice("weight_backward", "the stage brings its own weight_backward")
        self.builder = builder

    def full(
        self, saved: SavedMicrobatch, output_grads: Sequence[Tensor | None] | None
    ) -> Gradients:
        gradients = super().full(saved, output_grads)
        with failed_unless_done(saved, self.stage):
            self.builder()()
        return gradients

    def input(
        self, saved: SavedMicrobatch, output_grads: Sequence[Tensor | None] | None
    ) -> Gradients:
        gradients = super().input(saved, output_grads)
        with failed_unless_done(saved, self.stage):
            saved.pending = self.builder()
        return gradients

    def weight(self, saved: SavedMicrobatch) -> None:
        super().weight(saved)
        runner, saved.pending = saved.pending, None
        with failed_unless_done(saved, self.stage):
            runner()
