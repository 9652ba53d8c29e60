"""When everything ran: the one result type of simulated and of measured runs.

::

    rank 0 compute  |0F0|0F1|    |0B0|0B1|
    rank 0 send         |>0 |>1 |
    rank 1 compute      |1F0|1B0|1F1|1B1|
                        ^ start  ^ end        times in ``time_unit``, one clock for all ranks

A Timeline is spans and memory curves (the facts), and figures (what
:func:`pipeloom.analyse` reads off them).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from pipeloom.ir.action import Action
from pipeloom.ir.schedule import Schedule

LANES = ("compute", "send", "receive", "gather")


class Span(NamedTuple):
    """One action of one rank, from start to end."""

    rank: int
    lane: str
    start: float
    end: float
    action: Action

    @property
    def duration(self) -> float:
        return self.end - self.start


class IdleSpan(NamedTuple):
    """A time in which a rank computed nothing, with its one cause."""

    rank: int
    start: float
    end: float
    #: "warm-up", "waiting", "communication", "drain" or, measured only, "overhead": all inputs were
    #: there and the rank still did not compute.
    cause: str
    #: What the rank waited for, and whose action that is; ``None`` in the drain.
    waits_for: Action | None = None
    waits_for_rank: int | None = None
    #: The computation that began when the idle time ended.
    before: Action | None = None


class MemoryCurve(NamedTuple):
    """What one rank holds over time: a step function per category."""

    rank: int
    #: The times at which something changed, ascending.
    times: tuple[float, ...]
    #: The total from each of these times on.
    totals: tuple[float, ...]
    #: The same by category ("activation", "retained", "received output", "weights", …).
    categories: Mapping[str, tuple[float, ...]]


class PeakMemory(NamedTuple):
    """The largest amount that one rank holds, what it is made of, and who is alive then."""

    rank: int
    total: float
    time: float
    action: Action | None
    categories: Mapping[str, float]
    #: (description such as "activation 0F3", size), largest first.
    alive: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Figures:
    """What analysing a timeline gives; each name means the same for predicted and measured runs."""

    #: From 0 to the last end.
    makespan: float
    #: The largest, over ranks, of last end − first start of computation.
    span: float
    #: 1 − busiest rank's work / span.
    bubble: float
    #: 1 − busiest rank's work / makespan.
    bubble_makespan: float
    #: Idle time / (ranks × makespan).
    idle_fraction: float
    #: Per rank: time spent computing.
    work: tuple[float, ...]
    #: Per rank: 1 − work / makespan.
    bubble_of_rank: tuple[float, ...]
    idle_causes: tuple[IdleSpan, ...]
    peaks: tuple[PeakMemory, ...]
    #: Spans of which any delay would make the whole step longer, in order of time.
    critical_path: tuple[Span, ...]
    #: Per span, in the order of ``Timeline.spans``: how much later it could end without harm.
    slack: tuple[float, ...]
    #: Lower bounds on the makespan by name, and the largest of them.
    bounds: Mapping[str, float] = field(default_factory=dict)

    @property
    def lower_bound(self) -> float | None:
        """The largest lower bound on the makespan; ``None`` if none is known."""
        return max(self.bounds.values(), default=None)

    @property
    def distance_to_bound(self) -> float | None:
        """makespan / lower bound − 1; ``None`` if no bound above 0 is known."""
        bound = self.lower_bound
        return self.makespan / bound - 1 if bound else None


@dataclass(frozen=True)
class Timeline:
    """Spans of all ranks on one clock, with the schedule they come from.

    ``timeline.makespan``, ``.span``, ``.bubble``, ``.peak_memory``, ``.idle_causes``,
    ``.critical_path`` … are read from ``figures``.
    """

    schedule: Schedule
    #: Sorted by start, then rank.
    spans: tuple[Span, ...]
    #: "simulated" or "measured".
    source: str = "simulated"
    time_unit: str = ""
    memory_unit: str = ""
    memory: tuple[MemoryCurve, ...] = ()
    figures: Figures | None = None
    #: The name of the clock, and per rank what was added to its own clock to get the common one.
    clock: str = "model"
    rank_offsets: tuple[float, ...] = ()
    #: A memory limit that was asked for, in ``memory_unit``.
    memory_limit: float | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.schedule.name

    @property
    def num_ranks(self) -> int:
        return self.schedule.num_ranks

    @cached_property
    def _known_figures(self) -> Figures:
        if self.figures is None:
            raise ValueError("this timeline was not analysed; call pipeloom.analyse on it")
        return self.figures

    @property
    def makespan(self) -> float:
        return self._known_figures.makespan

    @property
    def span(self) -> float:
        return self._known_figures.span

    @property
    def bubble(self) -> float:
        return self._known_figures.bubble

    @property
    def bubble_makespan(self) -> float:
        return self._known_figures.bubble_makespan

    @property
    def idle_fraction(self) -> float:
        return self._known_figures.idle_fraction

    @property
    def peak_memory(self) -> tuple[float, ...]:
        """The peak of every rank."""
        return tuple(peak.total for peak in self._known_figures.peaks)

    @property
    def idle_causes(self) -> tuple[IdleSpan, ...]:
        return self._known_figures.idle_causes

    @property
    def critical_path(self) -> tuple[Span, ...]:
        return self._known_figures.critical_path

    def spans_of(self, rank: int, lane: str | None = None) -> tuple[Span, ...]:
        """The spans of one rank, or of one of its lanes, in order of time."""
        return tuple(s for s in self._spans_by_rank[rank] if lane is None or s.lane == lane)

    @cached_property
    def _spans_by_rank(self) -> tuple[tuple[Span, ...], ...]:
        rows: list[list[Span]] = [[] for _ in range(self.num_ranks)]
        for span in self.spans:
            rows[span.rank].append(span)
        return tuple(map(tuple, rows))

    def with_figures(self, figures: Figures) -> Timeline:
        """The same timeline, analysed."""
        return replace(self, figures=figures)

    def save(self, path: str | Path, **options: Any) -> Path:
        """Write the data (``.json``) or a picture (``.html``, ``.svg``, ``.png``,
        ``.trace.json``, ``.txt``)."""
        path = Path(path)
        name = path.name.lower()
        if name.endswith(".json") and not name.endswith(".trace.json"):
            from pipeloom.ir.timeline_json import save_timeline

            return Path(save_timeline(self, path))
        from pipeloom.ir.renderers import find_renderer

        find_renderer(path).render([self], path, **options)
        return path

    def _repr_html_(self) -> str:
        from pipeloom.ir.renderers import load_notebook_renderer

        return str(load_notebook_renderer().render_timeline(self))
