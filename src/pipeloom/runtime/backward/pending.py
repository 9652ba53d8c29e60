"""What one microbatch keeps between I and W.

::

    I ──► products: gradient of a result, operands from F ──► W: the weight's gradient
          gradients: what came out of I ────────────────────► W: added as it is
          reruns: nodes to run again ───────────────────────► W: their weights' gradients
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from pipeloom.runtime.backward.boxes import Box
from pipeloom.runtime.backward.checkpointing import tensors_saved
from pipeloom.runtime.backward.method import Root
from pipeloom.runtime.backward.plan import Deferred, Plan
from pipeloom.runtime.backward.recipes import Operands
from pipeloom.runtime.backward.versions import versions
from pipeloom.runtime.backward.walk import Edge

__all__ = ["Gradient", "Pending", "Product"]


@dataclass(slots=True)
class Product:
    """A weight product to come: the gradient of the result, and the operands taken from F."""

    use: Deferred
    grad: Tensor
    operands: Operands
    by_engine: bool = False  # there may be hooks between the product and its parameter
    seen: Tensor | None = None  # how it sees ``.grad``: a tensor without memory

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
    boxed: list[Box] = field(default_factory=list)
    missing: list[Edge] = field(default_factory=list)  # that nothing came to
    overwritten: list[Edge] = field(default_factory=list)  # by I, before W could use it
    # Parameters that were added to in place, each with its node.
    arrived: dict[int, tuple[Tensor, Any]] = field(default_factory=dict)
    # Tensors of others that share memory with what products will use, in which a change would show
    # nowhere else: compiled code makes views that do not count along.
    shared: list[tuple[Edge, Tensor]] = field(default_factory=list)
    sealed: list[Tensor] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def edge(self, edge: Edge) -> GradientEdge:
        return GradientEdge(self.nodes[edge[0]], edge[1])

    def watch(self, given: Sequence[Tensor]) -> None:
        """Notice changes of these as well, as far as products will read them."""
        places = {
            tensor.untyped_storage()._cdata: product.use.target
            for product in self.products
            for tensor in product.tensors()
            if type(tensor) is Tensor and tensor.layout is torch.strided
        }
        for tensor in given:
            if type(tensor) is Tensor and tensor.layout is torch.strided:
                edge = places.get(tensor.untyped_storage()._cdata)
                if edge is not None:
                    self.shared.append((edge, tensor))

    def tensors(self) -> list[Tensor]:
        """Every tensor that is held, also by the nodes that W runs."""
        boxed = [box.tensor for box in self.boxed if box.tensor is not None]
        return self._used() + boxed + tensors_saved(self.nodes[at] for at in self.plan.saving)

    def seal(self) -> None:
        """Remember the contents of what W will use; nothing is added or removed from here on."""
        self.sealed = self._used()
        self.versions = versions(self.sealed)

    def changed(self) -> list[Edge]:
        """Where that enters the graph which was overwritten since; W may let go of it then."""
        found: list[Edge] = []
        sealed, self.sealed = self.sealed, []
        if versions(sealed) != self.versions:
            remembered = iter(self.versions)
            for edges, tensors in self._used_at():
                if versions(tensors) != [next(remembered) for _ in tensors]:
                    found += edges
        if any(box.is_overwritten() for box in self.boxed):
            found += [edge for _, asked, _ in self.reruns for edge in asked]
        return found

    def _used(self) -> list[Tensor]:
        used = [
            tensor
            for product in self.products
            for tensor in (product.grad, *product.operands)
            if isinstance(tensor, Tensor)
        ]
        used += [kept.grad for kept in self.gradients]
        for _, _, grads in self.reruns:
            used += grads
        used += [tensor for _, tensor in self.shared]
        return used

    def _used_at(self) -> Iterator[tuple[Sequence[Edge], list[Tensor]]]:
        """The same, by where it enters the graph."""
        for product in self.products:
            yield [product.use.target], product.tensors()
        for kept in self.gradients:
            yield [kept.target], kept.tensors()
        for _, asked, grads in self.reruns:
            yield asked, grads
        for edge, tensor in self.shared:
            yield [edge], [tensor]
