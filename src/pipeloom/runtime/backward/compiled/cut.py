"""Cut the graph of a compiled backward into what I runs and what W runs.

A compiled backward is one graph of operations, from what the forward saved and the gradients of the
results to the gradients of all operands. Here is that of ``y = gelu(x·Wᵀ + b)``::

    saved h, x    dy
          └─ dh ──┤
                  ├── mm ────────────► dx          I
                  ├── sum ───────────► db          I: small, out of the same kernels
                  └── t ── mm(·, x) ─► dW          W: holds dh and x

W's are the weight products and what lies below them: a cast, a sum of two products, a slice; also
the zeros around the gradient of a part of a weight. A weight product has two factors that depend on
the data, and no other such product below it::

    dy·W    carries the gradient on: one factor is a weight
    p·v     of an attention: leads on to the weight products of the layers before
    dyᵀ·x   a weight product

Everything else is I's, also in a first stage, where no gradient of an input needs it: so W holds
the factors of its products and no more.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from pipeloom.runtime.backward.compiled.operations import (
    PADS,
    PRODUCTS,
    VIEWS,
    aten,
    factors,
    is_constant,
    kind,
)
from pipeloom.runtime.backward.compiled.parts import (
    Finish,
    above,
    closure,
    extract,
    make_finishes,
)

__all__ = ["Cut", "cut_backward", "made_of"]


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """One backward in two. I's graph gives some gradients, then values for W.

    ::

        arguments of the whole ──reads──► graph ──► gradients, by their places in ``gives``
               │                                └─► values ─┐
               └── those that W needs as they are ──────────┴─► finishes
    """

    graph: GraphModule
    reads: tuple[int, ...]
    gives: tuple[int, ...]
    num_outputs: int
    values: tuple[tuple[bool, int], ...]  # an argument of the whole, or a result of the graph
    finishes: tuple[Finish, ...]

    @property
    def later(self) -> frozenset[int]:
        """The operands whose gradients W computes."""
        return frozenset(operand for finish in self.finishes for operand in finish.operands)


def cut_backward(module: GraphModule, places: Mapping[int, int], weights: Set[str]) -> Cut | None:
    """Cut so that as many operands as are worth it get their gradient at W.

    ``places`` maps operands to the outputs that are their gradients, ``weights`` names the
    arguments that do not depend on data. ``None`` if it is worth it for none of the operands, or if
    the graph changes tensors in place, in an order that is its own business.
    """
    graph = Graph()
    returned = graph.graph_copy(module.graph, {})
    outputs: list[Any] = list(returned) if isinstance(returned, (tuple, list)) else [returned]
    if any(_changes_tensors(node) for node in graph.nodes):
        return None
    later = {operand: outputs[place] for operand, place in places.items()}
    later = {operand: out for operand, out in later.items() if isinstance(out, Node)}
    _separate_convolutions(graph, set(later.values()))
    while True:
        later_places = {places[operand] for operand in later}
        needed = above(out for place, out in enumerate(outputs) if place not in later_places)
        alone = above(later.values()) - needed
        products = _weight_products(graph, alone, weights)
        pads = {node for node in alone if kind(node) in PADS}
        own = {
            at: nodes
            for at, out in later.items()
            if (nodes := _own(out, needed, products) or _own(out, needed, pads))
        }
        if len(own) == len(later):
            break
        later = {operand: later[operand] for operand in own}
    if not later:
        return None
    order = {node: place for place, node in enumerate(graph.nodes)}
    groups = _groups(own)
    values: dict[Node, int] = {}
    for nodes in groups.values():
        for node in sorted(nodes, key=order.__getitem__):
            for value in node.all_input_nodes:
                if value not in nodes:
                    values.setdefault(value, len(values))
    arguments = {
        node: place
        for place, node in enumerate(node for node in graph.nodes if node.op == "placeholder")
    }
    gives = tuple(place for place in range(len(outputs)) if place not in later_places)
    computed = [value for value in values if value not in arguments]
    results = {value: len(gives) + place for place, value in enumerate(computed)}
    half, reads = extract(
        module, graph, arguments, [*(outputs[place] for place in gives), *computed]
    )
    return Cut(
        graph=half,
        reads=reads,
        gives=gives,
        num_outputs=len(outputs),
        values=tuple(
            (True, arguments[value]) if value in arguments else (False, results[value])
            for value in values
        ),
        finishes=tuple(
            finish
            for operands, nodes in groups.items()
            for finish in make_finishes(
                module, operands, sorted(nodes, key=order.__getitem__), later, values
            )
        ),
    )


# ── which node is whose ──────────────────────────────────────────────────────────────────────────


def _changes_tensors(node: Node) -> bool:
    if node.op != "call_function":
        return node.op not in ("placeholder", "output", "get_attr")
    schema = getattr(node.target, "_schema", None)
    if schema is not None:
        return bool(schema.is_mutable)
    # What is neither an operator of torch nor plain Python may have effects of its own.
    return isinstance(node.target, torch._ops.HigherOrderOperator) and "effect" in str(node.target)


def _weight_products(graph: Graph, alone: Set[Node], weights: Set[str]) -> set[Node]:
    """The weight products among the nodes that serve nothing but weights."""
    constant = made_of(graph, weights)
    found: set[Node] = set()
    leading: set[Node] = set()  # to other products of data
    for node in reversed(graph.nodes):
        if node not in alone:
            continue
        if any(user in leading or user in found for user in node.users):
            leading.add(node)
        elif kind(node) in PRODUCTS and not any(one in constant for one in factors(node)):
            found.add(node)
    return found


def made_of(graph: Graph, arguments: Set[str]) -> set[Node]:
    """The nodes that depend on no other arguments than those named."""
    found: set[Node] = set()
    for node in graph.nodes:  # in an order in which inputs come first
        if (
            node.name in arguments
            if node.op == "placeholder"
            else all(one in found for one in node.all_input_nodes)
        ):
            found.add(node)
    return found


def _own(output: Node, needed: Set[Node], products: Set[Node]) -> set[Node]:
    """W's nodes for one gradient: from its weight products on; empty if there are none."""
    alone = above([output]) - needed
    below: set[Node] = set()
    for node in output.graph.nodes:  # in an order in which inputs come first
        if node in alone and (
            node in products or any(one in below for one in node.all_input_nodes)
        ):
            below.add(node)
    todo = list(below)
    while todo:  # views of what I leaves, and constants, cost no memory if they are made at W
        for node in todo.pop().all_input_nodes:
            is_view = node in alone and kind(node) in VIEWS
            if node not in below and (is_view or is_constant(node)):
                below.add(node)
                todo.append(node)
    return below


def _groups(own: Mapping[int, set[Node]]) -> dict[tuple[int, ...], set[Node]]:
    """Operands whose gradients share work are finished together."""
    groups: list[tuple[tuple[int, ...], set[Node]]] = []
    for operand, nodes in own.items():
        together: tuple[int, ...] = (operand,)
        all_nodes = set(nodes)
        apart: list[tuple[tuple[int, ...], set[Node]]] = []
        for others, theirs in groups:
            if any(kind(node) in PRODUCTS for node in theirs & all_nodes):
                together, all_nodes = (*others, *together), all_nodes | theirs
            else:
                apart.append((others, theirs))
        groups = [*apart, (together, all_nodes)]
    return dict(groups)


def _separate_convolutions(graph: Graph, wanted: set[Node]) -> None:
    """Compute a convolution's weight gradient by a node of its own, where it may come later.

    One node gives all three gradients, and a mask says which.
    """
    for node in list(graph.nodes):
        if kind(node) is not aten.convolution_backward:
            continue
        *before, mask = node.args
        weights = [
            user for user in node.users if user.target is operator.getitem and user.args[1] == 1
        ]
        below = closure(weights, lambda node: node.users)
        if not mask[1] or not below & wanted:
            continue
        operands = [*before[:2], _without_entries(graph, node, before[2]), *before[3:]]
        with graph.inserting_after(node):
            alone = graph.call_function(node.target, (*operands, [False, True, False]))
        alone.meta = dict(node.meta)
        node.args = (*before, [mask[0], False, mask[2]])
        for pick in weights:
            pick.replace_input_with(node, alone)
            alone.append(pick)  # behind what it now reads


def _without_entries(graph: Graph, before: Node, weight: Node) -> Node:
    """What stands for a weight of which only sizes are read: the forward may have saved a copy in
    another layout, which would be kept for that.
    """
    value = weight.meta["val"]
    if not all(isinstance(size, int) for size in value.shape):
        return weight
    with graph.inserting_before(before):
        empty = graph.call_function(
            aten.empty.memory_format,
            (list(value.shape),),
            {"dtype": value.dtype, "device": value.device},
        )
    empty.meta["val"] = value
    return empty
