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
somebody registered a hook, anywhere, since the marks were made. A reducer that is made while graphs
of the stage are alive leaves no such trace; it is heard of from when none is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import Tensor

from pipeloom.runtime.backward.hook_count import HookCount
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
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if trained:
        with torch.enable_grad():
            passed = _Pass.apply(*trained)
        torch.autograd.backward(passed, torch.empty(()))


class Listeners:
    """What is known of those who listen at the parameters of one stage."""

    def __init__(self, hooks: HookCount) -> None:
        self._hooks = hooks
        self._in_flight: WeakSet[SavedMicrobatch] = WeakSet()
        # Those that the last W added to in place; parameters made for one forward may go.
        self._parameters: list[ref[Tensor]] = []
        self._marked: dict[int, ref[Tensor]] = {}
        self._num_hooks = -1

    def before_forward(self) -> None:
        """Mark the nodes that are there, if no graph of the stage holds them."""
        if self._in_flight or not self._parameters:
            return
        alive = (reference() for reference in self._parameters)
        trained = [p for p in alive if p is not None and p.requires_grad]
        if not trained:
            return
        with torch.enable_grad():
            passed = _Pass.apply(*trained)
        for node, _ in passed.grad_fn.next_functions:
            node.metadata[MARK] = True
        self._marked = {id(parameter): ref(parameter) for parameter in trained}
        self._num_hooks = self._hooks.current()

    def begin(self, saved: SavedMicrobatch) -> None:
        """A graph of the stage is alive."""
        abandoned = [one for one in self._in_flight if one.microbatch == saved.microbatch]
        if abandoned:  # by a step that failed; who came to listen since is not known
            self._in_flight.difference_update(abandoned)
            self._num_hooks = -1
        self._in_flight.add(saved)

    def end(self, saved: SavedMicrobatch) -> None:
        """Nothing of the microbatch is left."""
        self._in_flight.discard(saved)

    def tell(self, parameters: Mapping[int, tuple[Tensor, Any]]) -> None:
        """Pass those of the parameters, given with their nodes, that somebody may listen at."""
        self._parameters = [ref(parameter) for parameter, _ in parameters.values()]
        nothing_known = self._num_hooks != self._hooks.current()
        pass_parameters(
            [
                parameter
                for key, (parameter, node) in parameters.items()
                if nothing_known or not self._is_silent(key, parameter, node)
            ]
        )

    def _is_silent(self, key: int, parameter: Tensor, node: Any) -> bool:
        marked = self._marked.get(key)
        return marked is not None and marked() is parameter and MARK not in node.metadata
