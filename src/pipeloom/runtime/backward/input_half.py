"""I: one run of torch's engine, between taking what W needs and keeping it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from pipeloom.runtime.backward.boxes import Boxes
from pipeloom.runtime.backward.checkpointing import forget_recomputed
from pipeloom.runtime.backward.compiled.finish import take
from pipeloom.runtime.backward.compiled.halves import Answer, halves_of
from pipeloom.runtime.backward.hook_count import HookCount
from pipeloom.runtime.backward.method import Gradients
from pipeloom.runtime.backward.operands import Taken
from pipeloom.runtime.backward.pending import Gradient, Pending, Product
from pipeloom.runtime.backward.plan import Deferred, Halved, Plan
from pipeloom.runtime.backward.self_check import muted_hooks
from pipeloom.runtime.backward.versions import versions
from pipeloom.runtime.backward.walk import Edge, Graph, is_accumulate

__all__ = ["run_engine", "run_input", "weights_have_hooks"]


def run_input(
    graph: Graph,
    plan: Plan,
    *,
    inputs: Sequence[Tensor],
    grads: Sequence[Tensor],
    boxes: Boxes | None,
    hooked: bool,
    hooks: HookCount,
) -> tuple[Gradients, Pending]:
    """The gradients of the inputs, and what is kept for W. ``hooked``: others may have registered
    hooks since F began; ``hooks`` is told of those that are registered here.
    """
    nodes = graph.nodes
    by_engine: Sequence[bool] = [False] * len(plan.deferred)
    if hooked:
        by_engine = [_may_pass_hooks(nodes[use.node], use) for use in plan.deferred]
    taken = Taken(graph, plan)
    with taken.one_recomputation():
        with ExitStack() as during:
            with hooks.leaving_out():
                during.enter_context(taken.taken_as_nodes_run())
                watched = plan.captures if hooked else ()
                arrived = during.enter_context(_noted_arrivals(graph, watched))
                answers = [
                    during.enter_context(_asked(nodes[half.node], half)) for half in plan.halved
                ]
            ends = [(leaf, 0) for leaf in plan.leaves]
            gradients, captured = run_engine(
                graph, inputs, grads, plan.captures, mute=ends, keep_graph=bool(plan.reruns)
            )
        if arrived.grads:
            captured = tuple(arrived.grads.get(place, grad) for place, grad in enumerate(captured))
        arrivals = {
            position: grad
            for position, use in enumerate(plan.deferred)
            if use.capture is not None and (grad := captured[use.capture]) is not None
        }
        taken.take_the_rest(list(arrivals))
    if plan.reruns:
        forget_recomputed(nodes)
    owners = graph.roots if plan.needs_roots else ()
    pending = Pending(plan, {index: nodes[index] for index in plan.passed_later}, owners)
    pending.overwritten = taken.overwritten() + _changed_on_the_way(plan, arrived)
    pending.products = [
        Product(plan.deferred[position], grad, taken[position], by_engine[position])
        for position, grad in arrivals.items()
    ]
    if any(grad is None for grad in captured):
        pending.missing = [
            *(use.target for place, use in enumerate(plan.deferred) if place not in arrivals),
            *(kept.target for kept in plan.in_input if captured[kept.capture] is None),
        ]
    for half, answer in zip(plan.halved, answers, strict=True):
        if answer.values is None:
            pending.missing += [use.target for _, uses in half.uses for use in uses]
        else:
            left = _left_products(half, answer.values, hooked=hooked)
            pending.products += left
            if answer.is_overwritten():
                pending.overwritten += [product.use.target for product in left]
    pending.gradients = [
        Gradient(kept.target, grad)
        for kept in plan.in_input
        if (grad := captured[kept.capture]) is not None
    ]
    for again in plan.reruns:
        at = [(graph.edge((again.node, nr)), captured[place]) for nr, place in again.captures]
        edges = [edge for edge, grad in at if grad is not None]
        if edges:
            kept_grads = [grad for _, grad in at if grad is not None]
            pending.reruns.append((edges, list(again.targets), kept_grads))
    if boxes is not None:
        needed = {*plan.passed_later, *(again.node for again in plan.reruns)}
        pending.boxed = boxes.keep_only(nodes[index] for index in needed)
    return gradients, pending


def _asked(node: Any, half: Halved) -> AbstractContextManager[Answer]:
    """Have a compiled node leave its part of W while this is entered."""
    halves = halves_of(node)
    assert halves is not None  # the plan was made for nodes of this very type
    return halves.asked(node, half.cut)


@torch.no_grad()
def _left_products(half: Halved, values: Sequence[Any], *, hooked: bool) -> list[Product]:
    """What a compiled node left undone."""
    products: list[Product] = []
    for finish, uses in half.uses:
        grad, operands = take(finish, values)
        products += [Product(use, grad, operands, hooked and use.chained) for use in uses]
    return products


def run_engine(
    graph: Graph,
    inputs: Sequence[Tensor],
    grads: Sequence[Tensor],
    asked: Sequence[Edge],
    *,
    mute: Sequence[Edge],
    keep_graph: bool,
) -> tuple[Gradients, tuple[Tensor | None, ...]]:
    """The gradients of the inputs, and those of the edges asked for."""
    leaves: list[Any] = [leaf for leaf in inputs if leaf.requires_grad]
    found: tuple[Tensor | None, ...] = ()
    if leaves or asked:
        with muted_hooks([graph.nodes[leaf].variable for leaf, _ in mute]):
            found = torch.autograd.grad(
                [graph.edge(root) for root in graph.shape.roots],
                [*leaves, *(graph.edge(edge) for edge in asked)],
                grads,
                retain_graph=keep_graph,
                allow_unused=True,
            )
    mine = iter(found)
    gradients = [next(mine) if leaf.requires_grad else None for leaf in inputs]
    return gradients, found[len(leaves) :]


class _Arrived:
    """Gradients as they came to nodes, by their captures, and how often they were written to."""

    def __init__(self) -> None:
        self.grads: dict[int, Tensor | None] = {}
        self.versions: dict[int, list[int]] = {}

    def note(self, place: int, grad: Tensor | None) -> None:
        self.grads[place] = grad
        if grad is not None:
            self.versions[place] = versions([grad])

    def changed(self) -> set[int]:
        """The places of those that were written to since."""
        return {
            place
            for place, before in self.versions.items()
            if (grad := self.grads[place]) is not None and versions([grad]) != before
        }


def _changed_on_the_way(plan: Plan, arrived: _Arrived) -> list[Edge]:
    """Where gradients enter that W will use, and that hooks changed in place after they came."""
    changed = arrived.changed()
    if not changed:
        return []
    return [
        *(use.target for use in plan.deferred if use.capture in changed),
        *(kept.target for kept in plan.in_input if kept.capture in changed),
        *(
            target
            for again in plan.reruns
            if any(place in changed for _, place in again.captures)
            for target in again.targets
        ),
    ]


@contextmanager
def _noted_arrivals(graph: Graph, edges: Sequence[Edge]) -> Iterator[_Arrived]:
    """Note, by its place among the edges, the gradient with which each edge's node is run.

    Where the engine is asked for a gradient at a node that it also runs, it gives the gradient as
    it was before the hooks of the node's results; what the node is run with is the one that counts.
    """
    noted = _Arrived()

    def note(place: int, output_nr: int) -> Callable[[tuple[Tensor | None, ...]], None]:
        def prehook(grads: tuple[Tensor | None, ...]) -> None:
            noted.note(place, grads[output_nr])

        return prehook

    with ExitStack() as registered:
        for place, (node, output_nr) in enumerate(edges):
            handle = graph.nodes[node].register_prehook(note(place, output_nr))
            registered.callback(handle.remove)
        yield noted


def weights_have_hooks(graph: Graph, plan: Plan, *, since: int) -> bool:
    """Whether there may be hooks on a tensor between a product and its parameter, although none
    were registered since F began: such a tensor may be older than F, and its hooks with it.

    ``since`` is the number that the first node of F could have.
    """
    nodes = graph.nodes
    unseen: dict[int, bool] = {}  # where products enter → whether any does not show its weight
    for use in plan.deferred:
        if use.chained:
            weight = _seen_weight(nodes[use.node], use)
            if weight is not None and weight._backward_hooks:
                return True
            unseen[use.target[0]] = unseen.get(use.target[0], False) or weight is None
    return any(
        unseen.get(index, True)
        and nodes[index]._sequence_nr() < since
        and not _is_cached_cast(nodes[index])
        for index in plan.weight_only - plan.leaf_set
    )


def _is_cached_cast(node: Any) -> bool:
    """Whether a node may be a cast that autocast made for an earlier forward, which nobody sees."""
    if type(node).__name__ != "ToCopyBackward0" or not torch.is_autocast_cache_enabled():
        return False
    below: Any = node.next_functions[0][0]
    return is_accumulate(below) and torch.is_autocast_enabled(below.variable.device.type)


def _seen_weight(node: Any, use: Deferred) -> Tensor | None:
    """The weight as a product used it, which it has saved if its other operand needs a gradient."""
    own = use.recipe.own
    return getattr(node, own) if own is not None and not use.packed else None


def _may_pass_hooks(node: Any, use: Deferred) -> bool:
    """Whether hooks may sit between a product and its parameter.

    A node does not tell its hooks, but the tensor that they belong to does: here the transposed
    weight.
    """
    if not use.chained:
        return False
    saved = _seen_weight(node, use)
    if saved is None or saved.grad_fn is None or saved._backward_hooks:
        return True
    [(below, _)] = saved.grad_fn.next_functions
    return not is_accumulate(below)
