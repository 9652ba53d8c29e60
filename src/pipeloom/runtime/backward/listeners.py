"""Who listens where a parameter's gradient is accumulated?

Gradient reducers hook the node of the autograd graph at which a parameter's gradient arrives. A
parameter that W adds to in place must therefore be *passed*: its node is run once with nothing to
add. That costs a few microseconds a parameter and is in vain where nobody listens, as is usual.

Such a node lives as long as somebody holds it, a graph or whoever hooked it, and its hooks die
with it. So before a forward, while no graph of the stage is alive, every node gets a mark and is
let go::

    mark ──► node held by a reducer: lives on, and is found marked in the graph of the forward
         ──► node held by nobody:    gone; the forward makes a new one, without a mark

Whatever is not known to be silent is passed: a parameter that was not marked, or any parameter if
somebody registered a hook, anywhere, since the marks were made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from pipeloom.runtime.backward.method import SavedMicrobatch

__all__ = ["Listeners", "pass_parameters"]

MARK = "pipeloom: was there before the forward"


class _Pass(torch.autograd.Function):
    """Reaches parameters' places in the graph without a gradient."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        ctx.count = len(parameters)
        return torch.empty(())

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[None, ...]:
        return (None,) * ctx.count


def pass_parameters(parameters: Sequence[Tensor]) -> None:
    """Run the parameters' accumulation once, with nothing to add."""
    if parameters:
        with torch.enable_grad():
            passed = _Pass.apply(*parameters)
        torch.autograd.backward(passed, torch.empty(()))


class Listeners:
    """What is known of those who listen at the parameters of one stage."""

    def __init__(self) -> None:
        self._in_flight: WeakSet[SavedMicrobatch] = WeakSet()
        self._parameters: Sequence[Tensor] = ()  # those that the last W added to in place
        self._marked: dict[int, Tensor] = {}
        self._num_handles = -1

    def before_forward(self) -> None:
        """Mark the nodes that are there, if no graph of the stage holds them."""
        if self._in_flight or not self._parameters:
            return
        with torch.enable_grad():
            passed = _Pass.apply(*self._parameters)
        for node, _ in passed.grad_fn.next_functions:
            node.metadata[MARK] = True
        self._marked = {id(parameter): parameter for parameter in self._parameters}
        self._num_handles = RemovableHandle.next_id

    def begin(self, saved: SavedMicrobatch) -> None:
        """A graph of the stage is alive."""
        self._in_flight.add(saved)

    def end(self, saved: SavedMicrobatch) -> None:
        """Nothing of the microbatch is left."""
        self._in_flight.discard(saved)

    def tell(self, parameters: Mapping[int, tuple[Tensor, Any]]) -> None:
        """Pass those of the parameters, given with their nodes, that somebody may listen at."""
        self._parameters = tuple(parameter for parameter, _ in parameters.values())
        if self._num_handles != RemovableHandle.next_id:
            pass_parameters(self._parameters)
            return
        marked = self._marked
        pass_parameters(
            [
                parameter
                for key, (parameter, node) in parameters.items()
                if key not in marked or MARK in node.metadata
            ]
        )
