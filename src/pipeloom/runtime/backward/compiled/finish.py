"""From the values that a compiled backward left to the gradients of its weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pipeloom.runtime.backward.compiled.cut import Cut
from pipeloom.runtime.backward.compiled.parts import Finish
from pipeloom.runtime.backward.recipes import Operands, Recipe
from pipeloom.runtime.backward.sums import add_product

__all__ = ["recipes_of", "take"]


def recipes_of(cut: Cut) -> dict[int, Recipe]:
    """Operand → how its gradient is computed from what ``take`` gives."""
    return {
        operand: _product(finish.product) if finish.product else _shared(place)
        for finish in cut.finishes
        for place, operand in enumerate(finish.operands)
    }


def take(finish: Finish, values: Sequence[Any]) -> tuple[Tensor, Operands]:
    """What recipes are given as the gradient of the result and as the operands."""
    used = [values[place] for place in finish.values]
    if finish.product:
        left, right = finish.run(*used)
        return right, (left,)
    first, *others = sorted(used, key=lambda value: not isinstance(value, Tensor))
    return first, (Shared(finish.run, used), *others)


# ── products of two matrices ────────────────────────────────────────────────────────────────────


def _no_node(node: Any) -> Operands:
    raise AssertionError("compiled code leaves its operands by itself")


def _add(total: Tensor, right: Tensor, taken: Operands, transposed: bool) -> None:
    if transposed:
        add_product(total, right.mT, taken[0].mT)
    else:
        add_product(total, taken[0], right)


@cache
def _product(dtype: torch.dtype) -> Recipe:
    def compute(right: Tensor, taken: Operands, transposed: bool) -> Tensor:
        left = taken[0]
        product = torch.matmul(right.mT, left.mT) if transposed else torch.matmul(left, right)
        return product.to(dtype)

    return Recipe(None, None, _no_node, compute, _add)


# ── everything else ─────────────────────────────────────────────────────────────────────────────


class Shared:
    """Gradients that one piece of work gives together, done when the first is asked for.

    Once all were fetched it starts anew: a check computes them before W does.
    """

    __slots__ = ("_num_fetched", "_results", "_run", "_values")

    def __init__(self, run: Callable[..., Sequence[Tensor]], values: Sequence[Any]) -> None:
        self._run, self._values = run, values
        self._results: Sequence[Tensor] = ()
        self._num_fetched = 0

    def fetch(self, place: int) -> Tensor:
        """One of the gradients."""
        if not self._results:
            self._results = _apart(self._run(*self._values), self._values)
        found = self._results[place]
        self._num_fetched += 1
        if self._num_fetched == len(self._results):
            self._results, self._num_fetched = (), 0
        return found


def _apart(results: Sequence[Tensor], values: Sequence[Any]) -> Sequence[Tensor]:
    """The results in memory of their own: each may become the ``.grad`` of a parameter, and two
    weights that were added up before their product have one gradient.
    """
    taken = {value.untyped_storage()._cdata for value in values if isinstance(value, Tensor)}
    own: list[Tensor] = []
    for result in results:
        memory = result.untyped_storage()._cdata
        own.append(result.clone() if memory in taken else result)
        taken.add(memory)
    return own


def _shared(place: int) -> Recipe:
    def compute(first: Tensor, taken: Operands, transposed: bool) -> Tensor:
        found = taken[0].fetch(place)
        return found.mT if transposed else found

    return Recipe(None, None, _no_node, compute)
