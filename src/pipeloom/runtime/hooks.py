"""Hooks: functions of yours that run before or after actions.

::

    pipe.on("3F0", fn)                  after stage 3's forward of microbatch 0
    pipe.on("*I*", fn, when="before")   before every backward of inputs
    pipe.on("1SEND_*", fn)              after stage 1 has posted a message

A pattern is matched against the text of the action, as file names are (``*``, ``?``, ``[…]``). The
parts of a fused action are matched one by one, and the fused action by its own text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from torch import nn

from pipeloom.ir.action import Action

__all__ = ["ActionEvent", "Hook", "Hooks", "RemovableHook"]

When = Literal["before", "after"]


@dataclass(frozen=True, slots=True)
class ActionEvent:
    """What a hook is told."""

    action: Action
    rank: int
    when: When
    #: The module of the action's stage; ``None`` for a fused action.
    module: nn.Module | None


@dataclass(frozen=True, slots=True, eq=False)
class Hook:
    """A function, and the actions it is for."""

    pattern: str
    function: Callable[[ActionEvent], object]
    when: When

    def matches(self, action: Action) -> bool:
        return fnmatchcase(str(action), self.pattern)


class Hooks:
    """The hooks of one pipeline. ``version`` changes with every change."""

    def __init__(self) -> None:
        self._hooks: tuple[Hook, ...] = ()
        self.version = 0

    def add(
        self, pattern: str, function: Callable[[ActionEvent], object], when: When
    ) -> RemovableHook:
        if when not in ("before", "after"):
            raise ValueError(f"a hook runs 'before' or 'after' its action, not {when!r}")
        hook = Hook(pattern, function, when)
        self._hooks += (hook,)
        self.version += 1
        return RemovableHook(self, hook)

    def remove(self, hook: Hook) -> None:
        self._hooks = tuple(other for other in self._hooks if other is not hook)
        self.version += 1

    def find(self, action: Action, when: When) -> list[Callable[[ActionEvent], object]]:
        """The functions for an action, in the order in which they were added."""
        return [h.function for h in self._hooks if h.when == when and h.matches(action)]

    def __bool__(self) -> bool:
        return bool(self._hooks)


class RemovableHook:
    """What ``on`` returns; also usable in a ``with`` statement."""

    def __init__(self, hooks: Hooks, hook: Hook) -> None:
        self._hooks = hooks
        self._hook = hook

    def remove(self) -> None:
        """Run the function no more."""
        self._hooks.remove(self._hook)

    def __enter__(self) -> RemovableHook:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()
