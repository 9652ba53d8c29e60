"""What the ranks say when one of them fails, dies, leaves or stands still."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.multiprocess import transport_work as work
from tests.support.process_pool import Died, ProcessPool

pytestmark = pytest.mark.multiprocess


@pytest.mark.parametrize("failing", [0, 1, 3])
def test_one_failure_reaches_everybody(four_ranks: ProcessPool, failing: int) -> None:
    for kind, text, rank, seconds, refuses, _ in four_ranks.run(
        work.fail_while_others_wait, [failing]
    ):
        assert (kind, text, rank) == ("StepFailed", f"rank {failing} failed in 1B3", failing)
        assert seconds < 5
        assert refuses


def test_failures_at_the_same_time_become_one(four_ranks: ProcessPool) -> None:
    results = four_ranks.run(work.fail_while_others_wait, [0, 1, 2, 3])
    assert len({text for _, text, *_ in results}) == 1


@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_rank_is_named(four_ranks: ProcessPool, victim: int) -> None:
    results = four_ranks.run(work.lose_rank, victim, "kill", may_die=[victim])
    assert isinstance(results[victim], Died)
    for rank, result in enumerate(results):
        if rank != victim:
            kind, text, lost, seconds = result
            assert (kind, lost) == ("RankLost", victim)
            assert f"rank {victim} (process" in text
            assert "went away without a word in step 3" in text
            assert seconds < 10


def test_a_killed_rank_that_held_the_store_is_named(two_ranks_with_store: ProcessPool) -> None:
    results = two_ranks_with_store.run(work.lose_rank, 0, "kill", may_die=[0])
    kind, _, lost, seconds = results[1]
    assert (kind, lost) == ("RankLost", 0)
    assert seconds < 10


def test_a_forked_child_does_not_hide_a_death(two_ranks: ProcessPool, tmp_path: Path) -> None:
    told = tmp_path / "told"
    results = two_ranks.run(work.lose_rank, 1, "kill with a child left", told, may_die=[1])
    kind, _, lost, seconds = results[0]
    assert (kind, lost) == ("RankLost", 1)
    assert seconds < 10


def test_a_rank_that_leaves_is_named(two_ranks: ProcessPool) -> None:
    results = two_ranks.run(work.lose_rank, 1, "close")
    kind, text, lost, _ = results[0]
    assert (kind, lost) == ("RankLost", 1)
    assert "closed its pipeline or ended its program" in text


def test_a_circle_of_waiting_ranks_is_shown(two_ranks: ProcessPool) -> None:
    for kind, text, _, _ in two_ranks.run(work.stand_still, "circle"):
        assert kind == "PipelineStalled"
        assert "nothing moved for 1 s in step 5" in text
        assert (
            "rank 0 waits at 0F1 for rank 1, which waits at 1RECV_F1 for rank 0, which is" in text
        )
        assert "circle" in text


def test_a_rank_that_computes_for_ever_is_named(two_ranks: ProcessPool) -> None:
    for kind, text, rank, action in two_ranks.run(work.stand_still, "computing"):
        assert (kind, rank) == ("PipelineStalled", 1)
        assert action is not None
        assert f"for rank 1, which runs {action} and does not come back" in text
        assert "longer timeout=" in text


def test_a_rank_that_does_not_come_is_named(two_ranks: ProcessPool) -> None:
    for kind, text, rank, _ in two_ranks.run(work.stand_still, "late"):
        assert (kind, rank) == ("PipelineStalled", 1)
        assert "rank 1: is not in a step" in text


def test_a_process_that_is_stopped_is_named(two_ranks: ProcessPool) -> None:
    results = two_ranks.run(work.stop_one_process)
    for kind, text, rank in results:
        assert (kind, rank) == ("PipelineStalled", 1)
        assert "rank 1: does not answer (its process is stopped, or" in text


def test_a_rank_that_never_builds_its_pipeline_is_named() -> None:
    pool = ProcessPool(2)
    text, _ = pool.run(work.come_late, 1.0)
    pool.stop()
    assert text.startswith("RankLost: rank 1 did not come to build the pipeline within 1 s")


def test_groups_that_cannot_be_used(two_ranks: ProcessPool) -> None:
    whole_mesh, foreign_group = two_ranks.run(work.choose_wrong_groups)[1]
    assert "pass the one that the pipeline runs along, for example group=mesh['data']" in whole_mesh
    assert "this process is not a member of the group" in foreign_group


def test_a_send_that_nobody_takes_is_a_stall(two_ranks: ProcessPool) -> None:
    for kind, text, rank, _ in two_ranks.run(work.stand_still, "large send"):
        assert (kind, rank) == ("PipelineStalled", 1)
        assert "rank 0: waits at the end of the step for rank 1" in text


def test_no_stall_while_another_rank_moves(two_ranks: ProcessPool) -> None:
    assert two_ranks.run(work.stand_still, "moving") == [("no error",)] * 2
