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

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from pipeloom.runtime.backward.listeners import Listeners
from pipeloom.runtime.backward.pending import Pending, Product
from pipeloom.runtime.backward.self_check import muted_hooks
from pipeloom.runtime.backward.walk import Edge

__all__ = ["add_early", "add_weight_gradients", "weight_gradients"]

PLAIN = (torch.nn.Parameter, Tensor)

# Gradients of at most so many entries are gathered and added by one call for all.
MOST_GATHERED = 1 << 16


@torch.no_grad()
def add_weight_gradients(pending: Pending, listeners: Listeners) -> None:
    """Add everything that is pending to ``.grad``; empties ``pending`` as it goes."""
    plan = pending.plan
    roots: dict[int, list[tuple[Edge, Tensor]]] = {}
    arrived = pending.arrived
    targets = _targets(pending, plan.in_place)
    additions = _Additions()

    def send(edge: Edge, grad: Tensor) -> None:
        roots.setdefault(plan.group[edge[0]], []).append((edge, grad))

    # Later layers first, as a backward would: reducers fill their buckets in that order.
    for position, product in enumerate(pending.products):
        use = product.use
        parameter = targets.get(use.leaf)
        if parameter is None or use.leaf is None:
            send(use.target, use.recipe.compute(product.grad, product.operands, False))
        else:
            additions.add_product(parameter, product)
            arrived[id(parameter)] = parameter, pending.nodes[use.leaf]
        pending.products[position] = None  # type: ignore[call-overload]
    pending.products = []
    for edges, asked, grads in pending.reruns:
        for edge, grad in _run_again(pending, edges, asked, grads):
            send(edge, grad)
    pending.reruns, pending.boxed = [], []
    for kept in pending.gradients:
        parameter = targets.get(kept.target[0])
        if parameter is None:
            send(kept.target, kept.grad)
        else:
            additions.add(parameter, kept.grad, fresh=False)
            arrived[id(parameter)] = parameter, pending.nodes[kept.target[0]]
    pending.gradients = []
    additions.finish()
    for group in roots.values():
        torch.autograd.backward([pending.edge(edge) for edge, _ in group], [g for _, g in group])
    listeners.tell(arrived)


@torch.no_grad()
def add_early(pending: Pending, units: frozenset[tuple[int, int | None]]) -> None:
    """Add some of the products now, where nobody listens to their parameters."""
    if not units:
        return
    staying: list[Product] = []
    uses = [product.use for product in pending.products if product.use.unit in units]
    leaves = {use.leaf for use in uses if use.leaf is not None}
    targets = _targets(pending, leaves & pending.plan.in_place)
    additions = _Additions()
    for product in pending.products:
        use = product.use
        parameter = targets.get(use.leaf)
        if use.unit in units and parameter is not None and use.leaf is not None:
            additions.add_product(parameter, product)
            pending.arrived[id(parameter)] = parameter, pending.nodes[use.leaf]
        else:
            staying.append(product)
    additions.finish()
    pending.products = staying


@torch.no_grad()
def weight_gradients(pending: Pending) -> dict[int, Tensor]:
    """The gradients that W would add, per parameter's node, without adding or freeing anything."""
    edges = [(kept.target, kept.grad) for kept in pending.gradients]
    for product in pending.products:
        grad = product.use.recipe.compute(product.grad, product.operands, False)
        edges.append((product.use.target, grad))
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


# ── in place ────────────────────────────────────────────────────────────────────────────────────


def _targets(pending: Pending, leaves: Iterable[int]) -> dict[int | None, Tensor | None]:
    """The parameters, of those at ``leaves``, that nothing must reach through the engine.

    All or nothing: who listens at a parameter's place in the graph is to be told once.
    """
    targets: dict[int | None, Tensor | None] = {}
    for leaf in leaves:
        parameter = pending.nodes[leaf].variable
        targets[leaf] = parameter if _takes_additions(parameter) else None
    for product in pending.products:
        leaf_or_none = product.use.leaf
        parameter = targets.get(leaf_or_none)
        if parameter is not None and (
            product.by_engine or not _fits(parameter, product.grad, cast=product.use.cast)
        ):
            targets[leaf_or_none] = None
    for kept in pending.gradients:
        parameter = targets.get(kept.target[0])
        if parameter is not None and not _fits(parameter, kept.grad, cast=True):
            targets[kept.target[0]] = None
    return targets


def _takes_additions(parameter: Tensor) -> bool:
    """Whether the parameter's ``.grad`` may be added to without the engine."""
    if type(parameter) not in PLAIN or parameter._backward_hooks:
        return False
    if getattr(parameter, "_post_accumulate_grad_hooks", None):
        return False
    grad = parameter.grad
    if grad is None:
        return parameter.layout is torch.strided
    return type(grad) is Tensor and grad.layout is torch.strided and not grad.requires_grad


def _fits(parameter: Tensor, grad: Tensor, *, cast: bool) -> bool:
    """Whether the engine would do no more than add the gradient as it is."""
    if type(grad) is not Tensor or grad.layout is not torch.strided:
        return False
    # Without a cast on the way, both are of one kind on one device.
    return not cast or (
        grad.device == parameter.device and grad.is_complex() == parameter.is_complex()
    )


class _Additions:
    """Additions to ``.grad``: products at once, small gradients gathered and added by one call."""

    __slots__ = ("_gathered",)

    def __init__(self) -> None:
        self._gathered: dict[int, tuple[Tensor, Tensor]] = {}  # total → total, value

    def add_product(self, parameter: Tensor, product: Product) -> None:
        """``parameter.grad`` grows by a product."""
        use, total = product.use, parameter.grad
        recipe, grad = use.recipe, product.grad
        if total is not None and recipe.add_to is not None and total.dtype == grad.dtype:
            recipe.add_to(total, grad, product.operands, use.transposed)
            return
        value = recipe.compute(grad, product.operands, use.transposed)
        if value.layout is torch.strided:
            self.add(parameter, value, fresh=True)
        else:  # an embedding that asked for sparse gradients
            parameter.grad = value if total is None else total.add_(value)

    def add(self, parameter: Tensor, value: Tensor, *, fresh: bool) -> None:
        """``parameter.grad += value``; a fresh value may become ``.grad`` itself."""
        total = parameter.grad
        if total is None:
            dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
            usable = fresh and value.dtype == dtype and value.stride() == parameter.stride()
            if not usable:
                value = torch.empty_like(parameter, dtype=dtype, requires_grad=False).copy_(value)
            parameter.grad = value
        elif value.numel() > MOST_GATHERED or id(total) in self._gathered:
            total.add_(value)  # a second value for one total cannot be added beside the first
        else:
            self._gathered[id(total)] = total, value

    def finish(self) -> None:
        """Add what was gathered."""
        if self._gathered:
            totals, values = zip(*self._gathered.values(), strict=True)
            torch._foreach_add_(totals, values)
            self._gathered = {}
