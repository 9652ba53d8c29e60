"""What one microbatch keeps between I and W.

::

    I ──► products: gradient of a result, operands from F ──► W: the weight's gradient
          gradients: what came out of I ────────────────────► W: added as it is
          reruns: nodes to run again ───────────────────────► W: their weights' gradients
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge

from pipeloom.runtime.backward.method import Root
from pipeloom.runtime.backward.plan import Deferred, Plan
from pipeloom.runtime.backward.recipes import Operands
from pipeloom.runtime.backward.walk import Edge

__all__ = ["Gradient", "Pending", "Product"]


@dataclass(slots=True)
class Product:
    """A weight product to come: the gradient of the result, and the operands taken from F."""

    use: Deferred
    grad: Tensor
    operands: Operands
    by_engine: bool = False  # there may be hooks between the product and its parameter

    def tensors(self) -> list[Tensor]:
        """What it keeps alive."""
        return [self.grad, *(x for x in self.operands if isinstance(x, Tensor))]


@dataclass(slots=True)
class Gradient:
    """A gradient that came out of I, and where it enters the graph at W.

    It may be the tensor that I returned, or was given.
    """

    target: Edge
    grad: Tensor

    def tensors(self) -> list[Tensor]:
        """What it keeps alive."""
        return [self.grad]


@dataclass(slots=True)
class Pending:
    """What one microbatch keeps between I and W."""

    plan: Plan
    nodes: dict[int, Any]
    owners: tuple[Root, ...] = ()  # of nodes that do not keep themselves alive
    products: list[Product] = field(default_factory=list)
    gradients: list[Gradient] = field(default_factory=list)
    reruns: list[tuple[list[GradientEdge], list[Edge], list[Tensor]]] = field(default_factory=list)
    boxed: list[Tensor] = field(default_factory=list)
    # Parameters that were added to in place, each with its node.
    arrived: dict[int, tuple[Tensor, Any]] = field(default_factory=dict)
    versions: list[int] = field(default_factory=list)

    def edge(self, edge: Edge) -> GradientEdge:
        return GradientEdge(self.nodes[edge[0]], edge[1])

    def tensors(self) -> list[Tensor]:
        """Every tensor that is held."""
        held = [*self._guarded(), *self.boxed]
        for _, _, grads in self.reruns:
            held += grads
        return held

    def seal(self) -> None:
        """Remember the contents of what W will use; nothing is added or removed from here on."""
        self.versions = [tensor._version for tensor in self._guarded()]

    def changed(self) -> Sequence[Edge]:
        """Where that enters the graph which was overwritten since."""
        if [tensor._version for tensor in self._guarded()] == self.versions:
            return ()
        remembered = iter(self.versions)
        kept: tuple[Product | Gradient, ...] = (*self.products, *self.gradients)
        return [
            one.use.target if isinstance(one, Product) else one.target
            for one in kept
            if [t._version for t in one.tensors()] != [next(remembered) for _ in one.tensors()]
        ]

    def _guarded(self) -> list[Tensor]:
        guarded = [
            tensor
            for product in self.products
            for tensor in (product.grad, *product.operands)
            if isinstance(tensor, Tensor)
        ]
        guarded += [kept.grad for kept in self.gradients]
        return guarded
