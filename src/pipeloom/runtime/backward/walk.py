"""Reading the autograd graph of one forward.

The graph is numbered from its roots, breadth first, so that two forwards that did the same give
equal shapes, and what was decided for the one holds for the other::

    outputs        0 ViewBackward ─► 1 AddmmBackward ─► 2 AccumulateGrad (bias)
                                            │ └──────► 3 ViewBackward ─► 5 AccumulateGrad (input)
                                            └────────► 4 TBackward ────► 6 AccumulateGrad (weight)

Only public attributes of nodes are read (``next_functions``, ``variable``, ``_saved_…``), the ones
that torch documents for exploring a graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pipeloom.runtime.backward.method import Root

__all__ = ["Edge", "Graph", "GraphShape", "accumulation_below", "is_accumulate", "read_graph"]

Node = Any  # torch's node classes share no importable base that carries these attributes
Edge = tuple[int, int]  # the number of a node, and which of its outputs' gradients
NO_EDGE: Edge = (-1, 0)
ACCUMULATE = type(get_gradient_edge(torch.empty((), requires_grad=True)).node)


@dataclass(frozen=True, slots=True)
class GraphShape:
    """A graph without its tensors: hashable, and equal for forwards that did the same."""

    types: tuple[type, ...]
    children: tuple[tuple[Edge, ...], ...]
    roots: tuple[Edge, ...]
    inputs: tuple[int, ...]


@dataclass(slots=True)
class Graph:
    """One forward's graph: the live nodes, in the numbering of ``shape``.

    A node that is a Function written in Python does not keep itself alive, only the graph above it
    does, down from ``roots``.
    """

    nodes: list[Node]
    shape: GraphShape
    roots: tuple[Root, ...]

    def edge(self, edge: Edge) -> GradientEdge:
        """The live edge, as torch's engine takes it."""
        return GradientEdge(self.nodes[edge[0]], edge[1])


def accumulation_below(node: Node) -> list[Node]:
    """The nodes at which what flows through ``node`` ends."""
    seen, todo = {node}, [node]
    for current in todo:
        for child, _ in current.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                todo.append(child)
    return [current for current in todo if is_accumulate(current)]


def is_accumulate(node: Node) -> bool:
    """Whether a node is where a leaf's gradient ends."""
    return type(node) is ACCUMULATE


def read_graph(inputs: Sequence[Tensor], outputs: Sequence[Root]) -> Graph:
    """Number the graph between ``outputs`` and everything that needs a gradient.

    >>> import torch
    >>> x = torch.ones(2, requires_grad=True)
    >>> graph = read_graph([x], [x * 2])
    >>> [kind.__name__ for kind in graph.shape.types], graph.shape.inputs
    (['MulBackward0', 'AccumulateGrad'], (1,))
    """
    nodes: list[Node] = []
    number: dict[Node, int] = {}
    roots: list[Edge] = []
    for output in outputs:
        if isinstance(output, Tensor) and not output.requires_grad:
            continue
        edge = get_gradient_edge(output) if isinstance(output, Tensor) else output
        node, output_nr = edge[:2]
        if node not in number:
            number[node] = len(nodes)
            nodes.append(node)
        roots.append((number[node], output_nr))
    children: list[tuple[Edge, ...]] = []
    find = number.get
    for node in nodes:  # grows while it is walked
        if type(node) is ACCUMULATE:  # the most frequent kind leads nowhere
            children.append(())
            continue
        edges: list[Edge] = []
        for child, input_nr in node.next_functions:
            index = find(child)
            if index is None:
                if child is None:
                    edges.append(NO_EDGE)
                    continue
                index = number[child] = len(nodes)
                nodes.append(child)
            edges.append((index, input_nr))
        children.append(tuple(edges))
    leaves = tuple(
        number.get(get_gradient_edge(leaf).node, -1) if leaf.requires_grad else -1
        for leaf in inputs
    )
    shape = GraphShape(tuple(map(type, nodes)), tuple(children), tuple(roots), leaves)
    return Graph(nodes, shape, tuple(outputs))
