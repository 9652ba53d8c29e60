"""Graphs of their own: the half that I runs, and what W runs for some of the operands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from pipeloom.runtime.backward.compiled.operations import (
    VIEWS,
    aten,
    kind,
    swaps_last_two,
    widens,
    work,
)

__all__ = ["Finish", "above", "closure", "extract", "make_finish"]


@dataclass(frozen=True, slots=True, eq=False)
class Finish:
    """What W does for some operands, from values that I left.

    ``run(*values)`` gives the gradients of ``operands`` in turn; for a product its two factors
    instead, so that they can be multiplied right into ``.grad``; ``product`` is then the type of
    the gradient, which may be wider than theirs. ``work`` counts multiplications, about.
    """

    operands: tuple[int, ...]
    values: tuple[int, ...]
    run: Callable[..., tuple[Any, ...]]
    product: torch.dtype | None
    work: int


def above(outputs: Iterable[Any]) -> set[Node]:
    """Everything that leads to the outputs, themselves included."""
    return closure(
        (output for output in outputs if isinstance(output, Node)),
        lambda node: node.all_input_nodes,
    )


def closure(start: Iterable[Node], step: Callable[[Node], Iterable[Node]]) -> set[Node]:
    """Everything that steps lead to."""
    found = set(start)
    todo = list(found)
    while todo:
        for node in step(todo.pop()):
            if node not in found:
                found.add(node)
                todo.append(node)
    return found


def extract(
    module: GraphModule, graph: Graph, arguments: Mapping[Node, int], results: Sequence[Any]
) -> tuple[GraphModule, tuple[int, ...]]:
    """The part of the graph that leads to the results, and which arguments it reads."""
    part = above(results)
    # The code around a graph reads sizes, so numbers stay arguments whoever uses them.
    part |= {node for node in arguments if not isinstance(node.meta.get("val"), Tensor)}
    half = Graph()
    made: dict[Node, Node] = {}
    for node in graph.nodes:
        if node in part:
            made[node] = half.node_copy(node, made.__getitem__)
    last = half.output(tuple(made[out] if isinstance(out, Node) else out for out in results))
    last.meta["user_visible_output_idxs"] = []
    reads = tuple(place for node, place in arguments.items() if node in part)
    return GraphModule(module, half), reads


def make_finish(
    module: GraphModule,
    operands: tuple[int, ...],
    nodes: Sequence[Node],
    outputs: Mapping[int, Node],
    values: Mapping[Node, int],
) -> Finish:
    """The code that W runs for some operands, and which of the values it reads.

    ``nodes`` are in the graph's order, and read nothing but each other and the values.
    """
    product, turned = (None, 0) if len(operands) > 1 else _product_of(outputs[operands[0]], nodes)
    used = [value for value in values if any(value in node.all_input_nodes for node in nodes)]
    tail = Graph()
    made = {value: tail.placeholder(f"value_{place}") for place, value in enumerate(used)}
    for node in nodes:
        if node is product:
            break  # what follows is its transpositions and casts
        copy = made[node] = tail.node_copy(node, made.__getitem__)
        if kind(copy) in (aten.view, aten._unsafe_view):
            copy.target = aten.reshape.default  # what I leaves may have strides of its own
    reads, total = tuple(values[value] for value in used), sum(map(work, nodes))
    if product is None:
        tail.output(tuple(made[outputs[operand]] for operand in operands))
        return Finish(operands, reads, GraphModule(module, tail), None, total)
    left, right = product.all_input_nodes[0], product.all_input_nodes[-1]  # one node if squared
    tail.output((made[left], made[right]))
    run: Callable[..., Any] = GraphModule(module, tail)
    dtype = outputs[operands[0]].meta["val"].dtype
    return Finish(operands, reads, _turned(run) if turned % 2 else run, dtype, total)


def _product_of(output: Node, nodes: Sequence[Node]) -> tuple[Node | None, int]:
    """The product that an output is, and how often it is transposed after that."""
    below: list[Node] = []
    node = output
    while swaps_last_two(node) or widens(node):
        below.append(node)
        node = node.all_input_nodes[0]
    rest = set(nodes) - {node, *below}
    if kind(node) not in (aten.mm, aten.bmm) or any(kind(one) not in VIEWS for one in rest):
        return None, 0
    return node, sum(map(swaps_last_two, below))


def _turned(product: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """``(L·R)ᵀ = Rᵀ·Lᵀ``."""

    def run(*values: Any) -> tuple[Tensor, Tensor]:
        left, right = product(*values)
        return right.mT, left.mT

    return run
