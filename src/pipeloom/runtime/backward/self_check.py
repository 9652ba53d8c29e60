"""Is a plan right? Two answers that share nothing with how plans are made.

*Structural*: replace every operation of the graph by multiplication with a random number modulo a
prime. A full backward then gives each parameter a number, the sum over all paths from the outputs
to it. I and W as planned must give the same numbers: a path that is lost, or counted twice, changes
them. It is exact and looks at no tensor.

*Numeric*: compute the real gradients twice, and compare.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import reduce
from heapq import heapify, heappop, heappush
from operator import or_

import torch
from torch import Tensor

from pipeloom.runtime.backward.compiled.cut import Cut
from pipeloom.runtime.backward.compiled.parts import Finish
from pipeloom.runtime.backward.plan import Plan
from pipeloom.runtime.backward.walk import Edge, GraphShape

__all__ = ["differing", "muted_hooks", "structural_faults"]

PRIME = (1 << 61) - 1
# Largest error relative to the largest entry: products summed in another order.
TOLERANCE = {
    torch.float64: 1e-10,
    torch.complex128: 1e-10,
    torch.float32: 1e-4,
    torch.complex64: 1e-4,
    torch.float16: 2e-2,
    torch.bfloat16: 5e-2,
}


class _Symbols:
    """A graph whose operations are multiplications with random numbers."""

    def __init__(self, shape: GraphShape, ever_asked: Iterable[Edge]) -> None:
        self.shape = shape
        self.random = random.Random(20240917)
        self.factor: dict[tuple[int, int, int], int] = {}
        self.shares: dict[tuple[int, int], int] = {}
        self.order = self._topological()
        self.rank = {node: place for place, node in enumerate(self.order)}
        # One bit for each node that is ever asked for; for each node the bits of those at or below.
        self.bits = {node: 1 << place for place, node in enumerate({n for n, _ in ever_asked})}
        self.below = [self.bits.get(node, 0) for node in range(len(shape.types))]
        for node in reversed(self.order):
            for child, _ in shape.children[node]:
                if child >= 0:
                    self.below[node] |= self.below[child]

    def _topological(self) -> list[int]:
        waiting = [0] * len(self.shape.types)
        for edges in self.shape.children:
            for child, _ in edges:
                if child >= 0:
                    waiting[child] += 1
        ready = [node for node, count in enumerate(waiting) if not count]
        order: list[int] = []
        while ready:
            node = ready.pop()
            order.append(node)
            for child, _ in self.shape.children[node]:
                if child >= 0:
                    waiting[child] -= 1
                    if not waiting[child]:
                        ready.append(child)
        return order

    def mark(self, edges: Iterable[Edge]) -> int:
        """The bits of the nodes asked for."""
        return reduce(or_, (self.bits[node] for node, _ in edges), 0)

    def through(self, node: int, operand: int, grads: Mapping[int, int]) -> int:
        """The gradient of one operand, given those of the node's results."""
        total = 0
        for output_nr, grad in grads.items():
            key = (node, operand, output_nr)
            factor = self.factor.setdefault(key, self.number())
            total += factor * grad
        return total % PRIME

    def share(self, cut: Cut, finish: Finish, operand: int) -> int:
        """How much of the operand's gradient a finish gives: random numbers that add up to one over
        all finishes of the operand.
        """
        first, *others = [id(one) for one in cut.finishes if operand in one.operands]
        parts = {other: self.shares.setdefault((other, operand), self.number()) for other in others}
        return 1 - sum(parts.values()) if id(finish) == first else parts[id(finish)]

    def number(self) -> int:
        return self.random.randrange(1, PRIME)

    def run(
        self,
        start: Sequence[tuple[Edge, int]],
        asked: Iterable[Edge] | None = None,
        undone: Set[tuple[int, int]] = frozenset(),
    ) -> dict[Edge, int]:
        """What an engine run leaves at every edge (``asked``: run only what leads to those;
        ``undone``: operands, by node, whose gradients are left out).
        """
        wanted = None if asked is None else self.mark(asked)
        grads: dict[int, dict[int, int]] = {}
        for (node, nr), value in start:
            at = grads.setdefault(node, {})
            at[nr] = (at.get(nr, 0) + value) % PRIME
        waiting = [self.rank[node] for node in grads]
        heapify(waiting)
        known = set(grads)
        while waiting:
            node = self.order[heappop(waiting)]
            for operand, (child, nr) in enumerate(self.shape.children[node]):
                if child < 0 or (wanted is not None and not self.below[child] & wanted):
                    continue
                if (node, operand) in undone:
                    continue
                at = grads.setdefault(child, {})
                at[nr] = (at.get(nr, 0) + self.through(node, operand, grads[node])) % PRIME
                if child not in known:
                    known.add(child)
                    heappush(waiting, self.rank[child])
        return {(node, nr): value for node, at in grads.items() for nr, value in at.items()}


def structural_faults(shape: GraphShape, plan: Plan) -> set[int]:
    """Parameters (and inputs) whose gradient the plan does not give exactly once."""
    inputs = {(index, 0) for index in shape.inputs if index >= 0}
    targets = {edge for again in plan.reruns for edge in again.targets}
    symbols = _Symbols(shape, {*plan.captures, *inputs, *targets})
    start = [(edge, symbols.number()) for edge in shape.roots]
    truth = symbols.run(start)
    undone = {(half.node, operand) for half in plan.halved for operand in half.cut.later}
    seen = symbols.run(start, set(plan.captures) | inputs, undone)
    produced: dict[int, list[int]] = {}
    for node, nr in seen:
        produced.setdefault(node, []).append(nr)
    later: list[tuple[Edge, int]] = []
    for use in plan.deferred:
        grads = {0: seen.get((use.node, 0), 0)}
        later.append((use.target, symbols.through(use.node, use.operand, grads)))
    for half in plan.halved:
        grads = {nr: seen[half.node, nr] for nr in produced.get(half.node, ())}
        for finish, uses in half.uses:
            for use in uses:
                share = symbols.share(half.cut, finish, use.operand)
                whole = symbols.through(use.node, use.operand, grads)
                later.append((use.target, whole * share % PRIME))
    for again in plan.reruns:
        start_again = [
            ((again.node, nr), seen.get((again.node, nr), 0)) for nr, _ in again.captures
        ]
        result = symbols.run(start_again, again.targets)
        later += [(edge, result.get(edge, 0)) for edge in again.targets]
    later += [(kept.target, seen.get(kept.target, 0)) for kept in plan.in_input]
    weights = symbols.run(later)
    wrong = {leaf for leaf in plan.leaves if weights.get((leaf, 0), 0) != truth.get((leaf, 0), 0)}
    return wrong | {edge[0] for edge in inputs if seen.get(edge, 0) != truth.get(edge, 0)}


def differing(
    reference: Tensor | None, found: Tensor | None, passed: Iterable[torch.dtype] = ()
) -> bool:
    """Whether two gradients of the same thing differ by more than rounding, also to the types that
    they ``passed`` through.
    """
    if reference is None or found is None:
        present = reference if reference is not None else found
        return present is not None and bool(present.abs().max() > 0)
    if reference.shape != found.shape:
        return True
    if reference.numel() == 0:
        return False
    reference, found = _dense(reference), _dense(found)
    tolerance = max(TOLERANCE.get(dtype, 1e-4) for dtype in (reference.dtype, found.dtype, *passed))
    scale = reference.abs().max().double()
    error = (reference - found).abs().max().double()
    return not bool(error <= tolerance * scale + 1e-30) and not bool(
        torch.equal(reference.isfinite(), found.isfinite()) and not scale.isfinite()
    )


def _dense(tensor: Tensor) -> Tensor:
    if tensor.layout is torch.jagged:
        return tensor.values()
    return tensor.to_dense() if tensor.layout is not torch.strided else tensor


@contextmanager
def muted_hooks(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Keep the parameters' tensor hooks from firing.

    An engine run that returns a parameter's gradient fires the hooks that belong to adding it to
    ``.grad``, which is W's business.
    """
    kept = [
        (hooks, dict(hooks))
        for hooks in (getattr(parameter, "_backward_hooks", None) for parameter in parameters)
        if hooks
    ]
    for hooks, contents in kept:
        hooks.update(dict.fromkeys(contents, _do_nothing))
    try:
        yield
    finally:
        for hooks, contents in kept:  # but for those that were removed meanwhile
            hooks.update({key: hook for key, hook in contents.items() if key in hooks})


def _do_nothing(grad: Tensor) -> None:
    pass
