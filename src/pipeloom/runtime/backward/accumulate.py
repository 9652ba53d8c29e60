"""W: from what I kept to ``.grad``.

Two ways lead there, decided per parameter at W:

*In place*, for a parameter that only plain chains lead to and that has no hooks of its own: the
product is added to ``.grad`` by the product itself (``addmm_``). The parameter's place in the
autograd graph is then passed once with nothing to add, so that those who listen there (gradient
reducers) learn that it is done.

*Through torch's engine*, for everything else: the gradients enter the graph where W begins, and
tensor hooks, accumulation and post-accumulate hooks run as in any backward::

    product ──► T ──► cast ──► (hooks) .grad (hooks)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from pipeloom.runtime.backward.plan import Deferred, Plan
from pipeloom.runtime.backward.recipes import Operands
from pipeloom.runtime.backward.self_check import muted_hooks
from pipeloom.runtime.backward.walk import Edge

__all__ = [
    "Gradient",
    "Pending",
    "Product",
    "add_early",
    "add_weight_gradients",
    "weight_gradients",
]


@dataclass(slots=True)
class Product:
    """A weight product to come: the gradient of the result, and the operands taken from F."""

    use: Deferred
    grad: Tensor
    operands: Operands
    versions: tuple[int, ...]
    by_engine: bool = False  # there may be hooks between the product and its parameter

    def tensors(self) -> list[Tensor]:
        """What it keeps alive."""
        return [self.grad, *(x for x in self.operands if isinstance(x, Tensor))]

    def changed(self) -> bool:
        """Whether someone overwrote the gradient or an operand."""
        return self.versions != versions_of((self.grad, *self.operands))


@dataclass(slots=True)
class Gradient:
    """A gradient that came out of I, and where it enters the graph at W."""

    target: Edge
    grad: Tensor
    versions: tuple[int, ...]

    def changed(self) -> bool:
        """Whether someone overwrote it; it may be the tensor that I returned, or was given."""
        return self.versions != versions_of((self.grad,))


@dataclass(slots=True)
class Pending:
    """What one microbatch keeps between I and W."""

    plan: Plan
    nodes: dict[int, Any]
    products: list[Product] = field(default_factory=list)
    gradients: list[Gradient] = field(default_factory=list)
    reruns: list[tuple[list[GradientEdge], list[Edge], list[Tensor]]] = field(default_factory=list)
    boxed: list[Tensor] = field(default_factory=list)
    passed: dict[int, Tensor] = field(default_factory=dict)  # parameters added to in place

    def edge(self, edge: Edge) -> GradientEdge:
        return GradientEdge(self.nodes[edge[0]], edge[1])

    def tensors(self) -> list[Tensor]:
        """Every tensor that is held."""
        held = [kept.grad for kept in self.gradients] + list(self.boxed)
        for product in self.products:
            held += product.tensors()
        for _, _, grads in self.reruns:
            held += grads
        return held


def versions_of(operands: Operands) -> tuple[int, ...]:
    return tuple([x._version for x in operands if isinstance(x, Tensor)])


class _Pass(torch.autograd.Function):
    """Reaches parameters' places in the graph without a gradient."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        ctx.count = len(parameters)
        return torch.empty(())

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[None, ...]:
        return (None,) * ctx.count


@torch.no_grad()
def add_weight_gradients(pending: Pending) -> None:
    """Add everything that is pending to ``.grad``; empties ``pending`` as it goes."""
    plan = pending.plan
    roots: dict[int, list[tuple[Edge, Tensor]]] = {}
    arrived = pending.passed
    targets = _targets(pending, plan.in_place)

    def send(edge: Edge, grad: Tensor) -> None:
        roots.setdefault(plan.group[edge[0]], []).append((edge, grad))

    # Later layers first, as a backward would: reducers fill their buckets in that order.
    for position, product in enumerate(pending.products):
        use = product.use
        parameter = targets.get(use.leaf)
        if parameter is None:
            send(use.target, use.recipe.compute(product.grad, product.operands, False))
        else:
            _add_product(parameter, product)
            arrived[id(parameter)] = parameter
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
            _store(parameter, kept.grad, fresh=False)
            arrived[id(parameter)] = parameter
    pending.gradients = []
    for group in roots.values():
        torch.autograd.backward([pending.edge(edge) for edge, _ in group], [g for _, g in group])
    if arrived:
        with torch.enable_grad():
            passed = _Pass.apply(*arrived.values())
        torch.autograd.backward(passed, torch.empty(()))


@torch.no_grad()
def add_early(pending: Pending, nodes: frozenset[int]) -> None:
    """Add the products of some nodes now, where nobody listens to their parameters."""
    if not nodes:
        return
    staying: list[Product] = []
    uses = [product.use for product in pending.products if product.use.node in nodes]
    leaves = {use.leaf for use in uses if use.leaf is not None}
    targets = _targets(pending, leaves & pending.plan.in_place)
    for product in pending.products:
        parameter = targets.get(product.use.leaf)
        if product.use.node in nodes and parameter is not None:
            _add_product(parameter, product)
            pending.passed[id(parameter)] = parameter
        else:
            staying.append(product)
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
    targets: dict[int | None, Tensor | None] = {
        leaf: _target(pending.nodes[leaf].variable) for leaf in leaves
    }
    for product in pending.products:
        parameter = targets.get(product.use.leaf)
        if parameter is not None and (product.by_engine or not _fits(parameter, product.grad)):
            targets[product.use.leaf] = None
    for kept in pending.gradients:
        parameter = targets.get(kept.target[0])
        if parameter is not None and not _fits(parameter, kept.grad):
            targets[kept.target[0]] = None
    return targets


def _target(parameter: Tensor) -> Tensor | None:
    """The parameter, if its ``.grad`` may be added to without the engine."""
    if type(parameter) not in (Tensor, torch.nn.Parameter) or parameter._backward_hooks:
        return None
    if getattr(parameter, "_post_accumulate_grad_hooks", None):
        return None
    grad = parameter.grad
    if grad is None:
        return parameter if parameter.layout is torch.strided else None
    plain = type(grad) is Tensor and grad.layout is torch.strided and not grad.requires_grad
    return parameter if plain else None


def _fits(parameter: Tensor, grad: Tensor) -> bool:
    """Whether the engine would do no more than add the gradient as it is."""
    return (
        type(grad) is Tensor
        and grad.layout is torch.strided
        and grad.device == parameter.device
        and grad.is_complex() == parameter.is_complex()
    )


def _add_product(parameter: Tensor, product: Product) -> None:
    use, total = product.use, parameter.grad
    if total is not None and use.recipe.add_to is not None and total.dtype == product.grad.dtype:
        use.recipe.add_to(total, product.grad, product.operands, use.transposed)
        return
    value = use.recipe.compute(product.grad, product.operands, use.transposed)
    if value.layout is not torch.strided:  # an embedding that asked for sparse gradients
        parameter.grad = value if total is None else total.add_(value)
    else:
        _store(parameter, value, fresh=True)


def _store(parameter: Tensor, value: Tensor, *, fresh: bool) -> None:
    """``parameter.grad += value``; a fresh value may become ``.grad`` itself."""
    if parameter.grad is not None:
        parameter.grad.add_(value)
        return
    dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
    usable = fresh and value.dtype == dtype and value.stride() == parameter.stride()
    if not usable:
        value = torch.empty_like(parameter, dtype=dtype, requires_grad=False).copy_(value)
    parameter.grad = value
