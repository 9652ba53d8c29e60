"""What the verifier found.

::

    tiny does not verify: 1 violation

    1. BACKWARD_BEFORE_FORWARD at rank 0, position 0: 0B0
       why:  it needs the output of stage 0 for microbatch 0, which 0F0 makes only at position 1
       hint: move 0F0 before 0B0
         rank 0   0B0 ← here  0F0 ←
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pipeloom.errors import VerificationError
from pipeloom.ir.action import Action
from pipeloom.ir.notation import format_excerpt
from pipeloom.ir.schedule import Schedule

#: How much of a long report is printed; the data are never cut.
MOST_PRINTED = 20
MOST_PRINTED_PER_CODE = 5
MOST_PLACES_SHOWN = 12


class Place(NamedTuple):
    """Where an action stands: the rank, and the position in its row, counted from 0."""

    rank: int
    position: int
    action: Action

    def __str__(self) -> str:
        return f"{self.action} at rank {self.rank}, position {self.position}"


@dataclass(frozen=True)
class Violation:
    """One thing that is wrong: what, where, why, and what to try."""

    #: Stable and upper-case; docs/verifier.md explains each with an example.
    code: str
    why: str
    hint: str
    #: ``None`` where the violation concerns no single rank, position or action.
    rank: int | None = None
    position: int | None = None
    action: Action | None = None
    #: The other actions that take part, such as the rest of a circular wait.
    related: tuple[Place, ...] = ()

    @property
    def where(self) -> str:
        """The place in words, empty where there is none."""
        parts = [] if self.rank is None else [f"rank {self.rank}"]
        if self.position is not None:
            parts.append(f"position {self.position}")
        where = ", ".join(parts)
        return where if self.action is None else f"{where}: {self.action}"

    def __str__(self) -> str:
        at = f" at {self.where}" if self.where else ""
        return f"{self.code}{at}\n   why:  {self.why}\n   hint: {self.hint}"

    def to_json(self) -> dict[str, Any]:
        """The violation as plain data."""
        return {
            "code": self.code,
            "rank": self.rank,
            "position": self.position,
            "action": None if self.action is None else str(self.action),
            "why": self.why,
            "hint": self.hint,
            "related": [
                {"rank": place.rank, "position": place.position, "action": str(place.action)}
                for place in self.related
            ],
        }


@dataclass(frozen=True)
class Report:
    """All violations of one schedule, and what was checked to find them.

    >>> import pipeloom
    >>> report = pipeloom.verify(pipeloom.parse_grid("0F0 0B0", name="tiny"))
    >>> report.ok, report.violations
    (True, ())
    """

    schedule: Schedule = field(repr=False)
    violations: tuple[Violation, ...]
    #: What was checked, in words: "completeness", "order", …
    checks: tuple[str, ...] = ()
    #: The communication model: (sends, channel); ``None`` for a compute-only schedule.
    model: tuple[str, str] | None = None

    @property
    def ok(self) -> bool:
        return not self.violations

    @property
    def schedule_name(self) -> str:
        return self.schedule.name

    @property
    def codes(self) -> tuple[str, ...]:
        """The codes that occur, each once, in order of appearance."""
        return tuple(dict.fromkeys(violation.code for violation in self.violations))

    def raise_for_errors(self) -> None:
        """Raise :class:`~pipeloom.errors.VerificationError` unless the schedule verifies."""
        if self.violations:
            raise VerificationError(self)

    def to_json(self) -> dict[str, Any]:
        """The report as plain data."""
        sends, channel = self.model or (None, None)
        return {
            "schedule": self.schedule_name,
            "ok": self.ok,
            "sends": sends,
            "channel": channel,
            "checks": list(self.checks),
            "violations": [violation.to_json() for violation in self.violations],
        }

    def __str__(self) -> str:
        checked = f"checked: {', '.join(self.checks)}"
        if self.model is not None:
            checked += f"; sends={self.model[0]}, channel={self.model[1]}"
        if self.ok:
            return f"{self.schedule_name} verifies\n{checked}"
        count = len(self.violations)
        lines = [
            f"{self.schedule_name} does not verify: {count} violation{'s' if count > 1 else ''}"
        ]
        printed: Counter[str] = Counter()
        omitted: Counter[str] = Counter()
        for number, violation in enumerate(self.violations, start=1):
            code = violation.code
            # The first of every code is printed, however long the report.
            enough = MOST_PRINTED_PER_CODE if printed.total() < MOST_PRINTED else 1
            if printed[code] >= enough:
                omitted[code] += 1
                continue
            printed[code] += 1
            lines += ["", f"{number}. {violation}", *self._excerpt(violation)]
        if omitted:
            rest = ", ".join(f"{times} {code}" for code, times in omitted.items())
            lines += ["", f"… and {omitted.total()} more: {rest}"]
        return "\n".join([*lines, "", checked])

    def _excerpt(self, violation: Violation) -> list[str]:
        """The program around the places that the violation names."""
        places = [(place.rank, place.position) for place in violation.related]
        if violation.rank is not None and violation.position is not None:
            places.insert(0, (violation.rank, violation.position))
        if not places:
            return []
        lines = format_excerpt(self.schedule, places[:MOST_PLACES_SHOWN]).splitlines()
        return [f"     {line}" for line in lines]


def runs_of(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """(first, last) of every stretch of consecutive numbers.

    >>> list(runs_of([1, 2, 3, 7]))
    [(1, 3), (7, 7)]
    """
    first: int | None = None
    last = 0
    for number in numbers:
        if first is None:
            first = number
        elif number != last + 1:
            yield first, last
            first = number
        last = number
    if first is not None:
        yield first, last
