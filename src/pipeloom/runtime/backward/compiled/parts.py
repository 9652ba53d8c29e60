"""Graphs of their own: the half that I runs, and what W runs for some of the operands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from pipeloom.runtime.backward.compiled.operations import (
    VIEWS,
    aten,
    kind,
    work,
)
from pipeloom.runtime.backward.compiled.windows import Window, find_windows

__all__ = ["Finish", "above", "closure", "extract", "make_finishes"]


@dataclass(frozen=True, slots=True, eq=False)
class Finish:
    """What W does for some operands, from values that I left.

    ``run(*values)`` gives the gradients of ``operands`` in turn; for a product its two factors
    instead, so that they can be multiplied right into ``.grad``. ``product`` is then the type of
    the gradient, which may be wider than theirs, and ``window`` the part of it that they give, if
    they do not give all. ``work`` counts multiplications, about.
    """

    operands: tuple[int, ...]
    values: tuple[int, ...]
    run: Callable[..., tuple[Any, ...]]
    work: int
    product: torch.dtype | None = None
    window: Window | None = None


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


def make_finishes(
    module: GraphModule,
    operands: tuple[int, ...],
    nodes: Sequence[Node],
    outputs: Mapping[int, Node],
    values: Mapping[Node, int],
) -> list[Finish]:
    """The code that W runs for some operands, and which of the values it reads: one piece for each
    product that an operand's gradient consists of, or one for all that there is to do.

    ``nodes`` are in the graph's order, and read nothing but each other and the values.
    """
    results = [outputs[at] for at in operands]
    windows = find_windows(results[0]) if len(operands) == 1 else []
    factors = [_before(product, nodes) for product, _ in windows]
    if (
        not windows
        or not {product for product, _ in windows} <= set(nodes)
        or any(kind(node) not in VIEWS for node in chain(*factors))
    ):
        run, reads = _extract_tail(module, nodes, values, results)
        return [Finish(operands, reads, run, sum(map(work, nodes)))]
    dtype = results[0].meta["val"].dtype
    finishes: list[Finish] = []
    for (product, window), before in zip(windows, factors, strict=True):
        left, right = product.all_input_nodes[0], product.all_input_nodes[-1]  # one if squared
        run, reads = _extract_tail(module, before, values, (left, right))
        if window.only_turns:
            run = _turned(run) if len(window.steps) % 2 else run
            finishes.append(Finish(operands, reads, run, work(product), dtype))
        else:
            finishes.append(Finish(operands, reads, run, work(product), dtype, window))
    return finishes


def _before(node: Node, nodes: Sequence[Node]) -> list[Node]:
    """Those of the nodes that lead to a node, in their order."""
    found = above([node]) - {node}
    return [one for one in nodes if one in found]


def _extract_tail(
    module: GraphModule, nodes: Sequence[Node], values: Mapping[Node, int], results: Sequence[Node]
) -> tuple[Callable[..., tuple[Any, ...]], tuple[int, ...]]:
    """Code that makes the results of some of the values, and which."""
    used = [
        value
        for value in values
        if value in results or any(value in node.all_input_nodes for node in nodes)
    ]
    tail = Graph()
    made = {value: tail.placeholder(f"value_{values[value]}") for value in used}
    for node in nodes:
        copy = made[node] = tail.node_copy(node, made.__getitem__)
        if copy.target in (aten.view.default, aten._unsafe_view.default):
            copy.target = aten.reshape.default  # what I leaves may have strides of its own
    tail.output(tuple(made[result] for result in results))
    # Not the module itself: hooks on all modules are about modules of users.
    return GraphModule(module, tail).forward, tuple(values[value] for value in used)


def _turned(product: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """``(L·R)ᵀ = Rᵀ·Lᵀ``."""

    def run(*values: Any) -> tuple[Tensor, Tensor]:
        left, right = product(*values)
        return right.mT, left.mT

    return run
