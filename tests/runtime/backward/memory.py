"""Counting what stays alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from tests.runtime.backward.harness import fresh
from tests.runtime.backward.zoo import flat


class Holder:
    """One saved tensor, alive as long as the graph holds it."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@contextmanager
def watched_saves() -> Iterator[Callable[[], list[Tensor]]]:
    """Watch what graphs save; the result lists what of it is still alive."""
    holders: list[weakref.ref[Holder]] = []

    def pack(tensor: Tensor) -> Holder:
        holder = Holder(tensor)
        holders.append(weakref.ref(holder))
        return holder

    def alive() -> list[Tensor]:
        return [holder.tensor for holder in (ref() for ref in holders) if holder is not None]

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda holder: holder.tensor):
        yield alive


def weight_storages(module: nn.Module) -> set[int]:
    tensors = [*module.parameters(), *module.buffers()]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def bytes_of(tensors: Iterable[Tensor], *, excluded: Iterable[int]) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(size for pointer, size in storages.items() if pointer not in set(excluded))


def bytes_saved_by_forward(module: nn.Module, inputs: Sequence[Tensor]) -> int:
    """Bytes that the graph of one plain forward saves, weights excluded."""
    with watched_saves() as alive:
        outputs = flat(module(*fresh(inputs)))
        found = bytes_of(alive(), excluded=weight_storages(module))
    del outputs
    return found
