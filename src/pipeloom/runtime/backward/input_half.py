"""I: one run of torch's engine, between taking what W needs and keeping it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.errors import BackwardError
from pipeloom.runtime.backward.boxes import Boxes
from pipeloom.runtime.backward.checkpointing import is_recomputed, linear_owners, noted_inputs
from pipeloom.runtime.backward.compiled.finish import take
from pipeloom.runtime.backward.compiled.halves import Answer, halves_of
from pipeloom.runtime.backward.decide import Decision, learnable_layers
from pipeloom.runtime.backward.method import Gradients
from pipeloom.runtime.backward.pending import Gradient, Pending, Product
from pipeloom.runtime.backward.plan import Deferred, Halved, Plan
from pipeloom.runtime.backward.self_check import muted_hooks
from pipeloom.runtime.backward.walk import Edge, Graph

__all__ = ["reference_gradients", "run_input"]

Notes = Mapping[int, Sequence[Tensor]]  # parameter → what its layer was called with during I


def run_input(
    graph: Graph,
    decision: Decision,
    *,
    module: nn.Module,
    inputs: Sequence[Tensor],
    grads: Sequence[Tensor],
    boxes: Boxes | None,
    hooked: bool,
    error: Callable[[str, Sequence[Any]], BackwardError],
) -> tuple[Gradients, Pending, frozenset[int]]:
    """The gradients of the inputs, what is kept for W, and the checkpointed parameters (of those
    that the decision wants to learn of) whose layers were seen.
    """
    plan = decision.plan
    assert plan is not None
    nodes = graph.nodes
    by_engine = [hooked and _may_pass_hooks(nodes[use.node], use) for use in plan.deferred]
    noted = [
        use.recomputed and is_recomputed(nodes[use.node], use.recipe.saved) for use in plan.deferred
    ]
    taken = [
        () if later else use.recipe.take(nodes[use.node])
        for use, later in zip(plan.deferred, noted, strict=True)
    ]
    notes: Notes = {}
    with ExitStack() as during:
        if decision.watches:
            layers = learnable_layers(graph, decision, linear_owners(module))
            notes = during.enter_context(noted_inputs(layers))
        answers = [during.enter_context(_asked(nodes[half.node], half)) for half in plan.halved]
        arrived: Mapping[int, Tensor | None] = {}
        if hooked:
            arrived = during.enter_context(_noted_arrivals(graph, plan.captures))
        ends = [(leaf, 0) for leaf in plan.leaves]
        gradients, captured = _run_engine(
            graph, inputs, grads, plan.captures, mute=ends, keep_graph=bool(plan.reruns)
        )
    captured = tuple(arrived.get(place, grad) for place, grad in enumerate(captured))
    owners = graph.roots if plan.needs_roots else ()
    pending = Pending(plan, {index: nodes[index] for index in plan.passed_later}, owners)
    for position, use in enumerate(plan.deferred):
        assert use.capture is not None
        grad, operands = captured[use.capture], taken[position]
        if grad is None:
            continue
        if noted[position]:
            operands = _noted_operand(graph, use, notes, grad, error)
        pending.products.append(Product(use, grad, operands, by_engine[position]))
    for half, answer in zip(plan.halved, answers, strict=True):
        pending.products += _left_products(half, answer, hooked=hooked)
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
    seen = frozenset(
        leaf for leaf in decision.unlearned if len(notes.get(id(nodes[leaf].variable), ())) == 1
    )
    return gradients, pending, seen


def _asked(node: Any, half: Halved) -> AbstractContextManager[Answer]:
    """Have a compiled node leave its part of W while this is entered."""
    halves = halves_of(node)
    assert halves is not None  # the plan was made for nodes of this very type
    return halves.asked(node, half.cut)


@torch.no_grad()
def _left_products(half: Halved, answer: Answer, *, hooked: bool) -> list[Product]:
    """What a compiled node left undone; nothing if no gradient reached it."""
    products: list[Product] = []
    if answer.values is not None:
        for finish, uses in half.uses:
            grad, operands = take(finish, answer.values)
            products += [Product(use, grad, operands, hooked and use.chained) for use in uses]
    return products


def reference_gradients(
    graph: Graph, plan: Plan, inputs: Sequence[Tensor], grads: Sequence[Tensor]
) -> tuple[Gradients, dict[int, Tensor | None]]:
    """Gradients of a full backward, of inputs and parameters, with nothing added or freed."""
    leaves = [(leaf, 0) for leaf in plan.leaves]
    devices = {graph.nodes[leaf].variable.device for leaf in plan.leaves}
    on_cuda = [device for device in devices if device.type == "cuda"]
    with torch.random.fork_rng(devices=on_cuda):
        gradients, found = _run_engine(graph, inputs, grads, leaves, mute=leaves, keep_graph=True)
    return gradients, dict(zip(plan.leaves, found, strict=True))


def _run_engine(
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


@contextmanager
def _noted_arrivals(graph: Graph, edges: Sequence[Edge]) -> Iterator[Mapping[int, Tensor | None]]:
    """Note, by its place among the edges, the gradient with which each edge's node is run.

    Where the engine is asked for a gradient at a node that it also runs, it gives the gradient as
    it was before the hooks of the node's results; what the node is run with is the one that counts.
    """
    noted: dict[int, Tensor | None] = {}

    def note(place: int, output_nr: int) -> Callable[[tuple[Tensor | None, ...]], None]:
        def prehook(grads: tuple[Tensor | None, ...]) -> None:
            noted[place] = grads[output_nr]

        return prehook

    with ExitStack() as registered:
        for place, (node, output_nr) in enumerate(edges):
            handle = graph.nodes[node].register_prehook(note(place, output_nr))
            registered.callback(handle.remove)
        yield noted


def _may_pass_hooks(node: Any, use: Deferred) -> bool:
    """Whether hooks may sit between a product and its parameter.

    A node does not tell its hooks, but the tensor that they belong to does: here the transposed
    weight, which the product has saved if its other operand needs a gradient.
    """
    if not use.chained:
        return False
    own = use.recipe.own
    saved = getattr(node, own) if own is not None and not use.recomputed else None
    if saved is None or saved.grad_fn is None or saved._backward_hooks:
        return True
    [(below, _)] = saved.grad_fn.next_functions
    return not hasattr(below, "variable")


def _noted_operand(
    graph: Graph,
    use: Deferred,
    notes: Notes,
    grad: Tensor,
    error: Callable[[str, Sequence[Any]], BackwardError],
) -> tuple[Tensor, int]:
    """The operand that a checkpoint's recomputation passed by."""
    assert use.leaf is not None  # only plain chains are looked for inside checkpoints
    node = graph.nodes[use.leaf]
    seen = notes.get(id(node.variable), ())
    if len(seen) != 1 or seen[0].numel() != grad.shape[0] * seen[0].shape[-1]:
        raise error(
            "a checkpointed linear layer was recomputed in another way than before, so its "
            'input was not seen; use method="whole" for a stage whose checkpointed code '
            "changes from step to step",
            [node],
        )
    rows = seen[0].reshape(-1, seen[0].shape[-1])
    return rows.to(grad.dtype), 1
