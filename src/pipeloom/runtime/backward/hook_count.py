"""Did somebody register hooks meanwhile?

Which tensors of a graph have hooks cannot be seen from the graph, only that hooks were registered,
anywhere in the process: torch numbers their handles. Some are ours, for the time of an engine run,
and do not count::

    F ──► user's hook ──► I        the number has grown: there may be hooks on the way
    F ──► our prehook ──► I        the number is the same
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.utils.hooks import RemovableHandle

__all__ = ["HookCount"]


class HookCount:
    """Counts the hooks of others; shared by all stages of a process, so that they know ours."""

    def __init__(self) -> None:
        self._ours = 0

    def current(self) -> int:
        """How many hooks others have registered so far."""
        return RemovableHandle.next_id - self._ours

    @contextmanager
    def leaving_out(self) -> Iterator[None]:
        """What is registered while this is entered is ours."""
        before = RemovableHandle.next_id
        try:
            yield
        finally:
            self._ours += RemovableHandle.next_id - before
