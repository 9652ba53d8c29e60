"""A product that used its weight through views adds to ``.grad`` through the same views.

::

    weight (e·f, d) ──view (e, f, d)──► transpose ──► bmm
    .grad  (e·f, d) ──view (e, f, d)──► transpose  += its product

No gradient has to be reshaped, padded or added up afterwards: a product with one slice of a weight
touches one slice of ``.grad``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from pipeloom.runtime.backward.recipes import signed
from pipeloom.runtime.backward.walk import Edge

__all__ = ["VIEW_TYPES", "follow"]

Step = Callable[[Tensor, Any, int], Tensor | None]  # base, node, output → the node's result of base


def follow(base: Tensor, nodes: Mapping[int, Any], views: Sequence[Edge]) -> Tensor | None:
    """``base`` seen through views, which lead from a product down to a tensor of its shape.

    ``None`` if it has no such view: where entries were repeated, or copied into another order.

    >>> import torch
    >>> weight = torch.zeros(6, 2, requires_grad=True)
    >>> used = weight.view(3, 2, 2)[1].t()
    >>> turn = used.grad_fn; select = turn.next_functions[0][0]; view = select.next_functions[0][0]
    >>> total = torch.arange(12).view(6, 2)
    >>> follow(total, {0: turn, 1: select, 2: view}, [(0, 0), (1, 0), (2, 0)])
    tensor([[4, 6],
            [5, 7]])
    """
    for index, output_nr in reversed(views):
        node = nodes[index]
        try:
            seen = VIEWS[type(node).__name__](base, node, output_nr)
        except RuntimeError:  # strides that allow no such view
            return None
        if seen is None:
            return None
        base = seen
    return base


def _same(base: Tensor, node: Any, output_nr: int) -> Tensor:
    return base


def _reshaped(base: Tensor, node: Any, output_nr: int) -> Tensor:
    return base.view(node._input_metadata[output_nr].shape)


def _expanded(base: Tensor, node: Any, output_nr: int) -> Tensor | None:
    shape = node._input_metadata[output_nr].shape
    expanded = base.expand(shape)
    return expanded if expanded.numel() == base.numel() else None


def _selected(base: Tensor, node: Any, output_nr: int) -> Tensor:
    return base.select(signed(node._saved_dim), signed(node._saved_index))


def _sliced(base: Tensor, node: Any, output_nr: int) -> Tensor:
    every = [slice(None)] * base.dim()
    ends = [end if end is None else signed(end) for end in (node._saved_start, node._saved_end)]
    every[signed(node._saved_dim)] = slice(ends[0], ends[1], node._saved_step)
    return base[tuple(every)]


def _one_of_split(base: Tensor, node: Any, output_nr: int) -> Tensor:
    dim = signed(node._saved_dim)
    sizes = [part.shape[dim] for part in node._input_metadata]
    return base.narrow(dim, sum(sizes[:output_nr]), sizes[output_nr])


VIEWS: Mapping[str, Step] = {
    "AliasBackward0": _same,
    "CloneBackward0": _same,
    "ExpandBackward0": _expanded,
    "PermuteBackward0": lambda base, node, _: base.permute([signed(d) for d in node._saved_dims]),
    "ReshapeAliasBackward0": _reshaped,
    "SelectBackward0": _selected,
    "SliceBackward0": _sliced,
    "SplitBackward0": _one_of_split,
    "SplitWithSizesBackward0": _one_of_split,
    "SqueezeBackward0": _reshaped,
    "SqueezeBackward1": _reshaped,
    "SqueezeBackward2": _reshaped,
    "TBackward0": lambda base, node, _: base.t(),
    "ToCopyBackward0": _same,
    "TransposeBackward0": lambda base, node, _: base.transpose(
        signed(node._saved_dim0), signed(node._saved_dim1)
    ),
    "UnbindBackward0": lambda base, node, output_nr: base.select(
        signed(node._saved_dim), output_nr
    ),
    "UnsafeViewBackward0": _reshaped,
    "UnsqueezeBackward0": _reshaped,
    "ViewBackward0": _reshaped,
}

#: Nodes with one operand whose gradient is a view or a cast of theirs: what lies between a
#: parameter and the product that uses it.
VIEW_TYPES = frozenset(VIEWS)
