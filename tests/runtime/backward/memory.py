"""Counting what stays alive."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from pipeloom.runtime.backward.boxes import Boxes
from tests.runtime.backward.harness import fresh
from tests.runtime.backward.zoo import flat


@contextmanager
def watched_saves() -> Iterator[Callable[[], list[Tensor]]]:
    """Watch what graphs save; the result lists what of it is still alive.

    By boxes, which a split knows; other hooks on saved tensors it takes for somebody's offloading.
    """
    boxes = Boxes()
    with boxes:
        yield lambda: alive_in(boxes)


def alive_in(boxes: Boxes) -> list[Tensor]:
    found = [box for box in (reference() for reference in boxes.contents) if box is not None]
    return [box.tensor for box in found if box.tensor is not None]


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
