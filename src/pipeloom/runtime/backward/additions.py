"""Adding to ``.grad`` without torch's engine.

::

    product ──► .grad, or a view of it          by the product itself
    value ────► .grad                           at once, or many small ones by one call
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from pipeloom.runtime.backward.pending import Pending, Product
from pipeloom.runtime.backward.sums import takes_products

__all__ = ["Additions", "find_targets"]

PLAIN = (torch.nn.Parameter, Tensor)

# Gradients of at most so many entries are gathered and added by one call for all.
MOST_GATHERED = 1 << 16


def find_targets(pending: Pending, leaves: Iterable[int]) -> dict[int | None, Tensor | None]:
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
            product.by_engine
            or not _fits(parameter, product.grad, cast=product.use.cast)
            or (product.use.is_part and not _sees(pending, product, parameter))
        ):
            targets[leaf_or_none] = None
    for kept in pending.gradients:
        parameter = targets.get(kept.target[0])
        if parameter is not None and not _fits(parameter, kept.grad, cast=False):
            targets[kept.target[0]] = None  # the engine has cast what is not of the same type
    for _, asked, _ in pending.reruns:  # these go through the engine in any case
        targets.update({node: None for node, _ in asked if node in targets})
    return targets


def _takes_additions(parameter: Tensor) -> bool:
    """Whether the parameter's ``.grad`` may be added to without the engine."""
    if type(parameter) not in PLAIN or parameter._backward_hooks or not parameter.requires_grad:
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


def _sees(pending: Pending, product: Product, parameter: Tensor) -> bool:
    """Whether the product can be added to a view of ``.grad``; notes which."""
    total = parameter.grad
    stand_in = (
        torch.empty_like(parameter, device="meta", requires_grad=False)
        if total is None
        else torch.empty_strided(total.shape, total.stride(), device="meta")
    )
    product.seen = product.use.see(stand_in, pending.nodes)
    return product.seen is not None


def _grad_type(parameter: Tensor, value: Tensor) -> torch.dtype:
    """The type that ``.grad`` of a parameter has to have."""
    dtype: torch.dtype | None = getattr(parameter, "grad_dtype", parameter.dtype)
    return dtype or value.dtype


class Additions:
    """Additions to ``.grad``: products at once, small gradients gathered and added by one call."""

    __slots__ = ("_gathered",)

    def __init__(self) -> None:
        self._gathered: dict[int, tuple[Tensor, Tensor]] = {}  # total → total, value

    def add_product(self, parameter: Tensor, product: Product) -> None:
        """``parameter.grad`` grows by a product."""
        use, total, grad = product.use, parameter.grad, product.grad
        add_to = use.recipe.add_to
        if (  # nearly always
            add_to is not None
            and total is not None
            and product.seen is None
            and total.dtype == grad.dtype
            and total.layout is torch.strided
        ):
            add_to(total, grad, product.operands, use.transposed)
        elif product.seen is not None:
            self._add_to_part(parameter, product, product.seen)
        else:
            self._add_to_all(parameter, product)

    def _add_to_part(self, parameter: Tensor, product: Product, seen: Tensor) -> None:
        total, recipe, grad = parameter.grad, product.use.recipe, product.grad
        if total is None or total.layout is not torch.strided:
            total = self._zeros(parameter, grad)  # other views will add to other parts
        part = total.as_strided(
            seen.shape, seen.stride(), total.storage_offset() + seen.storage_offset()
        )
        if recipe.add_to is not None and takes_products(total.dtype, grad):
            recipe.add_to(part, grad, product.operands, False)
        else:
            part.add_(recipe.compute(grad, product.operands, False))

    def _add_to_all(self, parameter: Tensor, product: Product) -> None:
        use, total, grad = product.use, parameter.grad, product.grad
        recipe = use.recipe
        # An embedding may ask for sparse gradients, also of a weight that is used otherwise too.
        is_dense = total is None or total.layout is torch.strided
        if recipe.add_to is not None and is_dense:
            dtype = _grad_type(parameter, grad) if total is None else total.dtype
            if dtype != grad.dtype and takes_products(dtype, grad):
                # As a value it would be rounded before it is added.
                total = self._zeros(parameter, grad) if total is None else total
                recipe.add_to(total, grad, product.operands, use.transposed)
                return
        value = recipe.compute(grad, product.operands, use.transposed)
        if is_dense and value.layout is torch.strided:
            self.add(parameter, value, fresh=True)
        elif total is None:
            parameter.grad = value
        else:
            parameter.grad = total.add_(value) if is_dense else value + total

    def _zeros(self, parameter: Tensor, value: Tensor) -> Tensor:
        """Let ``.grad`` be dense, with what was there."""
        before = parameter.grad
        dtype = _grad_type(parameter, value) if before is None else before.dtype
        total = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        if before is not None:
            total.add_(before)
        parameter.grad = total
        return total

    def add(self, parameter: Tensor, value: Tensor, *, fresh: bool) -> None:
        """``parameter.grad += value``; a fresh value may become ``.grad`` itself."""
        total = parameter.grad
        if total is None:
            dtype = _grad_type(parameter, value)
            usable = fresh and value.dtype == dtype and value.stride() == parameter.stride()
            if not usable:
                value = torch.empty_like(parameter, dtype=dtype, requires_grad=False).copy_(value)
            parameter.grad = value
        elif (
            value.numel() > MOST_GATHERED
            or id(total) in self._gathered  # a second value cannot be added beside the first
            or total.is_neg()
            or total.is_conj()
        ):
            total.add_(value)
        else:
            self._gathered[id(total)] = total, value

    def finish(self) -> None:
        """Add what was gathered."""
        if self._gathered:
            totals, values = zip(*self._gathered.values(), strict=True)
            torch._foreach_add_(totals, values)
            self._gathered = {}
