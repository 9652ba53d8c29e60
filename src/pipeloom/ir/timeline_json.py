"""A timeline as a file: columns, because a large one has a million spans.

::

    {"pipeloom": "timeline", "version": 1, "source": "simulated", "time_unit": "ms", …,
     "schedule": { … as in a schedule file … },
     "spans": {"rank": [0, 1, …], "lane": ["compute", …], "start": […], "end": […],
               "action": ["0F0", …], "slack": […]},
     "memory": [{"rank": 0, "times": […], "totals": […], "categories": {"activation": […]}}, …],
     "figures": {"makespan": 33.0, …}}
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipeloom.errors import ParseError
from pipeloom.ir.action import Action
from pipeloom.ir.figures_json import NUMBERS, is_number, read_figures
from pipeloom.ir.garbage import paused_garbage_collection
from pipeloom.ir.notation import parse_action
from pipeloom.ir.questions import simple_actions
from pipeloom.ir.schedule import Schedule
from pipeloom.ir.serialization import schedule_from_json, schedule_to_json, write_text
from pipeloom.ir.timeline import (
    LANES,
    Figures,
    MemoryCurve,
    Span,
    Timeline,
)

VERSION = 1

_TEXTS = ("source", "time_unit", "memory_unit", "clock")


def save_timeline(timeline: Timeline, path: str | Path) -> Path:
    """Write a timeline to a JSON file."""
    path = Path(path)
    write_text(path, json.dumps(timeline_to_data(timeline), ensure_ascii=False, default=str))
    return path


def load_timeline(path: str | Path) -> Timeline:
    """Load a timeline from a JSON file."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ParseError(f"{path} is not a text file: {error}") from error
    except OSError as error:
        raise ParseError(f"{path} cannot be read: {error.strerror}") from error
    with paused_garbage_collection():
        return timeline_from_json(text, source=str(path))


def timeline_to_data(timeline: Timeline) -> dict[str, Any]:
    """A timeline as plain lists and dicts."""
    spans = timeline.spans
    data: dict[str, Any] = {
        "pipeloom": "timeline",
        "version": VERSION,
        **{name: getattr(timeline, name) for name in _TEXTS},
        "rank_offsets": list(timeline.rank_offsets),
        "memory_limit": timeline.memory_limit,
        "metadata": dict(timeline.metadata),
        "schedule": json.loads(schedule_to_json(timeline.schedule)),
        "spans": {
            "rank": [span.rank for span in spans],
            "lane": [span.lane for span in spans],
            "start": [span.start for span in spans],
            "end": [span.end for span in spans],
            "action": [str(span.action) for span in spans],
        },
        "memory": [
            {
                "rank": curve.rank,
                "times": list(curve.times),
                "totals": list(curve.totals),
                "categories": {name: list(sizes) for name, sizes in curve.categories.items()},
            }
            for curve in timeline.memory
        ],
    }
    if timeline.figures is not None:
        data["spans"]["slack"] = list(timeline.figures.slack)
        data["figures"] = figures_to_data(timeline)
    return data


def figures_to_data(timeline: Timeline) -> dict[str, Any]:
    """The figures of an analysed timeline as plain lists and dicts, without the slack."""
    figures = timeline.figures
    assert figures is not None
    return {
        **{name: getattr(figures, name) for name in NUMBERS},
        "peak_memory": list(timeline.peak_memory),
        "lower_bound": figures.lower_bound,
        "distance_to_bound": figures.distance_to_bound,
        "bounds": dict(figures.bounds),
        "work": list(figures.work),
        "bubble_of_rank": list(figures.bubble_of_rank),
        "idle_causes": [
            {
                **idle._asdict(),
                "waits_for": _text_of(idle.waits_for),
                "before": _text_of(idle.before),
            }
            for idle in figures.idle_causes
        ],
        "peaks": [
            {
                **peak._asdict(),
                "action": _text_of(peak.action),
                "categories": dict(peak.categories),
                "alive": [list(item) for item in peak.alive],
            }
            for peak in figures.peaks
        ],
        "critical_path": [
            {**span._asdict(), "action": str(span.action)} for span in figures.critical_path
        ],
    }


def _text_of(action: Action | None) -> str | None:
    return None if action is None else str(action)


def timeline_from_json(text: str, *, source: str = "the JSON") -> Timeline:
    """Parse what :func:`save_timeline` wrote; every bad part is reported."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ParseError(f"{source} is not JSON: {error}") from error
    if not isinstance(data, dict) or data.get("pipeloom") != "timeline":
        raise ParseError(f'{source} is not a timeline: it does not say "pipeloom": "timeline"')
    if data.get("version") != VERSION:
        raise ParseError(
            f"{source} has version {data.get('version')!r}, this pipeloom reads version "
            f"{VERSION}; a newer pipeloom may have written it"
        )
    schedule = schedule_from_json(json.dumps(data.get("schedule")), source=f'{source}, "schedule"')
    reader = _Reader(schedule)
    spans = reader.spans(data.get("spans"))
    memory = tuple(
        curve
        for index, part in enumerate(reader.items(data, "memory"))
        if (curve := reader.curve(part, f"memory[{index}]")) is not None
    )
    texts = {name: data.get(name, "") for name in _TEXTS}
    reader.problems += [
        f'"{name}" must be a text, not {value!r}'
        for name, value in texts.items()
        if not isinstance(value, str)
    ]
    limit = data.get("memory_limit")
    if limit is not None and not is_number(limit):
        reader.problems.append(f'"memory_limit" must be a number, not {limit!r}')
    offsets = reader.numbers(data, "rank_offsets", "")
    metadata = data.get("metadata", {})
    if not isinstance(metadata, dict):
        reader.problems.append(f'"metadata" must be an object, not {metadata!r}')
    figures = None
    if data.get("figures") is not None and not reader.problems:
        figures = reader.figures(data["figures"], data["spans"], len(spans))
    if reader.problems:
        lines = "\n".join(f"  {problem}" for problem in reader.problems)
        raise ParseError(f"{source} is not a timeline:\n{lines}")
    return Timeline(
        schedule=schedule,
        spans=spans,
        memory=memory,
        figures=figures,
        rank_offsets=offsets,
        memory_limit=limit,
        metadata=metadata,
        **texts,
    )


class _Reader:
    """Takes the parts out of the object and collects what is wrong with them."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.num_ranks = schedule.num_ranks
        self.problems: list[str] = []
        # Parsed already, with the schedule.
        self.known = {str(action): action for action in schedule.all_actions()}

    def items(self, data: dict[str, Any], key: str) -> list[Any]:
        value = data.get(key, [])
        if isinstance(value, list):
            return value
        self.problems.append(f'"{key}" must be a list, not {value!r}')
        return []

    def numbers(self, data: dict[str, Any], key: str, where: str) -> tuple[float, ...]:
        values = self.items(data, key)
        for index, value in enumerate(values):
            if not is_number(value):
                self.problems.append(f'"{where}{key}"[{index}] must be a number, not {value!r}')
                return ()
        return tuple(values)

    def action(self, text: object) -> Action:
        if not isinstance(text, str):
            raise ParseError(f"{text!r} is not an action")
        found = self.known.get(text)
        if found is None:
            found = parse_action(text)
            self._check_shape(found)
            self.known[text] = found
        return found

    def _check_shape(self, action: Action) -> None:
        """What is in no row of the schedule (a send that nobody wrote) still has its shape."""
        schedule = self.schedule
        for part in simple_actions(action):
            for what, number, count in (
                ("stage", part.stage, schedule.num_stages),
                ("stage", part.peer, schedule.num_stages),
                ("microbatch", part.microbatch, schedule.num_microbatches),
            ):
                if number is not None and number >= count:
                    raise ParseError(f"{action}: there is no {what} {number}")

    def optional_action(self, text: object) -> Action | None:
        return None if text is None else self.action(text)

    def spans(self, data: Any) -> tuple[Span, ...]:
        if not isinstance(data, dict):
            self.problems.append('"spans" must be an object with columns')
            return ()
        columns = {key: self.items(data, key) for key in ("rank", "lane", "start", "end", "action")}
        lengths = {key: len(column) for key, column in columns.items()}
        if len(set(lengths.values())) > 1:
            self.problems.append(f'the columns of "spans" differ in length: {lengths}')
            return ()
        spans = []
        for index, (rank, lane, start, end, text) in enumerate(zip(*columns.values(), strict=True)):
            problem = self._find_problem(rank, lane, start, end)
            if problem is None:
                try:
                    spans.append(Span(rank, lane, start, end, self.action(text)))
                    continue
                except ParseError as error:
                    problem = str(error)
            self.problems.append(f"span {index}: {problem}")
            if len(self.problems) >= _MOST_REPORTED:
                self.problems.append("and perhaps more")
                break
        return tuple(spans)

    def _find_problem(self, rank: Any, lane: Any, start: Any, end: Any) -> str | None:
        if type(rank) is not int or not 0 <= rank < self.num_ranks:
            return f"rank {rank!r} is none of 0..{self.num_ranks - 1}"
        if lane not in LANES:
            return f"lane {lane!r} is none of {', '.join(LANES)}"
        if not is_number(start) or not is_number(end):
            return f"start and end must be numbers, not {start!r} and {end!r}"
        if end < start:
            return f"it ends at {end} before it starts at {start}"
        return None

    def curve(self, data: Any, where: str) -> MemoryCurve | None:
        if not isinstance(data, dict) or not isinstance(data.get("categories"), dict):
            self.problems.append(f'"{where}" must be an object with rank, times and categories')
            return None
        times = self.numbers(data, "times", f"{where}.")
        totals = self.numbers(data, "totals", f"{where}.")
        categories = {
            name: self.numbers(data["categories"], name, f"{where}.categories.")
            for name in data["categories"]
        }
        if {len(times)} != {len(totals), *map(len, categories.values())}:
            self.problems.append(f'"{where}" needs an amount for every time')
        rank = data.get("rank", 0)
        if type(rank) is not int or not 0 <= rank < self.num_ranks:
            self.problems.append(f'"{where}.rank" is none of 0..{self.num_ranks - 1}: {rank!r}')
        return MemoryCurve(rank, times, totals, categories)

    def figures(self, data: Any, spans: dict[str, Any], num_spans: int) -> Figures | None:
        slack = self.numbers(spans, "slack", "spans.")
        if len(slack) != num_spans:
            self.problems.append('"spans.slack" needs a number for every span')
        try:
            return read_figures(
                data, slack=slack, num_ranks=self.num_ranks, read_action=self.action
            )
        except ParseError as error:
            self.problems.append(f'"figures" is incomplete or wrong: {error}')
            return None


_MOST_REPORTED = 20
