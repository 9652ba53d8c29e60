"""Schedules by name: the built-in ones, those of installed packages, and your own.

>>> print(build_schedule("GPipe", ranks=2, microbatches=2))
# gpipe · 2 ranks · 2 stages · 2 microbatches
rank 0   0F0  0F1  0B0  0B1
rank 1   1F0  1F1  1B0  1B1

Case, underscores, hyphens and torch's prefix "Schedule" do not matter: ``Interleaved1F1B``,
``ScheduleInterleaved1F1B`` and ``interleaved-1f1b`` are one schedule.

Built-in schedules are a constant table. What users register lives in one place,
:data:`USER_SCHEDULES`, the only state of the library: a decorator that makes a schedule appear
everywhere has to leave it somewhere.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any, ParamSpec, overload

from pipeloom.errors import ScheduleError
from pipeloom.ir.garbage import paused_garbage_collection
from pipeloom.ir.schedule import Schedule
from pipeloom.schedules.entry import (
    Constraint,
    ScheduleEntry,
    ScheduleFunction,
    Shape,
    describe_schedule,
)
from pipeloom.schedules.library import BUILT_IN

__all__ = [
    "USER_SCHEDULES",
    "Constraint",
    "ScheduleEntry",
    "Shape",
    "UserSchedules",
    "build_schedule",
    "find_schedule",
    "list_schedules",
    "register_schedule",
]

P = ParamSpec("P")

#: Packages declare schedules in this group: ``zigzag = "my_package.zigzag:zigzag"``.
ENTRY_POINT_GROUP = "pipeloom.schedules"


class UserSchedules:
    """What was registered in this process, and what installed packages declare."""

    def __init__(self) -> None:
        self._registered: dict[str, ScheduleEntry] = {}
        self._declared: tuple[ScheduleEntry, ...] | None = None

    def add(self, entry: ScheduleEntry) -> None:
        """Add a schedule. A name of the library cannot be taken; one's own can be replaced, which
        happens when a notebook cell or a module is run again."""
        taken = {_key(name): built_in for built_in in BUILT_IN for name in _names(built_in)}
        for name in _names(entry):
            if _key(name) in taken:
                raise ScheduleError(
                    f"the name {name!r} belongs to {taken[_key(name)].name} of the library; "
                    f"register yours under another name"
                )
        self._registered[_key(entry.name)] = entry

    def remove(self, name: str) -> None:
        """Forget a registered schedule."""
        if self._registered.pop(_key(name), None) is None:
            raise ScheduleError(f"no schedule {name!r} was registered")

    def entries(self) -> tuple[ScheduleEntry, ...]:
        """All of them; a registered schedule goes before a declared one of the same name."""
        if self._declared is None:
            self._declared = tuple(_load_declared())
        declared = (e for e in self._declared if _key(e.name) not in self._registered)
        return (*self._registered.values(), *declared)


#: The one place where registered schedules live.
USER_SCHEDULES = UserSchedules()


def build_schedule(
    name: str, *, ranks: int, microbatches: int, chunks: int | None = None, **options: Any
) -> Schedule:
    """Build a schedule by name.

    >>> build_schedule("interleaved_1f1b", ranks=4, microbatches=9)
    Traceback (most recent call last):
    pipeloom.errors.ScheduleError: interleaved_1f1b needs microbatches divisible by the number of \
rounds, microbatches // ranks: 8 or 10, not 9
    """
    entry = find_schedule(name)
    shape = Shape(ranks, microbatches, entry.default_chunks if chunks is None else chunks, options)
    with paused_garbage_collection():
        return entry.build_checked(shape)


def list_schedules() -> tuple[ScheduleEntry, ...]:
    """Every schedule that has a name: the library's, then users'.

    >>> [entry.name for entry in list_schedules()][:3]
    ['forward_only', 'gpipe', '1f1b']
    """
    return (*BUILT_IN, *USER_SCHEDULES.entries())


def find_schedule(name: str) -> ScheduleEntry:
    """The entry of a name or alias.

    >>> find_schedule("ScheduleZBVZeroBubble").name
    'zbv'
    """
    wanted = _key(str(name))
    by_key: dict[str, ScheduleEntry] = {}
    spelled: dict[str, str] = {}
    for entry in list_schedules():
        for alias in _names(entry):
            by_key.setdefault(_key(alias), entry)
            spelled.setdefault(_key(alias), alias)
    if wanted in by_key:
        return by_key[wanted]
    close = difflib.get_close_matches(wanted, spelled, n=3, cutoff=0.5)
    names = dict.fromkeys(by_key[key].name for key in close)
    hint = f"did you mean {' or '.join(names)}?" if names else "see `pipeloom schedules`"
    raise ScheduleError(f"there is no schedule {name!r}; {hint}")


@overload
def register_schedule(function: Callable[P, Schedule], /) -> ScheduleFunction[P]: ...


@overload
def register_schedule(
    name: str | None = None,
    /,
    *,
    aliases: tuple[str, ...] = (),
    family: str = "user",
    constraints: tuple[Constraint, ...] = (),
    chunks: int | None = None,
    bubble: str = "",
    peak: str = "",
) -> Callable[[Callable[P, Schedule]], ScheduleFunction[P]]: ...


def register_schedule(
    name_or_function: str | Callable[..., Schedule] | None = None, /, **description: Any
) -> Any:
    """Make a function of yours a schedule that is known everywhere by its name.

    The name is the function's where none is given.

    >>> from pipeloom.ir.notation import parse_grid
    >>> @register_schedule("by_hand")
    ... def two_by_one(*, ranks: int, microbatches: int) -> Schedule:
    ...     "Two ranks, one microbatch."
    ...     return parse_grid("0F0 0B0\\n1F0 1B0")
    >>> print(build_schedule("by_hand", ranks=2, microbatches=1))
    # by_hand · 2 ranks · 2 stages · 1 microbatches
    rank 0   0F0  0B0
    rank 1   1F0  1B0
    >>> USER_SCHEDULES.remove("by_hand")
    """

    def decorate(function: Callable[P, Schedule]) -> ScheduleFunction[P]:
        name = name_or_function
        if not isinstance(name, str):
            name = getattr(function, "__name__", "")
        described = describe_schedule(name=name, **description)(function)
        USER_SCHEDULES.add(described.entry)
        return described

    return decorate(name_or_function) if callable(name_or_function) else decorate


def _names(entry: ScheduleEntry) -> tuple[str, ...]:
    return (entry.name, *entry.aliases)


def _key(name: str) -> str:
    """What is left of a name when case, punctuation and torch's prefix do not count."""
    key = "".join(character for character in name.lower() if character not in "_- ")
    return key.removeprefix("schedule")


def _load_declared() -> list[ScheduleEntry]:
    """The schedules of installed packages. One that cannot be loaded must not take the others
    with it: it is left out with a warning."""
    built_in = {_key(name) for entry in BUILT_IN for name in _names(entry)}
    entries = []
    for declared in entry_points(group=ENTRY_POINT_GROUP):
        if _key(declared.name) in built_in:
            problem = "the name belongs to the library"
        else:
            try:
                entries.append(_entry_of(declared))
                continue
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
        package = declared.dist.name if declared.dist else "?"
        warnings.warn(
            f"the schedule {declared.name!r} of the package {package!r} is left out: {problem}",
            stacklevel=2,
        )
    return entries


def _entry_of(declared: EntryPoint) -> ScheduleEntry:
    """An entry point may name a described function, or a plain one, which takes its name."""
    function = declared.load()
    entry = getattr(function, "entry", None)
    if isinstance(entry, ScheduleEntry):
        return entry
    return describe_schedule(name=declared.name)(function).entry
