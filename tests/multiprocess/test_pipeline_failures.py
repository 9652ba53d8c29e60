"""Failures in the middle of real steps: one error, everywhere, soon, and for good."""

from __future__ import annotations

import pytest

from tests.multiprocess import pipeline_work as work
from tests.support.process_pool import Died, ProcessPool

pytestmark = pytest.mark.multiprocess


@pytest.mark.parametrize("kind", ["F", "B", "I", "W", "OVERLAP_F_B", "SEND_F", "SEND_B"])
def test_an_exception_in_any_kind_of_action(four_ranks: ProcessPool, kind: str) -> None:
    results = four_ranks.run(work.fail_in, kind)
    texts = {text for _, text, _ in results}
    assert len(texts) == 1
    assert "ArithmeticError: the handler struck" in texts.pop()
    for error, _, seconds in results:
        assert error == "StepFailed"
        assert seconds < 5


@pytest.mark.parametrize(
    ("schedule", "stage", "when", "action"),
    [
        ("1f1b", 0, "F", "0F1"),
        ("1f1b", 2, "F", "2F1"),
        ("1f1b", 3, "B", "3B1"),
        ("zbv", 5, "B", "5I1"),
        ("gpipe", 0, "B", "0B1"),
    ],
)
def test_the_error_says_where_and_shows_the_origin(
    four_ranks: ProcessPool, schedule: str, stage: int, when: str, action: str
) -> None:
    results = four_ranks.run(work.sabotage, schedule, stage, when, "raise")
    assert len({text for _, text, *_ in results}) == 1
    for kind, text, (rank, at_stage, microbatch, at_action), seconds, refuses in results:
        assert (kind, at_stage, microbatch, at_action) == ("StepFailed", stage, 1, action)
        assert f"rank {rank} failed in {action} (stage {stage}, microbatch 1)" in text
        assert "ArithmeticError: the sabotage struck" in text
        assert "in _act" in text, "the traceback of the origin"
        assert seconds < 5
        assert refuses


@pytest.mark.parametrize("stage", [0, 3])
def test_a_rank_killed_in_a_step(four_ranks: ProcessPool, stage: int) -> None:
    results = four_ranks.run(work.sabotage, "1f1b", stage, "B", "kill", may_die=[stage])
    assert isinstance(results[stage], Died)
    for kind, text, (rank, *_), seconds, refuses in (r for r in results if not isinstance(r, Died)):
        assert (kind, rank) == ("RankLost", stage)
        assert "went away without a word in step 1" in text
        assert seconds < 10
        assert refuses


def test_a_stage_that_stands_still(four_ranks: ProcessPool) -> None:
    results = four_ranks.run(work.sabotage, "1f1b", 2, "F", "sleep", 2, 1.0)
    assert len({text for _, text, *_ in results}) == 1
    for kind, text, (rank, stage, microbatch, action), _, refuses in results:
        assert (kind, rank, stage, microbatch, action) == ("PipelineStalled", 2, 2, 1, "2F1")
        assert "rank 2: runs 2F1" in text
        assert "which runs 2F1 and does not come back" in text
        assert refuses


def test_a_shape_that_breaks_the_promise(four_ranks: ProcessPool) -> None:
    results = four_ranks.run(work.sabotage, "1f1b", 1, "F", "shape")
    assert len({text for _, text, *_ in results}) == 1
    for kind, text, (rank, stage, microbatch, _), seconds, _ in results:
        assert (kind, rank, stage, microbatch) == ("StepFailed", 1, 1, 1)
        assert "the output of stage 1 for microbatch 1" in text
        assert "has shape [4, 4], promised [2, 4]" in text
        assert seconds < 5


def test_a_batch_that_does_not_fit_on_one_rank(two_ranks: ProcessPool) -> None:
    texts = two_ranks.run(work.mistake, "other batch")
    assert texts[0] == texts[1]
    assert "8" in texts[0]
    assert "6" in texts[0]


def test_a_rank_may_leave_once_its_part_is_done(two_ranks: ProcessPool) -> None:
    assert two_ranks.run(work.leave_early) == [0, 8]


def test_stages_on_the_wrong_ranks(two_ranks: ProcessPool) -> None:
    texts = two_ranks.run(work.mistake, "stage on two ranks")
    assert texts[0] == texts[1]
    assert "ScheduleError" in texts[0]


def test_ranks_that_disagree_on_microbatches(two_ranks: ProcessPool) -> None:
    texts = two_ranks.run(work.mistake, "other microbatches")
    assert texts[0] == texts[1]
    assert "the ranks are about to run different programs" in texts[0]
