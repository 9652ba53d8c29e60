"""What happens around an action when somebody watches: hooks, names for the profiler, a recorder.

Nobody watching costs nothing: the program is bound a second time, with these wrappers, and that
binding runs only in steps that are watched.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.autograd.profiler import record_function

from pipeloom.ir.action import Action
from pipeloom.runtime.hooks import ActionEvent, Hooks
from pipeloom.runtime.recorder import RankRecorder
from pipeloom.runtime.transport.protocol import Message

__all__ = ["Observer", "name_for_profiler", "somebody_follows"]

Call = Callable[[], None]

#: One line for every action, before it runs, at the level DEBUG.
progress = logging.getLogger("pipeloom.runtime.progress")


def somebody_follows() -> bool:
    """True if the logger of the progress is switched on."""
    return progress.isEnabledFor(logging.DEBUG)


def name_for_profiler(action: Action) -> str:
    """How an action shows up in profiles.

    >>> from pipeloom.ir.notation import parse_action
    >>> name_for_profiler(parse_action("2F0"))
    'pipeloom:2F0'
    """
    return f"pipeloom:{action}"


class Observer:
    """Wraps the calls of one rank."""

    def __init__(
        self,
        hooks: Hooks,
        recorder: RankRecorder | None,
        profiler_name: Callable[[Action], str] = name_for_profiler,
    ) -> None:
        self._hooks = hooks
        self._profiler_name = profiler_name
        self._recorder = recorder

    def wrap(
        self,
        rank: int,
        action: Action,
        call: Call,
        module: nn.Module | None,
        *,
        is_part: bool = False,
    ) -> Call:
        """The call with everything around it; parts of a fused action are not recorded, it is."""
        if self._recorder is not None and not is_part:
            call = self._recorder.wrap(action, call)
        before = self._hooks.find(action, "before")
        after = self._hooks.find(action, "after")
        starts = ActionEvent(action, rank, "before", module)
        ends = ActionEvent(action, rank, "after", module)
        name = self._profiler_name(action)

        def observed() -> None:
            progress.debug("rank %d: %s", rank, action)
            for hook in before:
                hook(starts)
            with record_function(name):
                call()
            for hook in after:
                hook(ends)

        return observed

    def wrap_slot(self, rank: int, action: Action, slot: Any) -> Any:
        """A slot that notes when its message came."""
        return slot if self._recorder is None else _NotingSlot(slot, action, self._recorder)


class _NotingSlot:
    """Passes everything on, and tells the recorder when a receive has ended."""

    __slots__ = ("_action", "_recorder", "_slot", "ticket", "waits_for")

    def __init__(self, slot: Any, action: Action, recorder: RankRecorder) -> None:
        self.ticket: Any = None
        self.waits_for = slot.waits_for
        self._slot = slot
        self._action = action
        self._recorder = recorder

    def deliver(self, message: Message) -> None:
        self._recorder.note_arrival(self._action)
        self._slot.deliver(message)
