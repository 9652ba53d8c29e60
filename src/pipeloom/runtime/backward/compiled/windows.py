"""Which products a gradient consists of, and which part of it each one is.

::

    select_scatter(zeros, mm₁, 0, 3)  ──┐
                                        add ──► dW          mm₁ is dW[3], mm₂ is dW[5]
    select_scatter(zeros, mm₂, 0, 5)  ──┘

So W fills nothing with zeros, and adds nothing up: each product is added to its part of ``.grad``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from pipeloom.runtime.backward.compiled.operations import (
    VIEWS,
    aten,
    is_zero,
    kind,
    swaps_last_two,
    widens,
)

__all__ = ["Window", "find_windows"]

Step = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """A part of a gradient: what ``see`` makes of a tensor of its shape."""

    shape: tuple[int, ...]
    steps: tuple[Step, ...]

    @property
    def only_turns(self) -> bool:
        """Whether it is all of the gradient, perhaps transposed."""
        return all(step is _turn for step in self.steps)

    def see(self, total: Tensor) -> Tensor:
        """The part, as a view; ``RuntimeError`` if the strides allow none."""
        for step in self.steps:
            total = step(total)
        return total

    def pad(self, part: Tensor) -> Tensor:
        """The gradient that has nothing but this part.

        >>> Window((3, 2), (lambda total: total[1],)).pad(torch.tensor([7, 8]))
        tensor([[0, 0],
                [7, 8],
                [0, 0]])
        """
        total = part.new_zeros(self.shape)
        self.see(total).add_(part)
        return total


def find_windows(output: Node) -> list[tuple[Node, Window]]:
    """The products that a gradient is put together from; none if it is more than that."""
    shape = _static(output)
    if shape is None:
        return []
    whole = torch.empty(shape, device="meta")
    try:
        found = [(node, Window(shape, steps)) for node, steps in _walk(output, ())]
        fits = all(window.see(whole).shape == _static(node) for node, window in found)
    except (_Unknown, RuntimeError, IndexError):  # plain strides may allow no such view
        return []
    products = [node for node, _ in found]
    # A product in several places would be computed for each.
    return found if fits and len(set(products)) == len(products) else []


class _Unknown(Exception):
    pass


def _walk(node: Node, steps: tuple[Step, ...]) -> Iterator[tuple[Node, tuple[Step, ...]]]:
    """The products above a node, and how each is seen in a tensor of the output's shape."""
    args: Any = node.args
    operation = kind(node)
    if node.target in (aten.mm.default, aten.bmm.default):
        yield node, steps
    elif operation is aten.add and len(args) == 2 and not node.kwargs and _of_one_shape(node):
        for one in args:
            yield from _walk(one, steps)
    elif operation is aten.cat:
        parts, dim = args[0], args[1] if len(args) > 1 else 0
        sizes = [one.meta["val"].shape[dim] for one in parts]
        for one, start in zip(parts, accumulate([0, *sizes]), strict=False):
            yield from _walk(one, (*steps, _narrow(dim, start, one.meta["val"].shape[dim])))
    elif operation is aten.select_scatter and is_zero(args[0]):
        yield from _walk(args[1], (*steps, _select(*args[2:])))
    elif operation is aten.slice_scatter and is_zero(args[0]):
        yield from _walk(args[1], (*steps, _slice(*args[2:])))
    elif operation is aten.select_backward:
        yield from _walk(args[0], (*steps, _select(*args[2:])))
    elif operation is aten.slice_backward:
        yield from _walk(args[0], (*steps, _slice(*args[2:])))
    elif swaps_last_two(node):
        yield from _walk(args[0], (*steps, _turn))
    elif operation is aten.permute:
        yield from _walk(args[0], (*steps, _unpermute(args[1])))
    elif operation in VIEWS - {aten.t, aten.transpose}:
        yield from _walk(args[0], (*steps, _view(_static(args[0]))))
    elif operation is aten.clone or widens(node):
        yield from _walk(args[0], steps)
    elif not is_zero(node):
        raise _Unknown


def _static(node: Node) -> tuple[int, ...] | None:
    """The shape, unless it is dynamic or the value no plain tensor."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or not all(isinstance(size, int) for size in value.shape):
        return None
    return tuple(value.shape)


def _of_one_shape(node: Node) -> bool:
    shapes = [_static(one) if isinstance(one, Node) else None for one in node.args]
    return None not in shapes and len({*shapes, _static(node)}) == 1


# ── steps ────────────────────────────────────────────────────────────────────────────────────────


def _turn(total: Tensor) -> Tensor:
    return total.mT


def _narrow(dim: int, start: int, length: int) -> Step:
    return lambda total: total.narrow(dim, start, length)


def _select(dim: int, index: int) -> Step:
    return lambda total: total.select(dim, index)


def _slice(dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Step:
    return lambda total: torch.ops.aten.slice(total, dim, start, end, step)


def _unpermute(dims: Sequence[int]) -> Step:
    order = [dim % len(dims) for dim in dims]
    return lambda total: total.permute([order.index(dim) for dim in range(len(order))])


def _view(shape: tuple[int, ...] | None) -> Step:
    if shape is None:
        raise _Unknown
    return lambda total: total.view(shape)
