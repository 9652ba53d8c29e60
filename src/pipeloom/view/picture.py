"""What there is to see in a Timeline, before anybody draws it: the one model of all renderers.

::

    row 0   rank 0 compute   |0F0|0F1|~~~~~|0B0|0B1|      boxes, and idle regions with a cause
    row 1   rank 0 send          |>  |>  |                tracks where boxes of a lane overlap
    row 2   rank 1 compute       |1F0|1B0|...
            memory           a curve per rank, a limit

Text, SVG, PNG, Perfetto and the HTML report all draw exactly this.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import isfinite
from typing import NamedTuple

from pipeloom.ir.action import Action
from pipeloom.ir.questions import simple_actions
from pipeloom.ir.timeline import LANES, Figures, IdleSpan, MemoryCurve, Timeline
from pipeloom.view.palette import STYLE_OF_CAUSE, STYLE_OF_KIND, Style
from pipeloom.view.quantities import format_memory, format_share, format_time


class Row(NamedTuple):
    """One lane of one rank."""

    rank: int
    lane: str
    #: More than one where boxes of the lane overlap in time.
    num_tracks: int


class Box(NamedTuple):
    """One span, in its place."""

    row: int
    track: int
    start: float
    end: float
    #: Its position in ``timeline.spans``.
    span: int
    action: Action


class Cause(NamedTuple):
    """One line of the ranked table of idle time."""

    cause: str
    #: "1F0 of rank 0", or "" where nothing is waited for.
    waits_for: str
    time: float
    share: float
    num_spans: int


@dataclass(frozen=True)
class Picture:
    """A Timeline, arranged in rows."""

    timeline: Timeline
    title: str
    rows: tuple[Row, ...]
    #: In the order of ``timeline.spans``.
    boxes: tuple[Box, ...]
    #: From 0 to here everything happens.
    end: float

    @property
    def figures(self) -> Figures:
        figures = self.timeline.figures
        assert figures is not None, "make_picture analyses first"
        return figures

    @property
    def idle(self) -> tuple[IdleSpan, ...]:
        return self.figures.idle_causes

    @property
    def memory(self) -> tuple[MemoryCurve, ...]:
        return self.timeline.memory

    @cached_property
    def boxes_of_row(self) -> tuple[tuple[Box, ...], ...]:
        """The boxes of every row, in order of time."""
        found: list[list[Box]] = [[] for _ in self.rows]
        for box in self.boxes:
            found[box.row].append(box)
        return tuple(map(tuple, found))

    @cached_property
    def idle_of_rank(self) -> tuple[tuple[IdleSpan, ...], ...]:
        """The idle time of every rank, in order of time."""
        found: list[list[IdleSpan]] = [[] for _ in range(self.timeline.num_ranks)]
        for idle in self.idle:
            found[idle.rank].append(idle)
        return tuple(map(tuple, found))

    @cached_property
    def critical_spans(self) -> frozenset[int]:
        """The positions of the spans on the critical path."""
        wanted = set(self.figures.critical_path)
        return frozenset(i for i, span in enumerate(self.timeline.spans) if span in wanted)

    @property
    def memory_limit(self) -> float | None:
        """The limit that can be drawn: none at all and none in sight are the same."""
        limit = self.timeline.memory_limit
        return limit if limit is not None and isfinite(limit) else None

    @cached_property
    def largest_memory(self) -> float:
        """The top of the memory scale: the largest peak, or the limit where that is higher."""
        peaks = [max(curve.totals, default=0.0) for curve in self.memory]
        return max([*peaks, self.memory_limit or 0.0], default=0.0)

    @cached_property
    def legend(self) -> tuple[Style, ...]:
        """The kinds of action that occur, then the causes of idle time that occur."""
        kinds = {part.kind for box in self.boxes for part in simple_actions(box.action)}
        causes = {idle.cause for idle in self.idle}
        return (
            *(style for kind, style in STYLE_OF_KIND.items() if kind in kinds),
            *(style for cause, style in STYLE_OF_CAUSE.items() if cause in causes),
        )

    @property
    def facts(self) -> tuple[tuple[str, str], ...]:
        """The figures that everybody asks for first, as words."""
        timeline, figures = self.timeline, self.figures
        facts = [
            ("makespan", format_time(figures.makespan, timeline.time_unit)),
            ("bubble", format_share(figures.bubble)),
            ("idle", format_share(figures.idle_fraction)),
        ]
        peaks = [peak.total for peak in figures.peaks]
        if any(peaks):
            facts.append(("peak memory", format_memory(max(peaks), timeline.memory_unit)))
        return tuple(facts)

    def total_causes(self) -> tuple[Cause, ...]:
        """All idle time, added up by cause alone, largest first."""
        ranked = self.rank_causes()
        totals = [
            Cause(
                cause,
                "",
                sum(entry.time for entry in ranked if entry.cause == cause),
                sum(entry.share for entry in ranked if entry.cause == cause),
                sum(entry.num_spans for entry in ranked if entry.cause == cause),
            )
            for cause in dict.fromkeys(entry.cause for entry in ranked)
        ]
        return tuple(sorted(totals, key=lambda total: -total.time))

    def rank_causes(self) -> tuple[Cause, ...]:
        """All idle time, added up by cause and by the action waited for, largest first."""
        total = sum(idle.end - idle.start for idle in self.idle)
        sums: dict[tuple[str, str], list[float]] = {}
        for idle in self.idle:
            awaited = ""
            if idle.waits_for is not None:
                awaited = f"{idle.waits_for} of rank {idle.waits_for_rank}"
            entry = sums.setdefault((idle.cause, awaited), [0.0, 0])
            entry[0] += idle.end - idle.start
            entry[1] += 1
        ranked = sorted(sums.items(), key=lambda item: (-item[1][0], item[0]))
        return tuple(
            Cause(cause, awaited, time, time / total if total else 0.0, int(count))
            for (cause, awaited), (time, count) in ranked
        )


def make_picture(timeline: Timeline, *, title: str | None = None) -> Picture:
    """Arrange a timeline in rows; one that was not analysed is analysed first."""
    if timeline.figures is None:
        from pipeloom.simulate.analysis import analyse

        timeline = analyse(timeline)
    tracks = _assign_tracks(timeline)
    lanes_of_rank: list[dict[str, int]] = [{"compute": 1} for _ in range(timeline.num_ranks)]
    for span, track in zip(timeline.spans, tracks, strict=True):
        lanes = lanes_of_rank[span.rank]
        lanes[span.lane] = max(lanes.get(span.lane, 1), track + 1)
    rows: list[Row] = []
    row_of: dict[tuple[int, str], int] = {}
    for rank, lanes in enumerate(lanes_of_rank):
        for lane in sorted(lanes, key=_lane_order):
            row_of[rank, lane] = len(rows)
            rows.append(Row(rank, lane, lanes[lane]))
    boxes = tuple(
        Box(row_of[span[0], span[1]], track, span[2], span[3], index, span[4])
        for index, (span, track) in enumerate(zip(timeline.spans, tracks, strict=True))
    )
    last = max((span.end for span in timeline.spans), default=0.0)
    end = max(timeline.makespan, last)
    return Picture(timeline, title or timeline.name, tuple(rows), boxes, end)


def make_pictures(timelines: Iterable[Timeline]) -> tuple[Picture, ...]:
    """Pictures that may stand on one axis: titles tell them apart, times are in one unit."""
    timelines = list(timelines)
    names = [timeline.name for timeline in timelines]
    titles = []
    for position, timeline in enumerate(timelines):
        title = timeline.name
        if names.count(title) > 1:
            twins = [t for t in timelines if t.name == title]
            if len({t.source for t in twins}) == len(twins):
                title = f"{title} ({timeline.source})"
            else:
                title = f"{title} ({timeline.source}, {position + 1})"
        titles.append(title)
    return tuple(
        make_picture(timeline, title=title)
        for timeline, title in zip(timelines, titles, strict=True)
    )


def without_details(picture: Picture) -> Picture:
    """The same picture with the compute lanes alone."""
    keep = [index for index, row in enumerate(picture.rows) if row.lane == "compute"]
    place = {old: new for new, old in enumerate(keep)}
    return replace(
        picture,
        rows=tuple(picture.rows[index] for index in keep),
        boxes=tuple(box._replace(row=place[box.row]) for box in picture.boxes if box.row in place),
    )


def _lane_order(lane: str) -> tuple[int, str]:
    return (LANES.index(lane) if lane in LANES else len(LANES), lane)


def _assign_tracks(timeline: Timeline) -> Sequence[int]:
    """The lowest free track of its lane for each span, so that no two boxes cover each other."""
    tracks: list[int] = []
    ends: dict[tuple[int, str], list[float]] = {}
    for rank, lane, start, end, _ in timeline.spans:
        busy = ends.setdefault((rank, lane), [])
        for track, until in enumerate(busy):
            # Measured clocks jitter by less than anybody can see.
            if until <= start + 1e-9 * abs(start):
                busy[track] = end
                break
        else:
            track = len(busy)
            busy.append(end)
        tracks.append(track)
    return tracks
