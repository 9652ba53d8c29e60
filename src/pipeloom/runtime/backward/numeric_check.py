"""The numeric self-check: a full backward of the same microbatch, which leaves no trace.

::

    F ─► full backward, graph kept ─► gradients of inputs and parameters ─┐
     └─► I, and W's products ───────────────────────────────────────────┬─┴─► equal? go on with W
                                                                        └───► else the full ones
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipeloom.runtime.backward.accumulate import weight_gradients
from pipeloom.runtime.backward.input_half import run_engine
from pipeloom.runtime.backward.method import Gradients
from pipeloom.runtime.backward.pending import Gradient, Pending
from pipeloom.runtime.backward.plan import Plan
from pipeloom.runtime.backward.self_check import differing, muted_hooks
from pipeloom.runtime.backward.walk import Graph

__all__ = ["Reference", "run_reference"]


@dataclass(frozen=True, slots=True)
class Reference:
    """What a full backward found for one microbatch."""

    graph: Graph
    plan: Plan
    of_inputs: Gradients
    of_leaves: dict[int, Tensor | None]

    def differences(self, gradients: Gradients, pending: Pending) -> tuple[list[int], bool]:
        """Parameters' nodes for which a split gives something else, and whether inputs differ."""
        leaves = self.plan.leaves
        with muted_hooks([self.graph.nodes[leaf].variable for leaf in leaves]):
            found = weight_gradients(pending)
        types = self._types_above_leaves()
        wrong = [
            leaf
            for leaf in leaves
            if differing(self.of_leaves[leaf], found.get(leaf), types.get(leaf, ()))
        ]
        return wrong, any(map(differing, self.of_inputs, gradients))

    def _types_above_leaves(self) -> dict[int, set[torch.dtype]]:
        """The types of what hangs together with each parameter and no data."""
        group = self.plan.group
        types: dict[int, set[torch.dtype]] = {}
        for index, number in group.items():
            made = getattr(self.graph.nodes[index], "_input_metadata", ())
            types.setdefault(number, set()).update(one.dtype for one in made)
        return {leaf: types[group[leaf]] for leaf in self.plan.leaves if leaf in group}

    def pending(self) -> Pending:
        """What W adds if it is to add these."""
        return Pending(
            self.plan,
            {index: self.graph.nodes[index] for index in self.plan.passed_later},
            gradients=[
                Gradient((leaf, 0), grad)
                for leaf, grad in self.of_leaves.items()
                if grad is not None
            ],
        )


def run_reference(
    graph: Graph,
    plan: Plan,
    module: nn.Module,
    inputs: Sequence[Tensor],
    grads: Sequence[Tensor],
) -> Reference:
    """A full backward with nothing added or freed, and random numbers and buffers as before."""
    leaves = [(leaf, 0) for leaf in plan.leaves]
    devices = {graph.nodes[leaf].variable.device for leaf in plan.leaves}
    on_cuda = [device for device in devices if device.type == "cuda"]
    with torch.random.fork_rng(devices=on_cuda), _buffers_as_before(module):
        of_inputs, found = run_engine(graph, inputs, grads, leaves, mute=leaves, keep_graph=True)
    return Reference(graph, plan, of_inputs, dict(zip(plan.leaves, found, strict=True)))


@contextmanager
def _buffers_as_before(module: nn.Module) -> Iterator[None]:
    """Undo what a checkpoint's recomputation does to buffers."""
    kept = [(buffer, buffer.clone()) for buffer in module.buffers()]
    yield
    with torch.no_grad():
        for buffer, before in kept:
            if not torch.equal(buffer, before):
                buffer.copy_(before)
