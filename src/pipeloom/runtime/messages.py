"""Outputs and gradients as messages: what is promised, what is sent, what becomes of it.

::

    first message of an edge in a step     header, then tensors     the header is a promise: shapes,
    later ones                             tensors                  types, what has a gradient

Microbatches whose inputs differ in shape (a batch that does not divide, lists the user split) are
announced by the first header of a step: where the shapes change, a new header goes along.

A gradient that nobody found is not sent where the promise says so. Found later all the same, it
would be lost: that is an error. Not found where one was promised, it is sent as zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from pipeloom.errors import ShapeError
from pipeloom.runtime.boundary import Layout, require_promise
from pipeloom.runtime.stage import Parcel, StageRunner
from pipeloom.runtime.transport.protocol import Edge, Endpoint, Header, Message, TensorSpec

__all__ = [
    "GradientSlot",
    "OutputSlot",
    "Promises",
    "Shapes",
    "Slot",
    "bind_gradient_send",
    "bind_output_send",
]

Shapes = Literal["per_step", "fixed", "per_microbatch"]
SHAPES: Sequence[Shapes] = ("per_step", "fixed", "per_microbatch")


class Promises:
    """When headers travel in the current step, and what they promised. One per rank."""

    def __init__(self, shapes: Shapes) -> None:
        self._shapes = shapes
        self._program: object = None
        #: A header goes with every message.
        self.every = shapes == "per_microbatch"
        #: A header goes with the first message of every edge.
        self.first = True
        #: The rows of the whole batch, where this rank knows them.
        self.batch_size: int | None = None
        #: Per microbatch the number of its form (``Batch.forms``), as far as it is known.
        self.forms: tuple[int, ...] | None = None
        self.outputs: dict[Edge, Layout] = {}
        self.gradients: dict[Edge, Header] = {}
        self.renewed: dict[Edge, frozenset[int]] = {}

    def begin_step(
        self,
        program: object,
        batch_size: int | None,
        forms: tuple[int, ...] | None,
        *,
        training: bool,
        knows_forms: bool,
    ) -> None:
        """``"fixed"`` lasts as long as the same program trains; if its microbatches differ in
        form, headers go with every step all the same. ``knows_forms`` where the batch is cut."""
        lasts = self._shapes == "fixed" and training and program is self._program
        if lasts and knows_forms and forms != self.forms:
            raise ShapeError(
                "with shapes='fixed' every step must cut its batch as the first one did; "
                "say shapes='per_step' if batches may differ"
            )
        if not lasts:
            self.forms = forms
        self.first = not lasts or self.forms is not None
        self._program = program if training else None
        self.batch_size = batch_size

    def learn_forms(self, forms: tuple[int, ...] | None) -> None:
        """A rank that cuts no batch is told by those before it."""
        if forms is not None:
            self.forms = forms

    def find_renewed(self, order: Sequence[int]) -> frozenset[int]:
        """Of the microbatches in the order in which an edge carries them, those that look unlike
        the one before."""
        forms = self.forms
        if forms is None:
            return frozenset()
        return frozenset([m for before, m in pairwise(order) if forms[m] != forms[before]])

    def renews(self, edge: Edge, microbatch: int) -> bool:
        """True if the last header of an edge announced another one for this microbatch."""
        return microbatch in self.renewed.get(edge, ())

    def check_batch(self, size: int | None, stage: int) -> None:
        """The rank that sent an output and this one must have cut the same batch."""
        if size is not None and self.batch_size is not None and size != self.batch_size:
            raise ShapeError(
                f"stage {stage} was given arguments for a batch of {self.batch_size}, but the "
                f"stage before it works on a batch of {size}; declare arguments whose dimension 0 "
                "is not the batch: split={name: REPLICATE}"
            )


class Slot(Protocol):
    """Where a message that was posted for will go."""

    ticket: Any
    waits_for: Edge | int

    def deliver(self, message: Message) -> None:
        """The message is there."""


class OutputSlot:
    """Takes the output of a predecessor."""

    __slots__ = ("_box", "_key", "_promises", "_stage", "ticket", "waits_for")

    def __init__(
        self, edge: Edge, microbatch: int, runner: StageRunner, promises: Promises
    ) -> None:
        self.ticket: Any = None
        self.waits_for: Edge | int = edge
        self._box = runner.received
        self._key = (edge.source, microbatch)
        self._promises = promises
        self._stage = edge.target

    def deliver(self, message: Message) -> None:
        layout, batch_size, forms = message.header.structure
        self._promises.check_batch(batch_size, self._stage)
        self._promises.learn_forms(forms)
        self._box[self._key] = Parcel(message.tensors, layout)


class GradientSlot:
    """Takes the gradient of an output from a successor."""

    __slots__ = ("_box", "_key", "ticket", "waits_for")

    def __init__(
        self, edge: Edge, microbatch: int, runner: StageRunner, promises: Promises
    ) -> None:
        self.ticket: Any = None
        self.waits_for: Edge | int = edge
        self._box = runner.gradients_in
        self._key = (edge.source, microbatch)

    def deliver(self, message: Message) -> None:
        following = iter(message.tensors)
        self._box[self._key] = [
            next(following) if is_there else None for is_there in message.header.structure
        ]


def bind_output_send(
    edge: Edge,
    microbatch: int,
    runner: StageRunner,
    endpoint: Endpoint,
    promises: Promises,
    *,
    order: Sequence[int],
) -> Callable[[], None]:
    """A call that sends one microbatch's output; ``order`` is that of the edge's microbatches."""
    box = runner.outgoing
    key = (edge.target, microbatch)
    post_send = endpoint.post_send
    stage = runner.index
    is_first = microbatch == order[0]

    def send_output() -> None:
        tensors, layout = box.pop(key)
        header = None
        if (is_first and promises.first) or promises.every or promises.renews(edge, microbatch):
            structure = (layout, promises.batch_size, promises.forms)
            header = Header(layout.tensors, structure, promises.find_renewed(order))
            promises.outputs[edge] = layout
            promises.renewed[edge] = header.renewed
        else:
            require_promise(layout, promises.outputs[edge], stage=stage, microbatch=microbatch)
        post_send(edge, microbatch, [tensor.contiguous() for tensor in tensors], header)

    return send_output


def bind_gradient_send(
    edge: Edge,
    microbatch: int,
    runner: StageRunner,
    endpoint: Endpoint,
    promises: Promises,
    *,
    order: Sequence[int],
) -> Callable[[], None]:
    """A call that sends the gradients of one microbatch's inputs."""
    box = runner.gradients_out
    key = (edge.target, microbatch)
    post_send = endpoint.post_send
    is_first = microbatch == order[0]

    def send_gradient() -> None:
        gradients = box.pop(key)
        header = None
        if (is_first and promises.first) or promises.every or promises.renews(edge, microbatch):
            tensors = [gradient for gradient in gradients if gradient is not None]
            specs = tuple([TensorSpec(tuple(tensor.shape), tensor.dtype) for tensor in tensors])
            there = tuple([gradient is not None for gradient in gradients])
            header = Header(specs, there, promises.find_renewed(order))
            promises.gradients[edge] = header
            promises.renewed[edge] = header.renewed
        else:
            tensors = _keep_promise(gradients, promises.gradients[edge], edge, microbatch)
        post_send(edge, microbatch, [tensor.contiguous() for tensor in tensors], header)

    return send_gradient


def _keep_promise(
    gradients: Sequence[Tensor | None], promised: Header, edge: Edge, microbatch: int
) -> list[Tensor]:
    tensors: list[Tensor] = []
    for position, (gradient, is_promised) in enumerate(
        zip(gradients, promised.structure, strict=True)
    ):
        if is_promised:
            if gradient is None:
                spec = promised.tensors[len(tensors)]
                gradient = torch.zeros(spec.shape, dtype=spec.dtype, device=_device_of(gradients))
            tensors.append(gradient)
        elif gradient is not None:
            raise ShapeError(
                f"stage {edge.source} found a gradient for input {position} from stage "
                f"{edge.target} in microbatch {microbatch}, but none in the first microbatch of "
                "the step, so no room was made for it; if inputs are used by some microbatches "
                "only, say shapes='per_microbatch'"
            )
    return tensors


def _device_of(gradients: Sequence[Tensor | None]) -> torch.device | None:
    return next((gradient.device for gradient in gradients if gradient is not None), None)
