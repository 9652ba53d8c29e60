"""Two timelines, aligned and compared."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeloom import (
    ScheduleError,
    UniformCosts,
    align_timeline,
    build_schedule,
    compare_timelines,
    simulate,
)
from pipeloom.ir.timeline import Timeline


def make(name: str = "1f1b", **costs: float) -> Timeline:
    schedule = build_schedule(name, ranks=4, microbatches=8)
    return simulate(schedule, UniformCosts(**{"forward": 1, "input": 1, "weight": 1, **costs}))


def shifted(timeline: Timeline, by: float, scale: float = 1.0) -> Timeline:
    spans = tuple(
        s._replace(start=scale * s.start + by, end=scale * s.end + by) for s in timeline.spans
    )
    return replace(timeline, spans=spans, source="measured", figures=None)


def test_a_timeline_compared_with_itself() -> None:
    timeline = make()
    comparison = compare_timelines(timeline, timeline)
    assert len(comparison.differences) == len(timeline.spans)
    assert not comparison.only_in_first
    assert not comparison.only_in_second
    assert all(d.end_difference == d.duration_difference == 0 for d in comparison.differences)
    assert comparison.mean_duration_ratio == 1


def test_slower_forwards_are_found() -> None:
    comparison = compare_timelines(make(), make(forward=1.5))
    largest = comparison.largest(5)
    assert [d.duration_difference for d in largest] == [0.5] * 5
    assert all(d.action.kind.value == "F" for d in largest)
    assert comparison.mean_duration_ratio == pytest.approx(3.5 / 3)


def test_aligning_moves_the_first_computation() -> None:
    predicted = make()
    measured = shifted(predicted, 1234.5, scale=0.001)
    with_unit = replace(measured, time_unit="s")
    aligned = align_timeline(with_unit, replace(predicted, time_unit="ms"), scale=1000)
    for ours, theirs in zip(aligned.spans, predicted.spans, strict=True):
        assert (ours.start, ours.end) == pytest.approx((theirs.start, theirs.end), abs=1e-6)
    assert aligned.time_unit == "ms"
    with pytest.raises(ScheduleError, match="one timeline is in s, the other in ms"):
        align_timeline(with_unit, replace(predicted, time_unit="ms"))


def test_memory_moves_along() -> None:
    timeline = make()
    moved = align_timeline(timeline, shifted(timeline, 10))
    assert moved.memory[0].times == tuple(t + 10 for t in timeline.memory[0].times)


def test_what_only_one_has() -> None:
    first, second = make("1f1b"), make("zb_h1")
    comparison = compare_timelines(first, second)
    assert {span.action.kind.value for span in comparison.only_in_first} == {"B"}
    assert {span.action.kind.value for span in comparison.only_in_second} == {"I", "W"}
    assert len(comparison.differences) == 32


def test_the_same_action_several_times() -> None:
    from pipeloom.ir.notation import parse_grid

    schedule = parse_grid("0UNSHARD 0F0 0RESHARD 0UNSHARD 0B0 0RESHARD")
    timeline = simulate(schedule, UniformCosts(1, 1, 1, unshard=1))
    comparison = compare_timelines(timeline, shifted(timeline, 2))
    assert [d.occurrence for d in comparison.differences if str(d.action) == "0UNSHARD"] == [0, 1]
    assert all(d.start_difference == 2 for d in comparison.differences)
