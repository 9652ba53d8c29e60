"""What weight products need of what the forward saved, taken before I frees it.

::

    before the engine runs     the operands that nodes have
    as it comes to a node      those that a checkpoint recomputes, or the host gives back
    after it                   those of nodes that it only brought a gradient to
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial

from torch import Tensor
from torch.utils.checkpoint import GraphExecGroup

from pipeloom.runtime.backward.checkpointing import allow_second_use
from pipeloom.runtime.backward.plan import Plan
from pipeloom.runtime.backward.recipes import Operands
from pipeloom.runtime.backward.versions import versions
from pipeloom.runtime.backward.walk import Edge, Graph

__all__ = ["Taken"]


class Taken:
    """The operands of one microbatch's products, by the products' places in the plan."""

    def __init__(self, graph: Graph, plan: Plan) -> None:
        self._nodes, self._plan = graph.nodes, plan
        self._operands: dict[int, Operands] = {}
        for position, use in enumerate(plan.deferred):
            if not use.packed:
                self._take(position)
        self._tensors = _tensors(self._operands.values())
        self._versions = versions(self._tensors)

    def __getitem__(self, position: int) -> Operands:
        return self._operands[position]

    def one_recomputation(self) -> AbstractContextManager[object]:
        """For the engine's run and what is taken after it, if both need the same checkpoint."""
        alone = any(not nodes for nodes in self._plan.taken_by.values())
        return _one_recomputation() if alone else nullcontext()

    @contextmanager
    def taken_as_nodes_run(self) -> Iterator[None]:
        """While the engine runs, take what is packed."""
        with ExitStack() as registered:
            for position, places in self._plan.taken_by.items():
                for place in places:
                    handle = self._nodes[place].register_prehook(partial(self._unpack, position))
                    registered.callback(handle.remove)
            yield

    def take_the_rest(self, positions: Sequence[int]) -> None:
        """Take what the engine did not come to, although its product has a gradient."""
        missing = [position for position in positions if position not in self._operands]
        if missing:
            with _one_recomputation():
                for position in missing:
                    self._unpack(position)

    def overwritten(self) -> list[Edge]:
        """Where those products enter the graph of which I has overwritten an operand."""
        now = versions(self._tensors)
        if now == self._versions:
            return []
        changed = {
            id(tensor)
            for tensor, was, version in zip(self._tensors, self._versions, now, strict=True)
            if was != version
        }
        return [
            self._plan.deferred[position].target
            for position, taken in self._operands.items()
            if any(id(one) in changed for one in taken)
        ]

    def _unpack(self, position: int, grads: object = None) -> None:
        if position not in self._operands:
            with allow_second_use(self._nodes[self._plan.deferred[position].node]):
                self._take(position)
            tensors = _tensors([self._operands[position]])
            self._tensors += tensors
            self._versions += versions(tensors)

    def _take(self, position: int) -> None:
        use = self._plan.deferred[position]
        taken = use.recipe.take(self._nodes[use.node])
        if self._plan.cuts_off:
            taken = tuple([one.detach() if isinstance(one, Tensor) else one for one in taken])
        self._operands[position] = taken


def _tensors(operands: Iterable[Operands]) -> list[Tensor]:
    return [one for taken in operands for one in taken if isinstance(one, Tensor)]


def _one_recomputation() -> AbstractContextManager[object]:
    inside = GraphExecGroup._get_current_group() is not None
    return nullcontext() if inside else GraphExecGroup()
