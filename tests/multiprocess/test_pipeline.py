"""Whole pipelines over processes: the same gradients as in one process, to the last bit."""

from __future__ import annotations

import pytest

import pipeloom
from tests.multiprocess import pipeline_work as work
from tests.support.process_pool import ProcessPool

pytestmark = pytest.mark.multiprocess

TRAINING = [entry.name for entry in pipeloom.list_schedules() if entry.name != "forward_only"]
MODELS = ("tokens", "dict", "complex", "dataclass", "tuple", "view", "wasteful", "partial",
          "frozen_first", "frozen_last", "low_rank", "keyword", "checkpoint")  # fmt: skip


@pytest.mark.parametrize("schedule", TRAINING)
def test_every_schedule_on_two_ranks(two_ranks: ProcessPool, schedule: str) -> None:
    assert two_ranks.run(work.compare_with_local, [(schedule, "blocks", {})]) == [[], []]


@pytest.mark.parametrize("schedule", TRAINING)
def test_every_schedule_on_four_ranks(four_ranks: ProcessPool, schedule: str) -> None:
    assert four_ranks.run(work.compare_with_local, [(schedule, "blocks", {})]) == [[]] * 4


@pytest.mark.parametrize("model", MODELS)
def test_every_kind_of_boundary(two_ranks: ProcessPool, model: str) -> None:
    cases = [(schedule, model, {}) for schedule in ("1f1b", "zbv")]
    assert two_ranks.run(work.compare_with_local, cases) == [[], []]


@pytest.mark.parametrize("shapes", ["per_microbatch"])
def test_every_way_of_telling_shapes(two_ranks: ProcessPool, shapes: str) -> None:
    cases = [
        (name, model, {"shapes": shapes})
        for name in ("1f1b", "zbv")
        for model in ("blocks", "dict")
    ]
    assert two_ranks.run(work.compare_with_local, cases) == [[], []]


def test_recorded_spans_are_on_one_clock(four_ranks: ProcessPool) -> None:
    results = four_ranks.run(work.record, "1f1b")
    for ranks, makespan, spans, early in results:
        assert ranks == 4
        assert {rank for rank, *_ in spans} == {0, 1, 2, 3}
        assert makespan > 0
        assert early == [], "a stage began before the stage before it had ended"
    assert results[0] == results[3]


@pytest.mark.parametrize(("schedule", "steps"), [("1f1b", 500), ("zb_h1", 150)])
def test_nothing_grows_in_many_steps(four_ranks: ProcessPool, schedule: str, steps: int) -> None:
    for figures in four_ranks.run(work.soak, schedule, steps, 3, timeout=110):
        before, after = figures["before"], figures["after"]
        # Fewer is no fault: what earlier tests of the same processes left to the collector may go.
        assert after["files"] <= before["files"]
        assert after["threads"] <= before["threads"]
        assert after["tensors"] <= before["tensors"]
        assert after["memory"] <= before["memory"] + 4096
