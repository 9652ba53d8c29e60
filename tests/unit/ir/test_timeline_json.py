"""Timelines in files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from pipeloom import ParseError, UniformCosts, build_schedule, load_timeline, lower, simulate
from pipeloom.ir.timeline import Timeline
from pipeloom.ir.timeline_json import timeline_from_json, timeline_to_data


@pytest.fixture
def timeline() -> Timeline:
    schedule = lower(build_schedule("dualpipev", ranks=2, microbatches=4))
    costs = UniformCosts(1, 1, 1, latency=0.1, time_unit="ms", memory_unit="GiB", weights=3)
    return simulate(schedule, costs, memory="8GiB")


def test_what_is_saved_is_loaded(timeline: Timeline, tmp_path: Path) -> None:
    path = timeline.save(tmp_path / "run.json")
    loaded = load_timeline(path)
    assert loaded == timeline
    assert loaded.figures == timeline.figures
    assert loaded.memory_limit == 8


def test_without_figures(timeline: Timeline) -> None:
    bare = Timeline(timeline.schedule, timeline.spans, source="measured", rank_offsets=(0.5, -0.5))
    assert timeline_from_json(json.dumps(timeline_to_data(bare))) == bare


def damage(data: dict[str, Any], path: str, value: object) -> None:
    *parents, last = [int(p) if p.isdecimal() else p for p in path.split(".")]
    for key in parents:
        data = data[key]
    data[last] = value


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("pipeloom", "schedule", "is not a timeline"),
        ("version", 2, "version 2"),
        ("spans", None, "columns"),
        ("spans.rank.0", 9, "rank 9 is none of 0..1"),
        ("spans.lane.1", "sideways", "lane 'sideways'"),
        ("spans.start.2", "x", "start and end must be numbers"),
        ("spans.end.3", -5.0, "ends at -5.0 before it starts"),
        ("spans.action.0", "0F0x", "'0F0x' is not an action"),
        ("spans.action", [], "differ in length"),
        ("spans.slack", [1.0], "a number for every span"),
        ("memory.0.times", [0.0], "an amount for every time"),
        ("memory.1", 3, "must be an object"),
        ("memory_limit", "lots", "memory_limit"),
        ("time_unit", 5, "time_unit"),
        ("metadata", [], "metadata"),
        ("figures.work", None, "figures"),
        ("schedule", None, "is not a schedule"),
        ("schedule.actions.0.0", "nonsense", "nonsense"),
    ],
)
def test_bad_parts_are_reported(timeline: Timeline, path: str, value: object, message: str) -> None:
    data = json.loads(json.dumps(timeline_to_data(timeline)))
    damage(data, path, value)
    with pytest.raises(ParseError, match=message):
        timeline_from_json(json.dumps(data))


@pytest.mark.parametrize(
    ("path", "value", "place"),
    [
        ("makespan", "x", "makespan: 'x' is not a number"),
        ("bubble", float("nan"), "bubble: nan is not a number"),
        ("bubble_of_rank", [0.5], "bubble_of_rank: it has 1 entries, but there are 2 ranks"),
        ("work.1", None, "work[1]: None is not a number"),
        ("bounds", [], "bounds: [] is not an object"),
        ("idle_causes", {}, "idle_causes: {} is not a list"),
        ("idle_causes.1", 3, "idle_causes[1]: 3 is not an object"),
        ("idle_causes.0.rank", -1, "idle_causes[0].rank: -1 is none of the ranks 0..1"),
        ("idle_causes.0.start", 1e300, "idle_causes[0]: it ends at "),
        ("idle_causes.0.cause", [], "idle_causes[0].cause: [] is not a text"),
        ("idle_causes.0.before", "99F0", "idle_causes[0].before: 99F0: there is no stage 99"),
        ("peaks.0.categories", None, "peaks[0].categories: None is not an object"),
        ("peaks.0.categories.activation", "1", "peaks[0].categories[activation]: '1' is not a"),
        ("peaks.1.alive.0", ["x"], "peaks[1].alive[0]: ['x'] is not a name and a size"),
        ("critical_path.0.lane", "x", "critical_path[0].lane: 'x' is none of the lanes compute"),
        ("critical_path.0.action", "0F", "critical_path[0].action: "),
    ],
)
def test_bad_figures_are_told_with_their_place(
    timeline: Timeline, path: str, value: object, place: str
) -> None:
    data = timeline_to_data(timeline)
    damage(data["figures"], path, value)
    with pytest.raises(ParseError, match=f'"figures" is incomplete or wrong: {re.escape(place)}'):
        timeline_from_json(json.dumps(data))


@pytest.mark.parametrize("action", ["99F0", "0F99", "0SEND_F0>99", "(0F0;99B0)OVERLAP_F_B"])
def test_actions_of_another_shape(timeline: Timeline, action: str) -> None:
    data = timeline_to_data(timeline)
    damage(data, "spans.action.0", action)
    with pytest.raises(ParseError, match=r"span 0: .*there is no (stage|microbatch) 99"):
        timeline_from_json(json.dumps(data))


def test_several_bad_parts_at_once(timeline: Timeline) -> None:
    data = json.loads(json.dumps(timeline_to_data(timeline)))
    damage(data, "spans.rank.0", 9)
    damage(data, "clock", 1)
    with pytest.raises(ParseError) as caught:
        timeline_from_json(json.dumps(data), source="run.json")
    assert str(caught.value).startswith("run.json is not a timeline:\n")
    assert "rank 9" in str(caught.value)
    assert "clock" in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "null", "[" * 100_000, "1" * 5000])
def test_texts_that_are_no_timeline(text: str) -> None:
    with pytest.raises(ParseError):
        timeline_from_json(text)
