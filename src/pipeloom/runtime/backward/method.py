"""The interface every way of running a stage's backward keeps."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pipeloom.errors import BackwardError

__all__ = [
    "BackwardMethod",
    "Choice",
    "Gradients",
    "Root",
    "SavedMicrobatch",
    "SplitBackwardWarning",
    "hold_roots",
    "require_leaves",
]

Gradients = list[Tensor | None]

#: Where a backward starts: an output, or only its place in the graph, so that the output's own
#: memory can go once the next stage has it.
Root = Tensor | GradientEdge


def require_leaves(inputs: Sequence[Tensor], place: str) -> None:
    """A gradient is found at a leaf; for another tensor it would go on to what that is made of."""
    made = [at for at, one in enumerate(inputs) if one.requires_grad and not one.is_leaf]
    if made:
        raise BackwardError(
            f"{place}: inputs {', '.join(map(str, made))} are results of other operations, so "
            "their gradients would go on to those; pass x.detach().requires_grad_()"
        )


def hold_roots(outputs: Sequence[Tensor]) -> list[Root]:
    """Keep the graph of outputs without keeping the outputs; losses are kept, being one number."""
    return [
        get_gradient_edge(output) if output.grad_fn is not None and output.numel() > 1 else output
        for output in outputs
    ]


class SplitBackwardWarning(UserWarning):
    """A stage's backward could not be split as asked; its gradients are right all the same."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Which method a stage's backward uses, and why.

    ``deferred`` names the parameters whose gradients are computed at W, ``computed_in_input`` those
    whose gradients come out of I (they reach ``.grad`` at W all the same).
    """

    method: str
    reason: str
    deferred: tuple[str, ...] = ()
    computed_in_input: tuple[str, ...] = ()


@dataclass(slots=True, eq=False, weakref_slot=True)
class SavedMicrobatch:
    """What a stage keeps of one microbatch from F until its backward is done.

    ::

        F ──► inputs, outputs ──► I ──► pending ──► W ──► nothing
    """

    microbatch: int
    inputs: list[Tensor]
    outputs: list[Root]
    pending: Any = None
    done: str = "F"
    num_hooks: int = 0  # that were registered before F
    first_node: int = 0  # the number that the first node of F could have

    def release_graph(self) -> None:
        """Forget inputs and outputs, and with them the autograd graph."""
        self.inputs = []
        self.outputs = []


class BackwardMethod(Protocol):
    """How one stage runs B, or I and W."""

    @property
    def choice(self) -> Choice | None:
        """What was chosen and why; ``None`` before the first forward was saved."""

    def forward(self) -> AbstractContextManager[object]:
        """Enter around the stage's forward."""

    def save(
        self, *, microbatch: int, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> SavedMicrobatch:
        """Keep what the backward of this microbatch needs."""

    def full(
        self, saved: SavedMicrobatch, output_grads: Sequence[Tensor | None] | None
    ) -> Gradients:
        """B: gradients of the inputs; those of the parameters are in ``.grad``."""

    def input(
        self, saved: SavedMicrobatch, output_grads: Sequence[Tensor | None] | None
    ) -> Gradients:
        """I: gradients of the inputs; keeps in ``saved`` what W needs and frees all else."""

    def weight(self, saved: SavedMicrobatch) -> None:
        """W: adds the gradients of the parameters to ``.grad``."""

    def held_bytes(self, saved: SavedMicrobatch) -> int:
        """Bytes of the storages that ``saved`` keeps alive between I and W, weights excluded."""
