"""Which part of an autograd graph carries data, and which leads to parameters alone.

::

      output                          data          weight-only
        │
    Addmm ───edge 2──► T ──► weight   Addmm         T, weight
        │╲──edge 0──────────► bias                  bias
      input

An *entry* is an operand of the first kind that leads to the second: there a weight enters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from pipeloom.runtime.backward.recipes import RECIPES, signed
from pipeloom.runtime.backward.views import VIEW_TYPES
from pipeloom.runtime.backward.walk import Edge, Graph, GraphShape, is_accumulate

__all__ = ["Entry", "PlainTarget", "Regions", "Turn"]

TURN_TYPES = frozenset({"TBackward0", "TransposeBackward0"})

Entry = tuple[int, int]  # a data node and the operand that enters; -1: an output
# A transposition's node and its two dimensions, as saved; the parameter's node and its dimensions.
Turn = tuple[int, int, int, int, int]


class PlainTarget(NamedTuple):
    """A parameter with nothing but views and casts between it and its use."""

    leaf: int
    transposed: bool  # seen transposed in its last two dimensions, and not otherwise
    chained: bool  # anything lies between
    cast: bool  # a change of type or device lies between
    turns: tuple[Turn, ...]
    views: tuple[Edge, ...]  # from the use down, if they are more than such transpositions


class Regions:
    """Which nodes of one graph are data, which lead to parameters only, and how."""

    def __init__(self, graph: Graph) -> None:
        self.nodes = graph.nodes
        self.shape: GraphShape = graph.shape
        self.names = [kind.__name__ for kind in graph.shape.types]
        self.parents: list[list[int]] = [[] for _ in self.names]
        for parent, edges in enumerate(self.shape.children):
            for child, _ in edges:
                if child >= 0:
                    self.parents[child].append(parent)
        self.inputs = {index for index in self.shape.inputs if index >= 0}
        self.leaves = tuple(
            index
            for index, node in enumerate(self.nodes)
            if is_accumulate(node) and index not in self.inputs
        )
        self.leaf_set = frozenset(self.leaves)
        self.data = self.find_data()

    # ── which nodes are data ─────────────────────────────────────────────────────────────────────

    def find_data(self) -> set[int]:
        """Nodes on the way from the outputs to the inputs.

        Where an output reaches no input (the first stage, whose tokens need no gradient), what lies
        below it counts as data up to the plain chains that lead to parameters: there too, I passes
        through the activations and frees them.
        """
        data = self.upward(self.inputs)
        started = [root for root, _ in self.shape.roots if root not in data]
        below: set[int] = set()
        while started:
            node = started.pop()
            if node in below or self.chain(node) is not None:
                continue
            below.add(node)
            weights = self.weight_operands(node)
            started += [
                child
                for operand, (child, _) in enumerate(self.shape.children[node])
                if child >= 0 and operand not in weights
            ]
        return self.upward(data | below)

    def upward(self, start: Iterable[int]) -> set[int]:
        found = set(start)
        todo = list(found)
        while todo:
            for parent in self.parents[todo.pop()]:
                if parent not in found:
                    found.add(parent)
                    todo.append(parent)
        return found

    def downward(self, start: Iterable[int]) -> set[int]:
        found = set(start)
        todo = list(found)
        while todo:
            for child, _ in self.shape.children[todo.pop()]:
                if child >= 0 and child not in found:
                    found.add(child)
                    todo.append(child)
        return found

    def reaches(self, targets: Iterable[int]) -> tuple[list[int], dict[int, int]]:
        """For every node a set of the targets below it or at it, and each target's place in it.

        The sets are the bits of integers, so that thousands of targets cost no more than a few
        machine words a node.
        """
        bit = {target: 1 << place for place, target in enumerate(dict.fromkeys(targets))}
        below = [bit.get(node, 0) for node in range(len(self.names))]
        for node in self.children_first():
            for child, _ in self.shape.children[node]:
                if child >= 0:
                    below[node] |= below[child]
        return below, bit

    def children_first(self) -> list[int]:
        """Every node after all that it leads to."""
        num_open = [sum(child >= 0 for child, _ in edges) for edges in self.shape.children]
        order = [node for node, count in enumerate(num_open) if not count]
        for node in order:  # grows while it is walked
            for parent in self.parents[node]:
                num_open[parent] -= 1
                if not num_open[parent]:
                    order.append(parent)
        return order

    def weight_operands(self, node: int) -> set[int]:
        """Operands that hold a weight because the product's other operand needs no gradient."""
        edges = self.shape.children[node]
        return {
            operand
            for operand, recipe in RECIPES.get(self.names[node], {}).items()
            if recipe.partner is not None
            and operand < len(edges)
            and edges[operand][0] >= 0
            and edges[recipe.partner][0] < 0
        }

    def chain(self, node: int) -> list[int] | None:
        """The nodes from here to a parameter if nothing but views and casts lies between."""
        passed: list[int] = []
        while node not in self.leaf_set:
            below = [child for child, _ in self.shape.children[node] if child >= 0]
            if self.names[node] not in VIEW_TYPES or len(below) != 1:
                return None
            passed.append(node)
            node = below[0]
        return [*passed, node]

    # ── how a chain changes the gradient ─────────────────────────────────────────────────────────

    def plain_target(self, edge: Edge) -> PlainTarget | None:
        """The parameter below, for the chains that gradients are added through."""
        chain = self.chain(edge[0])
        if chain is None:
            return None
        *passed, leaf = chain
        names = {self.names[index] for index in passed}
        turns = self._turns(passed, leaf)
        only_turns = turns is not None and names <= {*TURN_TYPES, "ToCopyBackward0"}
        return PlainTarget(
            leaf,
            transposed=only_turns and sum(self.names[i] in TURN_TYPES for i in passed) % 2 == 1,
            chained=bool(passed),
            cast="ToCopyBackward0" in names,
            turns=tuple(turns or ()) if only_turns else (),
            views=() if only_turns else tuple(self._edges_along(edge, passed)),
        )

    def _turns(self, passed: Sequence[int], leaf: int) -> list[Turn] | None:
        """The transpositions among them; ``None`` if one is not of the last two dimensions."""
        num_dims = self.nodes[leaf].variable.dim()
        if not num_dims:
            return None if passed else []
        turns: list[Turn] = []
        for index in passed:
            if self.names[index] == "TransposeBackward0":
                node = self.nodes[index]
                dims = {signed(node._saved_dim0) % num_dims, signed(node._saved_dim1) % num_dims}
                if dims != {num_dims - 1, num_dims - 2}:
                    return None
                turns.append((index, node._saved_dim0, node._saved_dim1, leaf, num_dims))
        return turns

    def _edges_along(self, edge: Edge, passed: Iterable[int]) -> Iterator[Edge]:
        for index in passed:
            yield edge
            [edge] = [below for below in self.shape.children[index] if below[0] >= 0]

    # ── the plan ─────────────────────────────────────────────────────────────────────────────────

    def entries(self) -> dict[Edge, list[Entry]]:
        """Weight-only edge → the (data node, operand) pairs that enter it."""
        found: dict[Edge, list[Entry]] = {}
        for node in sorted(self.data):
            for operand, edge in enumerate(self.shape.children[node]):
                if edge[0] >= 0 and edge[0] not in self.data:
                    found.setdefault(edge, []).append((node, operand))
        for edge in self.shape.roots:  # an output made of parameters alone
            if edge[0] not in self.data:
                found.setdefault(edge, []).append((-1, 0))
        return found

    def groups(self, entries: Iterable[Edge]) -> dict[int, int]:
        """Weight-only nodes that hang together, numbered."""
        members: dict[int, int] = {}
        for start, _ in entries:
            if start in members:
                continue
            todo, group = [start], len(members)
            while todo:
                node = todo.pop()
                if node in members:
                    continue
                members[node] = group
                todo += [c for c, _ in self.shape.children[node] if c >= 0]
                todo += [p for p in self.parents[node] if p not in self.data]
        return members
