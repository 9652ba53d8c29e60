"""What the library knows about one schedule: its name, what shapes it allows, what it costs.

A schedule is a function of its shape, described by a decorator::

    @describe_schedule(name="1f1b", bubble="(p−1)(F+I+W)", peak="min(p−r, m) on rank r")
    def one_f_one_b(*, ranks: int, microbatches: int) -> Schedule:
        \"\"\"One forward, one backward. …\"\"\"

The decorated function checks its shape before it builds anything and collects everything that is
wrong with it; ``one_f_one_b.entry`` is the description.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, ParamSpec, Protocol

from pipeloom.errors import ScheduleError
from pipeloom.ir.schedule import Schedule

P = ParamSpec("P")

#: What a shape is made of.
Part = Literal["ranks", "microbatches", "chunks", "options"]
PARTS = ("ranks", "microbatches", "chunks")
#: Stages times microbatches. More would fill the memory of most machines; far larger numbers are
#: slips of the keyboard.
MOST_FORWARDS = 10_000_000


@dataclass(frozen=True)
class Shape:
    """Ranks, microbatches, chunks (stages of a chain on each rank), and a family's options."""

    ranks: int
    microbatches: int
    chunks: int
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Constraint:
    """A condition on the shape, and the part of the shape one would change to meet it."""

    text: str
    holds: Callable[[Shape], bool]
    part: Part = "microbatches"


@dataclass(frozen=True)
class ScheduleOption:
    """An argument of a schedule beyond its shape."""

    name: str
    type: str
    default: object

    def __str__(self) -> str:
        return f"{self.name}: {self.type} = {self.default!r}"


@dataclass(frozen=True)
class ScheduleEntry:
    """One schedule of the library, or one that a user registered."""

    name: str
    build: Callable[..., Schedule]
    aliases: tuple[str, ...] = ()
    family: str = "user"
    summary: str = ""
    constraints: tuple[Constraint, ...] = ()
    options: tuple[ScheduleOption, ...] = ()
    #: Stages of a chain on each rank where the caller does not say.
    default_chunks: int = 1
    takes_chunks: bool = False
    #: Closed forms, as text: idle time added to m(F+I+W), and activations at the peak.
    bubble: str = ""
    peak: str = ""
    #: Has a peak of its own, though it takes a ``memory_limit``: whoever has a limit for the whole
    #: library passes it on only where that peak does not fit.
    keeps_peak: bool = False

    @property
    def constraints_text(self) -> str:
        """The constraints as one line; empty if every shape is allowed."""
        texts = [constraint.text for constraint in self.constraints]
        if not self.takes_chunks and self.default_chunks != 1:
            texts.append(f"exactly {self.default_chunks} chunks per rank")
        return "; ".join(texts)

    def find_problems(self, shape: Shape) -> list[str]:
        """Everything that forbids a shape, with the nearest values that are allowed."""
        problems = [
            f"{self.name} needs {part} to be a whole number, 1 or more, not {value!r}"
            for part in PARTS
            if not _is_count(value := getattr(shape, part))
        ]
        if problems:
            return problems
        forwards = shape.ranks * shape.chunks * shape.microbatches
        if forwards > MOST_FORWARDS:
            return [
                f"{self.name} with {shape.ranks} ranks, {shape.chunks} chunks per rank and "
                f"{shape.microbatches} microbatches would run {forwards} forwards, which is more "
                f"than {MOST_FORWARDS}; ask for less of one of them"
            ]
        if not self.takes_chunks and shape.chunks != self.default_chunks:
            count = f"{self.default_chunks} chunk{'s' if self.default_chunks > 1 else ''}"
            problems.append(f"{self.name} has exactly {count} per rank, not {shape.chunks}")
        for constraint in self.constraints:
            if not constraint.holds(shape):
                part = constraint.part
                if part == "options":
                    problems.append(f"{self.name} needs {constraint.text}")
                    continue
                legal = self.legal_values(part, shape)
                choice = f": {' or '.join(map(str, legal))}" if legal else ""
                problems.append(
                    f"{self.name} needs {constraint.text}{choice}, not {getattr(shape, part)}"
                )
        return problems

    def legal_values(self, part: Part, shape: Shape) -> tuple[int, ...]:
        """The allowed values of one part next to the one asked for: below it and above it."""
        near: int = getattr(shape, part)
        reach = 4 * max(near, shape.ranks * shape.chunks) + 16
        relevant = [constraint for constraint in self.constraints if constraint.part == part]

        def first_of(values: range) -> Iterator[int]:
            for value in values:
                changed: dict[str, Any] = {part: value}
                candidate = replace(shape, **changed)
                if all(constraint.holds(candidate) for constraint in relevant):
                    yield value
                    return

        if near >= 1 and list(first_of(range(near, near + 1))):
            return (near,)
        return (*first_of(range(near - 1, 0, -1)), *first_of(range(max(near, 0) + 1, near + reach)))

    def legal_microbatches(
        self, ranks: int, chunks: int | None = None, *, near: int, **options: Any
    ) -> tuple[int, ...]:
        """The numbers of microbatches allowed next to ``near``: itself, or one below and above."""
        shape = Shape(ranks, near, self.default_chunks if chunks is None else chunks, options)
        return self.legal_values("microbatches", shape)

    def build_checked(self, shape: Shape) -> Schedule:
        """Build the schedule of a shape, or say everything that is wrong with the request."""
        problems = self.find_unknown_options(shape.options) + self.find_problems(shape)
        if problems:
            raise ScheduleError("; ".join(problems))
        arguments = dict(shape.options)
        if self.takes_chunks:
            arguments["chunks"] = shape.chunks
        return self.build(ranks=shape.ranks, microbatches=shape.microbatches, **arguments)

    def find_unknown_options(self, options: Mapping[str, Any]) -> list[str]:
        """Options that this schedule does not have, each with the one that may be meant."""
        known = [option.name for option in self.options]
        problems = []
        for name in options:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = (
                    f"; did you mean {close[0]!r}?"
                    if close
                    else f"; it has {', '.join(known)}"
                    if known
                    else "; it has none"
                )
                problems.append(f"{self.name} has no option {name!r}{hint}")
        return problems


class ScheduleFunction(Protocol[P]):
    """A function of the library: what it builds, and its description."""

    entry: ScheduleEntry

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Schedule: ...


def describe_schedule(
    *,
    name: str,
    aliases: tuple[str, ...] = (),
    family: str = "user",
    constraints: tuple[Constraint, ...] = (),
    chunks: int | None = None,
    bubble: str = "",
    peak: str = "",
    keeps_peak: bool = False,
) -> Callable[[Callable[P, Schedule]], ScheduleFunction[P]]:
    """Describe a schedule and let its function check the shape before it builds.

    ``chunks`` says how many stages each rank has where the function does not take ``chunks``.
    """

    def decorate(function: Callable[P, Schedule]) -> ScheduleFunction[P]:
        signature = inspect.signature(function)
        parameters = signature.parameters
        missing = [part for part in ("ranks", "microbatches") if part not in parameters]
        if missing:
            raise ScheduleError(
                f"the schedule function {getattr(function, '__name__', function)!r} must take "
                f"the keyword arguments ranks and microbatches; it lacks {' and '.join(missing)}"
            )
        takes_chunks = "chunks" in parameters

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> Schedule:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            values = dict(bound.arguments)
            shape = Shape(
                values.pop("ranks"),
                values.pop("microbatches"),
                values.pop("chunks", entry.default_chunks),
                values,
            )
            problems = entry.find_problems(shape)
            if problems:
                raise ScheduleError("; ".join(problems))
            schedule = function(*args, **kwargs)
            _check_result(schedule, shape, name=entry.name)
            return schedule if schedule.name != "custom" else schedule.renamed(entry.name)

        default = parameters["chunks"].default if takes_chunks else chunks
        entry = ScheduleEntry(
            name=name,
            build=checked,
            aliases=aliases,
            family=family,
            summary=(inspect.getdoc(function) or "").partition("\n")[0].strip(),
            constraints=constraints,
            options=tuple(
                ScheduleOption(option.name, _type_text(option.annotation), option.default)
                for option in parameters.values()
                if option.name not in PARTS
                and option.kind in (option.KEYWORD_ONLY, option.POSITIONAL_OR_KEYWORD)
            ),
            default_chunks=default if isinstance(default, int) else 1,
            takes_chunks=takes_chunks,
            bubble=bubble,
            peak=peak,
            keeps_peak=keeps_peak,
        )
        vars(checked)["entry"] = entry
        return checked  # type: ignore[return-value]

    return decorate


def _check_result(schedule: object, shape: Shape, *, name: str) -> None:
    """A function that ignores what it is asked for would be found out much later."""
    if not isinstance(schedule, Schedule):
        raise ScheduleError(
            f"the function of {name} returned {schedule!r}, not a Schedule; make_schedule makes "
            "one of rows of actions"
        )
    made = (schedule.num_ranks, schedule.num_microbatches)
    if made != (shape.ranks, shape.microbatches):
        raise ScheduleError(
            f"the function of {name} was asked for {shape.ranks} ranks and {shape.microbatches} "
            f"microbatches and made {made[0]} and {made[1]}; declare what it can do as a "
            "Constraint, or use the arguments"
        )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _type_text(annotation: object) -> str:
    if annotation is inspect.Parameter.empty:
        return "object"
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "object")
