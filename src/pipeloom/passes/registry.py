"""The passes by name, with their options.

::

    "unshard_parameters:lookahead=2:stages=0+3"
        → unshard_parameters(schedule, lookahead=2, stages={0, 3})
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib import import_module
from typing import Any

from pipeloom.errors import ScheduleError
from pipeloom.ir.schedule import Schedule

#: Every pass is the function of its name in the module of its name.
PASS_NAMES = (
    "insert_communication",
    "strip_communication",
    "place_receives",
    "unshard_parameters",
    "reduce_gradients",
    "merge_backward",
    "split_backward",
)


@dataclass(frozen=True)
class PassOption:
    """An option of a pass: its name, its type as it is written, its default."""

    name: str
    type: str
    default: Any


@dataclass(frozen=True)
class Pass:
    """A pass with its options filled in.

    >>> print(make_pass("place_receives", when="late"))
    place_receives:when=late
    """

    name: str
    function: Callable[..., Schedule]
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def run(self, schedule: Schedule) -> Schedule:
        """What the pass makes of the schedule."""
        result = self.function(schedule, **self.arguments)
        if not isinstance(result, Schedule):
            raise ScheduleError(f"the pass {self} returned {result!r}, not a Schedule")
        return result

    @property
    def summary(self) -> str:
        """The first line of the function's docstring."""
        return (inspect.getdoc(self.function) or "").partition("\n")[0]

    @property
    def options(self) -> tuple[PassOption, ...]:
        """What can be set."""
        parameters = list(inspect.signature(self.function).parameters.values())[1:]
        return tuple(
            PassOption(parameter.name, str(parameter.annotation), parameter.default)
            for parameter in parameters
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        )

    def __str__(self) -> str:
        settings = [f"{k}={_write(v)}" for k, v in self.arguments.items() if k != "costs"]
        return ":".join([self.name, *settings])


def list_passes() -> list[Pass]:
    """Every pass, without options filled in.

    >>> [p.name for p in list_passes()][0]
    'insert_communication'
    """
    return [make_pass(name) for name in PASS_NAMES]


def make_pass(item: str | Callable[..., Schedule], **arguments: Any) -> Pass:
    """A pass of the registry, or a function of yours, with options filled in."""
    if isinstance(item, str):
        if item not in PASS_NAMES:
            near = get_close_matches(item, PASS_NAMES, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ScheduleError(f"no pass is named {item!r}{hint}; known: {', '.join(PASS_NAMES)}")
        item = getattr(import_module(f"pipeloom.passes.{item}"), item)
    if not callable(item):
        raise ScheduleError(f"a pass is a name or a function of a Schedule, not {item!r}")
    step = Pass(getattr(item, "__name__", type(item).__name__), item, arguments)
    if arguments:
        known = [option.name for option in step.options]
        for name in arguments:
            if name not in known:
                has = f"it has {', '.join(known)}" if known else "it has none"
                raise ScheduleError(f"the pass {step.name} has no option {name!r}; {has}")
    return step


def parse_pass(text: str) -> Pass:
    """Read ``name:option=value:option=value``; a set of stages is written ``0+3``.

    >>> parse_pass("unshard_parameters:lookahead=2").arguments
    {'lookahead': 2}
    """
    name, *settings = text.strip().split(":")
    types = {option.name: option.type for option in make_pass(name).options}
    arguments: dict[str, Any] = {}
    for setting in settings:
        option, equals, value = setting.partition("=")
        if not equals or not option or not value:
            raise ScheduleError(
                f"{setting!r} in {text!r} does not set an option; write name:option=value"
            )
        if option in arguments:
            raise ScheduleError(f"{text!r} sets {option!r} twice")
        try:
            arguments[option] = _read(value, types.get(option, ""))
        except ValueError:
            raise ScheduleError(
                f"{setting!r} in {text!r}: not a value for {types[option]}"
            ) from None
    return make_pass(name, **arguments)


def _read(text: str, type_text: str) -> Any:
    """Read an option's value as its type says: a number, a set of stages, or a word."""
    if "None" in type_text and text.lower() == "none":
        return None
    if "Iterable[int]" in type_text:
        return frozenset(map(int, text.split("+")))
    if type_text.startswith("int"):
        return int(text)
    if type_text.startswith("float"):
        return float(text)
    return text


def _write(value: Any) -> str:
    if isinstance(value, (set, frozenset, tuple, list)):
        return "+".join(map(str, sorted(value)))
    return f"{value:g}" if isinstance(value, float) else str(value)
