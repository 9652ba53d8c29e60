"""W: from what I kept to ``.grad``.

Two ways lead there, decided per parameter at W:

*In place*, for a parameter that only plain chains lead to and that has no hooks of its own: the
product is added to ``.grad`` by the product itself (``addmm_``). The parameter's place in the
autograd graph is then passed once with nothing to add, if somebody may listen there (gradient
reducers do), to learn that it is done.

*Through torch's engine*, for everything else: the gradients enter the graph where W begins, and
tensor hooks, accumulation and post-accumulate hooks run as in any backward::

    product ──► T ──► cast ──► (hooks) .grad (hooks)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pipeloom.runtime.backward.additions import Additions, find_targets
from pipeloom.runtime.backward.budget import storages
from pipeloom.runtime.backward.listeners import Listeners, pass_parameters
from pipeloom.runtime.backward.pending import Gradient, Pending, Product
from pipeloom.runtime.backward.plan import Plan, Unit
from pipeloom.runtime.backward.self_check import muted_hooks
from pipeloom.runtime.backward.walk import Edge, accumulation_below

__all__ = ["add_early", "add_weight_gradients", "weight_gradients"]

GRAPH_CODE = torch.autograd.graph.__file__


@torch.no_grad()
def add_weight_gradients(pending: Pending, listeners: Listeners) -> None:
    """Add everything that is pending to ``.grad``; empties ``pending`` as it goes."""
    with torch._C.DisableTorchFunctionSubclass():  # products of subclasses are plain gradients
        sent = _send_gradients(pending)
    pass_parameters(_missed(pending, sent))
    listeners.tell(pending.arrived)


def _send_gradients(pending: Pending) -> list[Edge]:
    """Add in place or through the engine; returns the edges at which gradients entered the graph.

    What goes through the engine is computed group by group of what hangs together, so that the
    gradients of one group are gone before those of the next are there.
    """
    plan = pending.plan
    targets = find_targets(pending, plan.in_place)
    additions = Additions()
    jobs: dict[int, list[tuple[Edge, Callable[[], Tensor]]]] = {}

    def send(edge: Edge, compute: Callable[[], Tensor]) -> None:
        group = -1 if at_once else plan.group[edge[0]]
        jobs.setdefault(group, []).append((edge, compute))

    by_engine = [
        pending.nodes[leaf].variable
        for leaf in plan.leaves
        if targets.get(leaf) is None and leaf in pending.nodes
    ]
    at_once = any(map(_wants_all_at_once, by_engine)) or _may_change_operands(pending, by_engine)
    # Later layers first, as a backward would: reducers fill their buckets in that order.
    products, pending.products = deque(pending.products), []
    while products:
        product = products.popleft()
        use = product.use
        parameter = targets.get(use.leaf)
        if parameter is None or use.leaf is None:
            send(use.target, partial(_compute, product))
        else:
            additions.add_product(parameter, product)
            pending.arrived[id(parameter)] = parameter, pending.nodes[use.leaf]
    for edges, asked, grads in pending.reruns:
        for edge, grad in _run_again(pending, edges, asked, grads):
            send(edge, partial(_not_shared, grad, grads))
    pending.reruns, pending.boxed = [], []
    for kept in pending.gradients:
        parameter = targets.get(kept.target[0])
        if parameter is None:
            send(kept.target, partial(_own, kept, plan))
        else:
            additions.add(parameter, kept.grad, fresh=False)
            pending.arrived[id(parameter)] = parameter, pending.nodes[kept.target[0]]
    pending.gradients = []
    additions.finish()
    sent: list[Edge] = []
    for group in list(jobs):
        together = [edge for edge, _ in jobs[group]]
        grads = [compute() for _, compute in jobs.pop(group)]
        _run_to_parameters(pending, together, grads, counted=at_once)
        sent += together
    return sent


def _run_to_parameters(
    pending: Pending, edges: Sequence[Edge], grads: Sequence[Tensor], *, counted: bool
) -> None:
    """``counted``: hooks ask the engine which nodes it will run; it leaves out a single root."""
    roots, values = [pending.edge(edge) for edge in edges], list(grads)
    if counted and len(roots) == 1:
        nowhere = torch.zeros((), requires_grad=True)
        roots.append(get_gradient_edge(nowhere))
        values.append(nowhere.detach())
    torch.autograd.backward(roots, values)


def _compute(product: Product) -> Tensor:
    """The gradient at the edge where it enters the graph."""
    use = product.use
    gradient = use.recipe.compute(product.grad, product.operands, False)
    return gradient if use.window is None else use.window.pad(gradient)


def _own(kept: Gradient, plan: Plan) -> Tensor:
    """A gradient that nobody else has: nodes hand views of it on, and one may become ``.grad``."""
    return kept.grad if kept.target[0] in plan.leaf_set else kept.grad.clone()


def _not_shared(grad: Tensor, given: Sequence[Tensor]) -> Tensor:
    """What a node computed, unless it only passed on what it was given."""
    memory = {storage.data_ptr() for one in given for storage in storages(one)}
    return grad.clone() if any(one.data_ptr() in memory for one in storages(grad)) else grad


def _wants_all_at_once(parameter: Tensor) -> bool:
    """Whether torch's own hooks wait for the gradients of several tensors in one run."""
    hooks: Mapping[int, Any] = parameter._backward_hooks or {}
    # Where the code is: such hooks may bear the name and module of the user's function.
    codes = (getattr(hook, "__code__", None) for hook in hooks.values())
    return any(code is not None and code.co_filename == GRAPH_CODE for code in codes)


def _may_change_operands(pending: Pending, parameters: Sequence[Tensor]) -> bool:
    """Whether hooks that take an optimizer's step may change what other products are made of."""
    stepped = [p for p in parameters if getattr(p, "_post_accumulate_grad_hooks", None)]
    if not stepped:
        return False
    changed = {storage.data_ptr() for parameter in stepped for storage in storages(parameter)}
    return any(
        storage.data_ptr() in changed
        for product in pending.products
        for tensor in product.tensors()
        for storage in storages(tensor)
    )


def _missed(pending: Pending, sent: Sequence[Edge]) -> list[Tensor]:
    """Parameters that got no gradient although a backward would have come to them."""
    if not pending.missing:
        return []

    def below(edges: Iterable[Edge]) -> dict[int, Tensor]:
        ends = [end for at, _ in edges for end in accumulation_below(pending.nodes[at])]
        return {id(end.variable): end.variable for end in ends}

    reached = {*below(sent), *pending.arrived}
    return [one for key, one in below(pending.missing).items() if key not in reached]


@torch.no_grad()
def add_early(pending: Pending, units: frozenset[Unit]) -> None:
    """Add some of the products now, where nobody listens to their parameters."""
    if not units:
        return
    early = [product for product in pending.products if product.use.unit in units]
    leaves = {product.use.leaf for product in early if product.use.leaf is not None}
    targets = find_targets(pending, leaves & pending.plan.in_place)
    additions = Additions()
    done: set[int] = set()
    with torch._C.DisableTorchFunctionSubclass():
        for product in early:
            leaf = product.use.leaf
            parameter = targets.get(leaf)
            if parameter is not None and leaf is not None:
                additions.add_product(parameter, product)
                pending.arrived[id(parameter)] = parameter, pending.nodes[leaf]
                done.add(id(product))
        additions.finish()
    pending.products = [product for product in pending.products if id(product) not in done]


@torch.no_grad()
def weight_gradients(pending: Pending) -> dict[int, Tensor]:
    """The gradients that W would add, per parameter's node, without adding or freeing anything."""
    edges = [(kept.target, kept.grad) for kept in pending.gradients]
    with torch._C.DisableTorchFunctionSubclass():
        for product in pending.products:
            entered = _through_views(pending, product) or (product.use.target, _compute(product))
            edges.append(entered)
    for starts, asked, grads in pending.reruns:
        edges += _run_again(pending, starts, asked, grads)
    leaves = [leaf for leaf in pending.plan.leaves if leaf in pending.nodes]
    if not edges or not leaves:
        return {}
    found: tuple[Tensor | None, ...] = torch.autograd.grad(
        [pending.edge(edge) for edge, _ in edges],
        [GradientEdge(pending.nodes[leaf], 0) for leaf in leaves],
        [grad for _, grad in edges],
        retain_graph=True,
        allow_unused=True,
    )
    return {leaf: grad for leaf, grad in zip(leaves, found, strict=True) if grad is not None}


def _through_views(pending: Pending, product: Product) -> tuple[Edge, Tensor] | None:
    """Where only views lie between, the gradient of the whole parameter, as W would add to it."""
    leaf = product.use.leaf
    if leaf is None or product.by_engine or not product.use.is_part:
        return None
    total = torch.zeros_like(pending.nodes[leaf].variable, requires_grad=False)
    part = product.use.see(total, pending.nodes)
    if part is None:
        return None
    part.add_(product.use.recipe.compute(product.grad, product.operands, False))
    return (leaf, 0), total


def _run_again(
    pending: Pending, edges: Sequence[GradientEdge], asked: Sequence[Edge], grads: Sequence[Tensor]
) -> list[tuple[Edge, Tensor]]:
    parameters = [
        pending.nodes[node].variable for node, _ in asked if node in pending.plan.leaf_set
    ]
    with muted_hooks(parameters):
        found: tuple[Tensor | None, ...] = torch.autograd.grad(
            edges,
            [pending.edge(edge) for edge in asked],
            grads,
            retain_graph=True,
            allow_unused=True,
        )
    return [(edge, grad) for edge, grad in zip(asked, found, strict=True) if grad is not None]
