"""Costs read off a recorded run predict that run."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from pipeloom import (
    CostFileError,
    StageCosts,
    build_schedule,
    compare_timelines,
    costs_from_timelines,
    lower,
    simulate,
)
from pipeloom.ir.timeline import Timeline

TRUTH = StageCosts([1, 2, 3, 4], [2, 2, 3, 3], [1, 1, 2, 2], full=[4, 4, 6, 6], latency=0.25)


def record(name: str, costs: StageCosts = TRUTH, **options: bool) -> Timeline:
    schedule = build_schedule(name, ranks=4, microbatches=8)
    if options.get("lowered"):
        schedule = lower(schedule)
    return replace(simulate(schedule, costs), source="measured", time_unit="ms")


def test_the_costs_come_back() -> None:
    # Split and full backwards are in different runs; together they say everything.
    costs = costs_from_timelines([record("zb_h1"), record("1f1b")])
    assert costs.forward == pytest.approx((1, 2, 3, 4))
    assert costs.input == pytest.approx((2, 2, 3, 3))
    assert costs.weight == pytest.approx((1, 1, 2, 2))
    assert costs.full == pytest.approx((4, 4, 6, 6))
    assert costs.time_unit == "ms"


def test_a_prediction_from_a_recorded_run_is_that_run() -> None:
    recorded = record("1f1b", lowered=True)
    costs = costs_from_timelines(recorded)
    assert costs.latency == pytest.approx(0.25)
    predicted = simulate(recorded.schedule, costs)
    assert predicted.makespan == pytest.approx(recorded.makespan)
    comparison = compare_timelines(predicted, recorded)
    assert comparison.mean_duration_ratio == pytest.approx(1)


def test_a_few_slow_microbatches_do_not_count() -> None:
    rng = random.Random(0)
    recorded = record("gpipe")
    slow = set(rng.sample(range(len(recorded.spans)), 4))
    spans = tuple(
        span._replace(end=span.end + (50 if index in slow else 0))
        for index, span in enumerate(recorded.spans)
    )
    assert costs_from_timelines(replace(recorded, spans=spans)).forward == pytest.approx(
        (1, 2, 3, 4)
    )


def test_a_full_backward_is_split_by_share() -> None:
    costs = costs_from_timelines(record("1f1b"), input_share=0.75)
    assert costs.input == pytest.approx((3, 3, 4.5, 4.5))
    assert costs.weight == pytest.approx((1, 1, 1.5, 1.5))


def test_what_a_run_does_not_say() -> None:
    with pytest.raises(CostFileError, match="stage 0 has no backward"):
        costs_from_timelines(record("forward_only"))
    with pytest.raises(CostFileError, match="at least one"):
        costs_from_timelines([])
    other = replace(record("1f1b"), time_unit="s")
    with pytest.raises(CostFileError, match="cannot be put together"):
        costs_from_timelines([record("1f1b"), other])
