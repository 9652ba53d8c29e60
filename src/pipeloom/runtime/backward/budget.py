"""Keeping less between I and W than F kept.

A deferred product keeps its operand and the gradient of its result, which can be more than F kept
for it. The products that hold most for their work are then computed right after I, into ``.grad``::

    held      x·W₁ ████████   x·W₂ ████████   x·W₃ ██████        limit ──┐
    work           ░░░░░░░░        ░░░░░░░░        ░░  ◄── at I          ▼
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from pipeloom.runtime.backward.checkpointing import is_packed, saved_names, tensors_saved
from pipeloom.runtime.backward.pending import Product
from pipeloom.runtime.backward.plan import Unit
from pipeloom.runtime.backward.walk import Graph

__all__ = [
    "bytes_of",
    "bytes_saved",
    "storages",
    "units_computed_early",
    "weight_storages",
]

# The most of the weight work that may move from W to I for the sake of memory.
MOST_WORK = 1 / 8


def bytes_of(tensors: Iterable[Tensor], *, excluded: Iterable[int] = ()) -> int:
    """Bytes of the tensors' storages, each once, without those whose addresses are excluded."""
    left_out = frozenset(excluded)
    sizes = {
        storage.data_ptr(): storage.nbytes() for tensor in tensors for storage in storages(tensor)
    }
    return sum(size for address, size in sizes.items() if address not in left_out)


def storages(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """What a tensor keeps in memory; of a wrapper (a distributed tensor), what it wraps."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        parts = [getattr(tensor, name) for name in flatten()[0]]
        for part in parts:
            if isinstance(part, Tensor):
                yield from storages(part)
    elif tensor.layout is torch.strided and not tensor._is_zerotensor():
        try:
            storage = tensor.untyped_storage()
            storage.data_ptr()
        except RuntimeError:
            return  # a wrapper that does not say what it wraps has no memory of its own
        yield storage


def bytes_saved(graph: Graph, *, excluded: Iterable[int]) -> int:
    """What the graph of a forward keeps alive; 0 where hooks keep it in a way of their own."""
    if any(is_packed(node, name) for node in graph.nodes for name in saved_names(type(node))):
        return 0
    return bytes_of(tensors_saved(graph.nodes), excluded=excluded)


def weight_storages(module: nn.Module) -> set[int]:
    """The addresses of a module's parameters and buffers."""
    return {
        storage.data_ptr()
        for tensor in (*module.parameters(), *module.buffers())
        for storage in storages(tensor)
    }


def units_computed_early(
    products: Sequence[Product], others: Sequence[Tensor], *, limit: float, excluded: Iterable[int]
) -> frozenset[Unit]:
    """Which products to compute right after I so that at most ``limit`` bytes are held until W.

    Empty where that is so already, or where it would take more than a small part of the work.
    """
    excluded = frozenset(excluded)
    by_unit: dict[Unit, list[Product]] = {}
    for product in products:
        by_unit.setdefault(product.use.unit, []).append(product)
    work = {unit: sum(map(_work, uses)) for unit, uses in by_unit.items()}

    def held(units: Iterable[Unit]) -> int:
        kept = [tensor for unit in units for p in by_unit[unit] for tensor in p.tensors()]
        return bytes_of([*kept, *others], excluded=excluded)

    staying = set(by_unit)
    early: set[Unit] = set()
    cheapest_first = sorted(by_unit, key=lambda unit: work[unit] / max(held([unit]), 1))
    for unit in cheapest_first:
        if held(staying) <= limit:
            return frozenset(early)
        staying.discard(unit)
        early.add(unit)
        if sum(work[moved] for moved in early) > MOST_WORK * sum(work.values()):
            return frozenset()
    return frozenset()


def _work(product: Product) -> int:
    """About how many multiplications: each entry of the gradient meets a row of the operand."""
    if product.use.work is not None:
        return product.use.work
    sizes = [x.numel() for x in product.operands if isinstance(x, Tensor)]
    if not sizes or product.use.recipe.partner is None:
        return product.grad.numel()
    rows = max(1, product.grad.numel() // max(1, product.grad.shape[-1]))
    return product.grad.numel() * max(1, sizes[0] // rows)
