"""The operations of compiled backwards, as far as a cut has to know them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from pipeloom.runtime.backward.sums import HALF

__all__ = [
    "PADS",
    "PRODUCTS",
    "VIEWS",
    "aten",
    "factors",
    "is_constant",
    "is_zero",
    "kind",
    "swaps_last_two",
    "widens",
    "work",
]

aten = torch.ops.aten

# Sums into tables.
TABLES = frozenset(
    {
        aten.embedding_dense_backward,
        aten.index_put,
        aten._unsafe_index_put,
        aten._unsafe_masked_index_put_accumulate,
        aten.index_add,
        aten.scatter_add,
    }
)
# What is worth doing later.
PRODUCTS = frozenset(
    {
        aten.mm,
        aten.bmm,
        aten.addmm,
        aten.baddbmm,
        aten._grouped_mm,
        aten._scaled_mm,
        aten.convolution_backward,
        *TABLES,
    }
)
# What surrounds with zeros.
PADS = frozenset(
    {
        aten.constant_pad_nd,
        aten.select_backward,
        aten.select_scatter,
        aten.slice_backward,
        aten.slice_scatter,
    }
)
# Other views of the same entries.
VIEWS = frozenset(
    {
        aten.alias,
        aten.permute,
        aten.reshape,
        aten.squeeze,
        aten.t,
        aten.transpose,
        aten.unsqueeze,
        aten._unsafe_view,
        aten.view,
    }
)

# The same every time, and made of nothing.
CONSTANTS = frozenset(
    {
        aten.arange,
        aten.empty,
        aten.full,
        aten.ones,
        aten.scalar_tensor,
        aten.zeros,
        torch.ops.prims.iota,
    }
)


def kind(node: Node) -> Any:
    """The operation, whichever of its overloads; ``None`` for what is none of torch's, and for the
    view that takes the same bytes for numbers of another type.
    """
    if node.op != "call_function" or node.target is aten.view.dtype:
        return None
    return getattr(node.target, "overloadpacket", None)


def factors(node: Node) -> Sequence[Any]:
    """What a product multiplies with each other."""
    if kind(node) in (aten.addmm, aten.baddbmm):
        return node.args[1:3]
    return node.args[:2] if kind(node) not in TABLES else ()


def work(node: Node) -> int:
    """About how many multiplications: ``n·k·m`` where the three sizes are ``n·k, k·m, n·m``."""
    if kind(node) not in PRODUCTS:
        return 0
    if kind(node) in TABLES:
        return max(map(_numel, node.all_input_nodes))
    left, right = factors(node)
    result = node.args[2] if kind(node) is aten.convolution_backward else node
    return math.isqrt(_numel(left) * _numel(right) * _numel(result))


def _numel(node: Any) -> int:
    """How many entries there are; those of dynamic sizes by what they were when compiled."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    if not isinstance(value, Tensor):
        return 1
    sizes: Sequence[Any] = value.shape
    hints = [size if isinstance(size, int) else getattr(size.node, "hint", None) for size in sizes]
    return math.prod(1 if hint is None else int(hint) for hint in hints)


def swaps_last_two(node: Node) -> bool:
    """Whether a node is the transposition of matrices."""
    if kind(node) not in (aten.permute, aten.t, aten.transpose):
        return False
    num_dims: int = node.meta["val"].dim()
    dims: Any = node.args[1:]
    order = list(range(num_dims))
    if kind(node) is aten.permute:
        order = [dim % num_dims for dim in dims[0]]
    elif num_dims > 1:
        one, other = (dim % num_dims for dim in dims or (0, 1))
        order[one], order[other] = other, one
    return num_dims > 1 and order == [*range(num_dims - 2), num_dims - 1, num_dims - 2]


def widens(node: Node) -> bool:
    """Whether a node does no more than make float32 of half precision."""
    if kind(node) not in (aten._to_copy, torch.ops.prims.convert_element_type):
        return False
    given, made = node.all_input_nodes[0].meta["val"], node.meta["val"]
    return (
        given.dtype in HALF
        and made.dtype == torch.float32
        and given.device == made.device
        and made.layout is torch.strided
    )


def is_zero(node: Any) -> bool:
    """Whether a node is a tensor of zeros."""
    if kind(node) is aten.full:
        return bool(node.args[1] == 0)
    return kind(node) is aten.zeros


def is_constant(node: Node) -> bool:
    """Whether a node is the same every time, but for sizes."""
    return node.op == "get_attr" or (
        kind(node) in CONSTANTS
        and not any(isinstance(one.meta.get("val"), Tensor) for one in node.all_input_nodes)
    )
