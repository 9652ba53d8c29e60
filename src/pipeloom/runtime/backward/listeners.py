"""Who listens where a parameter's gradient is accumulated?

Gradient reducers hook the node of the autograd graph at which a parameter's gradient arrives. A
parameter that W adds to in place must therefore be *passed*: its node is run once with nothing to
add. That costs a few microseconds a parameter and is in vain where nobody listens, as is usual.

Such a node lives as long as somebody holds it, a graph or whoever hooked it, and its hooks die
with it. So before a forward, while no graph of the stage is alive, every node gets a mark and is
let go::

    mark ──► node held by a reducer: lives on, and is found marked in the graph of the forward
         ──► node held by nobody:    gone; the forward makes a new one, without a mark

Who is not known to be silent is passed: all parameters if they are not those that were marked, or
if somebody registered a hook, anywhere, since then. Reducers in C++ register hooks that nobody
counts, so where there are process groups, nodes are marked anew each time. A reducer that is made
while graphs of the stage are alive leaves no such trace; it is heard of from when none is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
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
        self._in_flight: dict[int, ref[SavedMicrobatch]] = {}
        # Those that W has added to in place; parameters made for one forward may go.
        self._parameters: dict[int, ref[Tensor]] = {}
        self._marked: dict[int, ref[Tensor]] = {}
        self._num_hooks = -1

    def before_forward(self) -> None:
        """Mark the nodes that are there, if no graph of the stage holds them."""
        if not self._parameters or any(held() is not None for held in self._in_flight.values()):
            return
        if self._is_known() and not _reducers_may_come():
            return
        alive = [reference() for reference in self._parameters.values()]
        trained = [p for p in alive if p is not None and p.requires_grad]
        if len(trained) < len(alive):  # some are gone, or frozen: begin anew
            self._parameters = {}
            return
        with torch.enable_grad():
            passed = _Pass.apply(*trained)
        for node, _ in passed.grad_fn.next_functions:
            node.metadata[MARK] = True
        self._marked = self._parameters
        self._num_hooks = self._hooks.current()

    def begin(self, saved: SavedMicrobatch) -> None:
        """A graph of the stage is alive."""
        before = self._in_flight.get(saved.microbatch)
        if before is not None and before() is not None:
            self._num_hooks = -1  # a step that failed left it; who came to listen is not known
        self._in_flight[saved.microbatch] = ref(saved)

    def end(self, saved: SavedMicrobatch) -> None:
        """Nothing of the microbatch is left."""
        self._in_flight.pop(saved.microbatch, None)

    def tell(self, parameters: Mapping[int, tuple[Tensor, Any]]) -> None:
        """Pass those of the parameters, given with their nodes, that somebody may listen at."""
        if parameters.keys() <= self._parameters.keys():
            if self._is_known():
                pass_parameters([one for one, node in parameters.values() if MARK in node.metadata])
                return
        else:
            new = {key: ref(one) for key, (one, _) in parameters.items()}
            self._parameters = {**self._parameters, **new}
        pass_parameters([one for one, _ in parameters.values()])

    def _is_known(self) -> bool:
        """Whether nobody whose hooks are counted has come since the nodes were marked."""
        return self._marked is self._parameters and self._num_hooks == self._hooks.current()


def _reducers_may_come() -> bool:
    """Whether there may be reducers, whose hooks nobody counts, since they are not in Python."""
    return dist.is_available() and dist.is_initialized()
