"""Two timelines side by side, action by action.

::

    predicted   |0F0|0F1|   |0B0|
    measured      |0F0 |0F1|   |0B0 |
    aligned     |0F0 |0F1|   |0B0 |          the first start of computation at the same time
                                 ↑ 0B0 ends 1 later, 0.2 of it its own duration
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from pipeloom.errors import ScheduleError
from pipeloom.ir.action import Action
from pipeloom.ir.timeline import MemoryCurve, Span, Timeline


class ActionDifference(NamedTuple):
    """One action of one rank in both timelines; differences are second − first."""

    rank: int
    action: Action
    #: 0 for the first of several equal actions of a rank, and so on.
    occurrence: int
    first: Span
    second: Span

    @property
    def start_difference(self) -> float:
        return self.second.start - self.first.start

    @property
    def end_difference(self) -> float:
        return self.second.end - self.first.end

    @property
    def duration_difference(self) -> float:
        return self.second.duration - self.first.duration


@dataclass(frozen=True)
class TimelineComparison:
    """What both have, in the order of the first, and what only one has."""

    differences: tuple[ActionDifference, ...]
    only_in_first: tuple[Span, ...]
    only_in_second: tuple[Span, ...]

    def largest(self, count: int = 10) -> tuple[ActionDifference, ...]:
        """The actions whose durations differ most."""
        ranked = sorted(self.differences, key=lambda item: -abs(item.duration_difference))
        return tuple(ranked[:count])

    @property
    def mean_duration_ratio(self) -> float | None:
        """How much longer computation takes in the second, all of it together; ``None`` where the
        first computes nothing."""
        pairs = [(d.first.duration, d.second.duration) for d in self.differences if _computes(d)]
        total = sum(first for first, _ in pairs)
        return sum(second for _, second in pairs) / total if total else None


def align_timeline(timeline: Timeline, to: Timeline, *, scale: float | None = None) -> Timeline:
    """Move a timeline so that its first computation starts with the other's.

    ``scale`` multiplies all times (to bring seconds to milliseconds, say); without it both must
    have the same unit. Figures are left out: they would no longer be true.
    """
    if scale is None:
        if timeline.time_unit and to.time_unit and timeline.time_unit != to.time_unit:
            raise ScheduleError(
                f"one timeline is in {timeline.time_unit}, the other in {to.time_unit}; "
                "say how many of the second make one of the first: scale=…"
            )
        scale = 1.0
    shift = _first_start(to) - scale * _first_start(timeline)

    def move(time: float) -> float:
        return scale * time + shift

    return replace(
        timeline,
        spans=tuple(
            Span(rank, lane, move(start), move(end), action)
            for rank, lane, start, end, action in timeline.spans
        ),
        memory=tuple(
            MemoryCurve(curve.rank, tuple(map(move, curve.times)), curve.totals, curve.categories)
            for curve in timeline.memory
        ),
        time_unit=to.time_unit or timeline.time_unit,
        rank_offsets=tuple(scale * offset + shift for offset in timeline.rank_offsets),
        figures=None,
    )


def compare_timelines(first: Timeline, second: Timeline) -> TimelineComparison:
    """Pair the spans of two timelines: the k-th of an action on a rank with the other's k-th."""
    wanted = _index(second.spans)
    differences = []
    only_in_first = []
    for key, span in _index(first.spans).items():
        other = wanted.pop(key, None)
        if other is None:
            only_in_first.append(span)
        else:
            differences.append(ActionDifference(*key, span, other))
    return TimelineComparison(tuple(differences), tuple(only_in_first), tuple(wanted.values()))


def _index(spans: Iterable[Span]) -> dict[tuple[int, Action, int], Span]:
    seen: Counter[tuple[int, Action]] = Counter()
    found = {}
    for span in spans:
        key = (span.rank, span.action)
        found[*key, seen[key]] = span
        seen[key] += 1
    return found


def _first_start(timeline: Timeline) -> float:
    starts = [span.start for span in timeline.spans if span.lane == "compute"]
    return min(starts or [span.start for span in timeline.spans], default=0.0)


def _computes(difference: ActionDifference) -> bool:
    return difference.first.lane == "compute"
