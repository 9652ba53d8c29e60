"""How the weight half of an operation is computed from what the operation saved.

An operation of the forward appears in the autograd graph as a node with an edge per operand. For a
product, the gradient of one operand needs the other operand and the gradient of the result::

    y = x·Wᵀ + b      AddmmBackward0      edge 0: b   ← Σ dy
                                          edge 1: x   ← dy·W
                                          edge 2: Wᵀ  ← xᵀ·dy

A recipe takes from the node, before I frees it, what one edge's gradient needs, and computes that
gradient at W. Operations whose weight half is no product (norm scales, added biases) have no recipe
on purpose: their gradients are small, come out of I's own kernels, and holding the operands until W
would cost more than it saves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeloom.runtime.backward.sums import add_product

__all__ = ["RECIPES", "Operands", "Recipe", "signed"]

Operands = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Recipe:
    """The gradient of one operand, later.

    ``partner`` is the edge of the other operand of a product, or ``None``. ``compute(grad, taken,
    transposed)`` is the gradient, or its transpose, for an operand that was a transposed view of
    the weight; ``add_to(total, grad, taken, transposed)`` adds it to ``total`` in place.
    ``saved`` names the attribute whose hooks tell whether the activation is there or must be
    recomputed, ``own`` the one where the node keeps the operand itself, if its partner needs a
    gradient. An operand that ``rides_along`` is worth deferring only where its product is, since
    both need the same gradient; it must be a parameter itself.
    """

    partner: int | None
    saved: str | None
    take: Callable[[Any], Operands]
    compute: Callable[[Tensor, Operands, bool], Tensor]
    add_to: Callable[[Tensor, Tensor, Operands, bool], None] | None = None
    rides_along: bool = False
    own: str | None = None


# ── two-dimensional products ────────────────────────────────────────────────────────────────────


def _right_of_product(left: str, own: str, scale: str | None) -> Recipe:
    """Gradient of ``R`` in ``scale · L·R``: ``Lᴴ·dY``."""

    def take(node: Any) -> Operands:
        return getattr(node, left), _factor(node, scale)

    def compute(grad: Tensor, taken: Operands, transposed: bool) -> Tensor:
        if taken[0].layout is not torch.strided:  # such an operand goes on the left
            product = torch.bmm if grad.dim() == 3 else torch.mm
            return _turned(_scaled(product(taken[0].mH, grad), taken[1]), transposed)
        if transposed:
            return _scaled(torch.matmul(grad.mT, taken[0].conj()), taken[1])
        return _scaled(torch.matmul(taken[0].mH, grad), taken[1])

    def add_to(total: Tensor, grad: Tensor, taken: Operands, transposed: bool) -> None:
        if taken[0].layout is not torch.strided:
            total.add_(compute(grad, taken, transposed))
        elif transposed:
            add_product(total, grad.mT, taken[0].conj(), taken[1])
        else:
            add_product(total, taken[0].mH, grad, taken[1])

    return Recipe(1 if scale else 0, "_raw" + left, take, compute, add_to, own=own)


def _left_of_product(right: str, own: str, scale: str | None) -> Recipe:
    """Gradient of ``L`` in ``scale · L·R``: ``dY·Rᴴ``."""

    def take(node: Any) -> Operands:
        return getattr(node, right), _factor(node, scale)

    def compute(grad: Tensor, taken: Operands, transposed: bool) -> Tensor:
        if transposed:
            return _scaled(torch.matmul(taken[0].conj(), grad.mT), taken[1])
        return _scaled(torch.matmul(grad, taken[0].mH), taken[1])

    def add_to(total: Tensor, grad: Tensor, taken: Operands, transposed: bool) -> None:
        if transposed:
            add_product(total, taken[0].conj(), grad.mT, taken[1])
        else:
            add_product(total, grad, taken[0].mH, taken[1])

    return Recipe(2 if scale else 1, "_raw" + right, take, compute, add_to, own=own)


# ── what a node says ────────────────────────────────────────────────────────────────────────────


def signed(number: int) -> int:
    """A saved integer as it was: torch reads negative ones back as unsigned 64-bit numbers."""
    return number - (1 << 64) if number >= 1 << 63 else number


def _factor(node: Any, scale: str | None) -> Any:
    """What the gradient of a scaled product is multiplied by: the scale, conjugated."""
    return getattr(node, scale).conjugate() if scale else 1


def _turned(gradient: Tensor, transposed: bool) -> Tensor:
    return gradient.mT if transposed else gradient


def _scaled(product: Tensor, scale: Any) -> Tensor:
    return product if scale == 1 else product * scale


# ── the rest ────────────────────────────────────────────────────────────────────────────────────


def _added_row() -> Recipe:
    """Gradient of the bias in ``b + L·R``: the rows of ``dY``, summed."""

    def take(node: Any) -> Operands:
        return node.next_functions[0][0].variable.shape, _factor(node, "_saved_beta")

    def compute(grad: Tensor, taken: Operands, transposed: bool) -> Tensor:
        shape, scale = taken
        rows = grad.dim() == 2 and shape == grad.shape[1:]  # the usual case, by the quicker way
        summed = grad.sum(0) if rows else grad.sum_to_size(shape)
        # A bias of the result's own shape has nothing to sum; ``.grad`` must still be its own.
        return _scaled(summed.clone() if summed.shape == grad.shape else summed, scale)

    return Recipe(None, None, take, compute, rides_along=True)


def _convolution_weight() -> Recipe:
    def take(node: Any) -> Operands:
        return (
            node._saved_input,
            node._saved_weight.shape,  # the weight itself may change, or go, before W
            node._saved_stride,
            node._saved_padding,
            node._saved_dilation,
            node._saved_transposed,
            node._saved_output_padding,
            node._saved_groups,
        )

    def compute(grad: Tensor, taken: Operands, transposed: bool) -> Tensor:
        source, shape, *options = taken
        stand_in = grad.new_empty(1).expand(shape)
        _, gradient, _ = torch.ops.aten.convolution_backward(
            grad, source, stand_in, None, *options, [False, True, False]
        )
        return _turned(gradient, transposed)

    return Recipe(0, "_raw_saved_input", take, compute)


def _convolution_bias() -> Recipe:
    def compute(grad: Tensor, taken: Operands, transposed: bool) -> Tensor:
        return grad.sum([dim for dim in range(grad.dim()) if dim != 1])

    return Recipe(None, None, lambda node: (), compute, rides_along=True)


def _embedding_weight() -> Recipe:
    def take(node: Any) -> Operands:
        return (
            node._saved_indices,
            node._saved_weight_sym_argsize_0,
            node._saved_padding_idx,
            node._saved_scale_grad_by_freq,
            node._saved_sparse,
        )

    def compute(grad: Tensor, taken: Operands, transposed: bool) -> Tensor:
        indices, num_rows, padding_index, scale, sparse = taken
        gradient = torch.ops.aten.embedding_backward(
            grad, indices, num_rows, signed(padding_index), scale, sparse
        )
        return _turned(gradient, transposed)

    return Recipe(None, "_raw_saved_indices", take, compute)


def _embedding_bag_weight() -> Recipe:
    def take(node: Any) -> Operands:
        return (
            node._saved_indices,
            node._saved_offsets,
            node._saved_result1,  # which bag each index is in
            node._saved_result2,  # how large each bag is
            node._saved_result3,  # which row was the largest
            node._saved_weight_sym_argsize_0,
            node._saved_scale_grad_by_freq,
            node._saved_mode,
            node._saved_sparse,
            node._saved_per_sample_weights,
            node._saved_padding_idx,
        )

    def compute(grad: Tensor, taken: Operands, transposed: bool) -> Tensor:
        *others, padding_index = taken
        gradient = torch.ops.aten._embedding_bag_backward(grad, *others, signed(padding_index))
        return _turned(gradient, transposed)

    return Recipe(None, "_raw_saved_indices", take, compute)


def _grouped_right() -> Recipe:
    """Gradient of the experts' weights where rows are grouped by expert."""

    def take(node: Any) -> Operands:
        return node._saved_self, node._saved_offs

    def compute(grad: Tensor, taken: Operands, transposed: bool) -> Tensor:
        rows, offsets = taken
        gradient = torch.nn.functional.grouped_mm(rows.mT, grad, offs=offsets)
        return _turned(gradient, transposed)

    return Recipe(0, "_raw_saved_self", take, compute)


RECIPES: Mapping[str, Mapping[int, Recipe]] = {
    "MmBackward0": {
        0: _left_of_product("_saved_mat2", "_saved_self", None),
        1: _right_of_product("_saved_self", "_saved_mat2", None),
    },
    "AddmmBackward0": {
        0: _added_row(),
        1: _left_of_product("_saved_mat2", "_saved_mat1", "_saved_alpha"),
        2: _right_of_product("_saved_mat1", "_saved_mat2", "_saved_alpha"),
    },
    "BmmBackward0": {
        0: _left_of_product("_saved_mat2", "_saved_self", None),
        1: _right_of_product("_saved_self", "_saved_mat2", None),
    },
    "BaddbmmBackward0": {
        1: _left_of_product("_saved_batch2", "_saved_batch1", "_saved_alpha"),
        2: _right_of_product("_saved_batch1", "_saved_batch2", "_saved_alpha"),
    },
    "ConvolutionBackward0": {1: _convolution_weight(), 2: _convolution_bias()},
    "EmbeddingBackward0": {0: _embedding_weight()},
    "EmbeddingBagBackward0": {0: _embedding_bag_weight()},
    "GroupedMmBackward0": {1: _grouped_right()},
}
"""Node type → operand → recipe."""
