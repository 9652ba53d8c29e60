"""Chrome trace JSON, which ui.perfetto.dev and chrome://tracing open.

::

    process "1f1b · rank 0"
      thread "compute"     0F0 0F1 …        complete events, in microseconds
      thread "send"        0SEND_F0 ─────┐  flow arrows from a message to where it arrives
      thread "idle"        waiting       │
      counter "memory"     by category   │
    process "1f1b · rank 1"              │
      thread "receive"     1RECV_F0 ◄────┘
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pipeloom.ir.dependencies import RULES
from pipeloom.ir.timeline import Timeline
from pipeloom.view.links import find_links, find_messages
from pipeloom.view.picture import Picture, make_pictures
from pipeloom.view.quantities import SECONDS_PER_UNIT

#: A time without a unit is shown as this many microseconds: 1 is then drawn as 1 ms.
MICROSECONDS_PER_NUMBER = 1000.0
_IDLE_THREAD = 90

Event = dict[str, Any]


def render(timelines: Iterable[Timeline], path: str | Path) -> Path:
    """Write the trace to a file."""
    path = Path(path)
    with path.open("w", encoding="utf-8") as file:
        json.dump(make_trace(timelines), file, separators=(",", ":"), allow_nan=False)
    return path


def make_trace(timelines: Timeline | Iterable[Timeline]) -> dict[str, Any]:
    """The trace as a dict; every rank of every timeline is a process."""
    if isinstance(timelines, Timeline):
        timelines = [timelines]
    events: list[Event] = []
    first_process = 1
    about: list[dict[str, Any]] = []
    for picture in make_pictures(timelines):
        events += _list_events(picture, first_process, first_flow=len(events) + 1)
        first_process += picture.timeline.num_ranks
        about.append(
            {
                "schedule": picture.title,
                "source": picture.timeline.source,
                "time_unit": picture.timeline.time_unit or "number",
                "memory_unit": picture.timeline.memory_unit or "number",
                "microseconds_per_unit": _find_scale(picture.timeline),
            }
        )
    return {"displayTimeUnit": "ms", "otherData": {"timelines": about}, "traceEvents": events}


def _find_scale(timeline: Timeline) -> float:
    seconds = SECONDS_PER_UNIT.get(timeline.time_unit)
    # 1e-3 s must be 1000 µs, not 999.9999999999999.
    return MICROSECONDS_PER_NUMBER if seconds is None else float(f"{seconds * 1e6:.9g}")


def _list_events(picture: Picture, first_process: int, *, first_flow: int) -> Iterator[Event]:
    timeline, figures = picture.timeline, picture.figures
    scale = _find_scale(timeline)
    threads = _number_threads(picture)
    critical = picture.critical_spans
    single, several = _split_messages(picture)
    ties = _tie_arrows(single, first_flow)

    for rank in range(timeline.num_ranks):
        process = first_process + rank
        yield _name("process_name", process, 0, f"{picture.title} · rank {rank}")
        yield _sort("process_sort_index", process, 0, process)
        if picture.idle_of_rank[rank]:
            yield _name("thread_name", process, _IDLE_THREAD, "idle")
            yield _sort("thread_sort_index", process, _IDLE_THREAD, _IDLE_THREAD)
    for (row, track), thread in threads.items():
        rank, lane, num_tracks = picture.rows[row]
        name = lane if num_tracks == 1 else f"{lane} {track + 1}"
        yield _name("thread_name", first_process + rank, thread, name)
        yield _sort("thread_sort_index", first_process + rank, thread, thread)

    for index, (row, track, start, end, _, action) in enumerate(picture.boxes):
        arguments: dict[str, Any] = {"critical": index in critical}
        if action.stage is not None:
            arguments["stage"] = action.stage
        if action.microbatch is not None:
            arguments["microbatch"] = action.microbatch
        if index < len(figures.slack):
            arguments["slack"] = figures.slack[index]
        yield {
            "name": str(action),
            "cat": RULES[action.kind].lane,
            "ph": "X",
            "ts": start * scale,
            "dur": (end - start) * scale,
            "pid": first_process + picture.rows[row].rank,
            "tid": threads[row, track],
            "args": arguments,
            **ties.get(index, {}),
        }
    for rank, start, end, cause, waits_for, waits_for_rank, before in picture.idle:
        yield {
            "name": cause if waits_for is None else f"{cause}: {waits_for}",
            "cat": "idle",
            "ph": "X",
            "ts": start * scale,
            "dur": (end - start) * scale,
            "pid": first_process + rank,
            "tid": _IDLE_THREAD,
            "args": {
                "cause": cause,
                "waits for": None if waits_for is None else str(waits_for),
                "of rank": waits_for_rank,
                "before": None if before is None else str(before),
            },
        }
    yield from _list_flows(
        picture, several, first_process, first_flow + len(single), scale, threads
    )
    for curve in picture.memory:
        categories = {name: values for name, values in curve.categories.items() if any(values)}
        for index, time in enumerate(curve.times):
            amounts = {name: values[index] for name, values in categories.items()}
            yield {
                "name": "memory",
                "ph": "C",
                "ts": time * scale,
                "pid": first_process + curve.rank,
                "tid": 0,
                "args": amounts or {"total": curve.totals[index]},
            }


def _split_messages(picture: Picture) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """What goes from rank to rank: between boxes that have no other arrow, and the rest."""
    timeline = picture.timeline
    messages = list(find_messages(timeline, find_links(timeline)))
    ends = Counter(index for message in messages for index in message)
    single = [message for message in messages if ends[message[0]] == ends[message[1]] == 1]
    several = [message for message in messages if not ends[message[0]] == ends[message[1]] == 1]
    return single, several


def _tie_arrows(messages: list[tuple[int, int]], first_flow: int) -> dict[int, Event]:
    """Arrows that are tied to boxes by a number: they hold where a box takes no time at all."""
    ties: dict[int, Event] = {}
    for number, (source, target) in enumerate(messages):
        ties[source] = {"bind_id": hex(first_flow + number), "flow_out": True}
        ties[target] = {"bind_id": hex(first_flow + number), "flow_in": True}
    return ties


def _list_flows(
    picture: Picture,
    messages: list[tuple[int, int]],
    first_process: int,
    first_flow: int,
    scale: float,
    threads: dict[tuple[int, int], int],
) -> Iterator[Event]:
    """Arrows between boxes that have several.

    Viewers tie these to the box that is open at their time, so they leave and arrive in the middle
    of the box.
    """
    for number, (source, target) in enumerate(messages):
        for phase, index in (("s", source), ("f", target)):
            box = picture.boxes[index]
            event: Event = {
                "name": "message",
                "cat": "message",
                "ph": phase,
                "id": first_flow + number,
                "ts": (box.start + box.end) / 2 * scale,
                "pid": first_process + picture.rows[box.row].rank,
                "tid": threads[box.row, box.track],
            }
            yield {**event, "bp": "e"} if phase == "f" else event


def _number_threads(picture: Picture) -> dict[tuple[int, int], int]:
    """(row, track) → a number that is its own within the process."""
    threads: dict[tuple[int, int], int] = {}
    next_of_rank: dict[int, int] = {}
    for index, row in enumerate(picture.rows):
        for track in range(row.num_tracks):
            number = next_of_rank.get(row.rank, 1)
            # Very deep lanes must not run into the idle lane.
            threads[index, track] = number if number < _IDLE_THREAD else number + 1
            next_of_rank[row.rank] = number + 1
    return threads


def _name(what: str, process: int, thread: int, name: str) -> Event:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def _sort(what: str, process: int, thread: int, place: int) -> Event:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"sort_index": place}}
