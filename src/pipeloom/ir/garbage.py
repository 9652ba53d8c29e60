"""Making a million small values without the garbage collector looking through them again and
again."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_garbage_collection() -> Iterator[None]:
    """Pause the search for circular garbage, for work that makes many values and no circles.

    >>> with paused_garbage_collection():
    ...     gc.isenabled()
    False
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            _count_as_old()
            gc.enable()


def _count_as_old() -> None:
    """Let what was made count as long-lived at once. As young values, all of it would be looked
    through as soon as the collector is back, to find that none is garbage.

    Freezing and thawing is how Python lets one say so. What a program has frozen itself stays so.
    """
    if gc.get_freeze_count() == 0:
        gc.freeze()
        gc.unfreeze()
