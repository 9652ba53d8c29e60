"""What was measured: the spans of every rank, on one clock.

::

    rank 0   perf_counter    ├0F0┤├0F1┤        offset of its clock to that of rank 0 added,
    rank 1   perf_counter         ├1F0┤├1B0┤   the earliest start of all ranks becomes 0

A computation is timed on the host; on a GPU with events on the stream, read once after the step.
A receive lasts from its posting until somebody needed it and it was there; a send is timed as the
host saw it posted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pipeloom.ir.action import Action
from pipeloom.ir.dependencies import RULES, Role
from pipeloom.ir.schedule import Schedule
from pipeloom.ir.timeline import Span, Timeline

__all__ = ["RankRecorder", "Recording", "make_timeline"]

Call = Callable[[], None]
#: (lane, start, end, action) on the rank's own clock, in seconds.
Row = tuple[str, float, float, Action]


class RankRecorder:
    """Times the actions of one rank."""

    def __init__(self, device: torch.device) -> None:
        self._rows: list[Row] = []
        self._posted: dict[Action, float] = {}
        self._on_device = device.type == "cuda"
        self._device = device
        self._events: list[tuple[str, Any, Any, Action]] = []
        self._base: tuple[float, Any] = (0.0, None)

    def begin_step(self) -> None:
        """Forget the last step; on a GPU, tie the stream's clock to the host's."""
        self._rows = []
        self._posted.clear()
        self._events = []
        if self._on_device:
            torch.cuda.synchronize(self._device)
            base = torch.cuda.Event(enable_timing=True)
            base.record()
            self._base = (time.perf_counter(), base)

    def wrap(self, action: Action, call: Call) -> Call:
        """The call, timed."""
        rule = RULES[action.kind]
        if rule.role is Role.RECEIVE:
            return self._wrap_receive(action, call)
        lane = rule.lane
        if self._on_device and rule.role in (Role.COMPUTE, Role.FUSED):
            return self._wrap_with_events(lane, action, call)

        def timed() -> None:
            start = time.perf_counter()
            call()
            self._rows.append((lane, start, time.perf_counter(), action))

        return timed

    def _wrap_receive(self, action: Action, call: Call) -> Call:
        def posted() -> None:
            self._posted[action] = time.perf_counter()
            call()

        return posted

    def _wrap_with_events(self, lane: str, action: Action, call: Call) -> Call:
        def timed() -> None:
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            self._events.append((lane, start, end, action))

        return timed

    def note_arrival(self, action: Action) -> None:
        """A receive has ended."""
        start = self._posted.pop(action)
        self._rows.append((RULES[action.kind].lane, start, time.perf_counter(), action))

    def take_rows(self) -> list[Row]:
        """What was measured in the step that has ended."""
        rows, self._rows = self._rows, []
        if self._events:
            torch.cuda.synchronize(self._device)
            host, base = self._base
            for lane, start, end, action in self._events:
                first = host + base.elapsed_time(start) / 1e3
                last = host + base.elapsed_time(end) / 1e3
                rows.append((lane, first, last, action))
            self._events = []
        return rows


def make_timeline(
    schedule: Schedule, rows_of_rank: Sequence[Sequence[Row]], offsets: Sequence[float]
) -> Timeline:
    """One timeline of what all ranks measured, in seconds from the first start."""
    spans = [
        Span(rank, lane, start + offset, end + offset, action)
        for rank, (rows, offset) in enumerate(zip(rows_of_rank, offsets, strict=True))
        for lane, start, end, action in rows
    ]
    origin = min((span.start for span in spans), default=0.0)
    moved = [span._replace(start=span.start - origin, end=span.end - origin) for span in spans]
    return Timeline(
        schedule,
        tuple(sorted(moved, key=lambda span: (span.start, span.rank))),
        source="measured",
        time_unit="s",
        clock="perf_counter of rank 0",
        rank_offsets=tuple(offsets),
    )


class Recording:
    """Measured timelines of the steps since ``record()`` was called, until ``stop()``.

    ::

        with pipe.record() as recording:
            pipe.step(x, target=y)
        recording.timeline.save("step.html")
    """

    def __init__(self, on_stop: Callable[[Recording], None]) -> None:
        self._on_stop = on_stop
        self._raw: list[Timeline] = []
        self._analysed: dict[int, Timeline] = {}

    def __len__(self) -> int:
        return len(self._raw)

    @property
    def timeline(self) -> Timeline:
        """The timeline of the last recorded step."""
        if not self._raw:
            raise ValueError("nothing was recorded yet; call step or eval first")
        return self._analyse(len(self._raw) - 1)

    @property
    def timelines(self) -> tuple[Timeline, ...]:
        """The timelines of all recorded steps."""
        return tuple(self._analyse(index) for index in range(len(self._raw)))

    def _analyse(self, index: int) -> Timeline:
        if index not in self._analysed:
            from pipeloom.simulate import analyse

            self._analysed[index] = analyse(self._raw[index])
        return self._analysed[index]

    def add(self, timeline: Timeline) -> None:
        """A step was measured."""
        self._raw.append(timeline)

    def stop(self) -> None:
        """Record no more steps."""
        self._on_stop(self)

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
