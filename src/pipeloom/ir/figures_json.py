"""The figures of a timeline file, read field by field.

::

    {"makespan": 33.0, …, "idle_causes": [{"rank": 0, "start": 4.0, …}, …], "peaks": […], …}

What is wrong is told with its place: ``idle_causes[3].start: 'x' is not a number``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from pipeloom.errors import ParseError
from pipeloom.ir.action import Action
from pipeloom.ir.timeline import LANES, Figures, IdleSpan, PeakMemory, Span

#: Turns a part of the JSON into what a figure is made of.
Read: TypeAlias = Callable[[Any], Any]


class _Wrong(Exception):
    """What is wrong with a part, and where that is."""

    def __init__(self, reason: str, place: str = "") -> None:
        super().__init__(reason)
        self.place = place


def read_figures(
    data: Any, *, slack: tuple[float, ...], num_ranks: int, read_action: Read
) -> Figures:
    """The figures in the JSON of a timeline.

    >>> read_figures({"makespan": "x"}, slack=(), num_ranks=1, read_action=str)
    Traceback (most recent call last):
    pipeloom.errors.ParseError: makespan: 'x' is not a number
    """

    def rank(value: Any) -> int:
        if type(value) is not int or not 0 <= value < num_ranks:
            raise _Wrong(f"{value!r} is none of the ranks 0..{num_ranks - 1}")
        return value

    def optional_action(value: Any) -> Action | None:
        return None if value is None else read_action(value)

    idle = {
        **{"rank": rank, "start": read_number, "end": read_number, "cause": _text},
        "waits_for": optional_action,
        "waits_for_rank": lambda value: None if value is None else rank(value),
        "before": optional_action,
    }
    peak = {
        **{"rank": rank, "total": read_number, "time": read_number, "action": optional_action},
        **{"categories": _amounts, "alive": _each(_sized)},
    }
    span = {
        **{"rank": rank, "lane": _lane, "start": read_number, "end": read_number},
        "action": read_action,
    }
    per_rank = _each(read_number, num_ranks)
    fields: dict[str, Read] = {
        **dict.fromkeys(NUMBERS, read_number),
        **{"work": per_rank, "bubble_of_rank": per_rank, "bounds": _amounts},
        "idle_causes": _each(lambda part: IdleSpan(**_read_record(part, idle))),
        "peaks": _each(lambda part: PeakMemory(**_read_record(part, peak)), num_ranks),
        "critical_path": _each(lambda part: Span(**_read_record(part, span))),
    }
    try:
        return Figures(**_read_record(data, fields), slack=slack)
    except _Wrong as wrong:
        raise ParseError(f"{wrong.place}: {wrong}" if wrong.place else str(wrong)) from None


#: The figures that are plain numbers.
NUMBERS = ("makespan", "span", "bubble", "bubble_makespan", "idle_fraction")


def is_number(value: Any) -> bool:
    """True for a finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def read_number(value: Any) -> float:
    """A finite number."""
    if not is_number(value):
        raise _Wrong(f"{value!r} is not a number")
    number: float = value
    return number


def _read_record(data: Any, fields: Mapping[str, Read]) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise _Wrong(f"{data!r} is not an object")
    found = {}
    for name, read in fields.items():
        if name not in data:
            raise _Wrong(f"{name} is missing")
        found[name] = _read_at(name, read, data[name])
    if "end" in found and found["end"] < found["start"]:
        raise _Wrong(f"it ends at {found['end']} before it starts at {found['start']}")
    return found


def _each(read: Read, length: int | None = None) -> Read:
    def read_list(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise _Wrong(f"{value!r} is not a list")
        if length is not None and len(value) != length:
            raise _Wrong(f"it has {len(value)} entries, but there are {length} ranks")
        return tuple([_read_at(f"[{index}]", read, part) for index, part in enumerate(value)])

    return read_list


def _read_at(place: str, read: Read, value: Any) -> Any:
    try:
        return read(value)
    except _Wrong as wrong:
        joint = "." if wrong.place and not wrong.place.startswith("[") else ""
        wrong.place = f"{place}{joint}{wrong.place}"
        raise
    except ParseError as error:
        raise _Wrong(str(error), place) from None


def _amounts(value: Any) -> dict[str, float]:
    if not isinstance(value, dict):
        raise _Wrong(f"{value!r} is not an object")
    return {name: _read_at(f"[{name}]", read_number, amount) for name, amount in value.items()}


def _sized(value: Any) -> tuple[str, float]:
    if not isinstance(value, list) or len(value) != 2:
        raise _Wrong(f"{value!r} is not a name and a size")
    return _text(value[0]), read_number(value[1])


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _Wrong(f"{value!r} is not a text")
    return value


def _lane(value: Any) -> str:
    if value not in LANES:
        raise _Wrong(f"{value!r} is none of the lanes {', '.join(LANES)}")
    return _text(value)
