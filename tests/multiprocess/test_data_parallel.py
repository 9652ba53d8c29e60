"""Two pipelines of two ranks on four processes: sharded and replicated stages."""

from __future__ import annotations

import pytest

from tests.multiprocess import data_parallel_work as work
from tests.support.process_pool import ProcessPool

pytestmark = pytest.mark.multiprocess


@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "interleaved_1f1b", "gpipe"])
@pytest.mark.parametrize("kind", ["fsdp", "fsdp nested", "ddp"])
def test_gradients_are_those_of_the_whole_batch(
    four_ranks: ProcessPool, kind: str, schedule: str
) -> None:
    results = four_ranks.run(work.compare_with_plain, schedule, kind, 2)
    assert [problems for problems, _ in results] == [[]] * 4


@pytest.mark.parametrize(("schedule", "stages_per_rank"), [("1f1b", 1), ("zbv", 2)])
def test_gathered_once_and_reduced_once_in_a_step(
    four_ranks: ProcessPool, schedule: str, stages_per_rank: int
) -> None:
    for _, counts in four_ranks.run(work.compare_with_plain, schedule, "fsdp", 1):
        assert counts == {
            "c10d::_allgather_base_": stages_per_rank,
            "c10d::_reduce_scatter_base_": stages_per_rank,
        }
    for _, counts in four_ranks.run(work.compare_with_plain, schedule, "ddp", 1):
        # The gradients, and, in a type of its own, which of them were found anywhere.
        assert counts == {"c10d::allreduce_": 2 * stages_per_rank}
