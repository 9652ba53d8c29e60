"""The torch.distributed transport below the executor: messages, sums, collectives, groups."""

from __future__ import annotations

import pytest

from tests.multiprocess import transport_work as work
from tests.support.process_pool import ProcessPool

pytestmark = pytest.mark.multiprocess


def test_tensors_of_every_type_and_shape_arrive(two_ranks: ProcessPool) -> None:
    _, came = two_ranks.run(work.exchange_types)
    assert len(came) == len(work.TYPES) + 3
    assert all(equal for _, _, equal in came), came
    assert [dtype for dtype, _, _ in came[: len(work.TYPES)]] == [str(t) for t in work.TYPES]


@pytest.mark.parametrize("new_header_each", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [[16] * 12, [1 << 20] * 4, [16, 1 << 20, 16, 16, 1 << 20, 5], [1 << 22, 1 << 22]],
    ids=["small", "large", "mixed", "huge"],
)
def test_both_ranks_may_send_everything_before_they_receive(
    two_ranks: ProcessPool, sizes: list[int], new_header_each: bool
) -> None:
    right = two_ranks.run(work.exchange_many, sizes, new_header_each)
    assert right == [3 * len(sizes)] * 2


def test_messages_without_tensors(two_ranks: ProcessPool) -> None:
    assert two_ranks.run(work.send_empty_messages) == [0, 3]


@pytest.mark.parametrize("sizes", [[3, 1], [1 << 21, 5]], ids=["small", "large"])
def test_copies_get_the_same_sum(four_ranks: ProcessPool, sizes: list[int]) -> None:
    import torch

    sums = four_ranks.run(work.sum_copies, sizes)

    def value(rank: int) -> torch.Tensor:
        return torch.tensor(0.1 * (rank + 1))

    outer = (value(0) + value(3)).item()
    inner = (value(1) + value(2)).item()
    assert sums[0] == sums[3] == [[outer] * 2] * 2
    assert sums[1] == sums[2] == [[inner] * 2] * 2


def test_values_and_clocks_are_shared(four_ranks: ProcessPool) -> None:
    for values, offsets, total in four_ranks.run(work.gather_and_compare_clocks):
        assert values == [{"rank": rank} for rank in range(4)]
        assert offsets == [0.0] * 4, "processes of one machine share a clock"
        assert total == 0.5 * 4 + 6


def test_ranks_with_different_programs_are_told(two_ranks: ProcessPool) -> None:
    texts = two_ranks.run(work.run_different_programs)
    assert texts[0] == texts[1]
    assert "ScheduleError: the ranks are about to run different programs" in texts[0]
    assert "ranks [0]" in texts[0]
    assert "4 microbatches" in texts[0]
    assert "5 microbatches" in texts[0]


def test_two_pipelines_in_sub_groups(four_ranks: ProcessPool) -> None:
    assert four_ranks.run(work.run_in_subgroups) == [(0, 0.0), (0, 1.0), (1, 0.0), (1, 1.0)]


@pytest.mark.parametrize("size", [16, 1 << 21], ids=["small", "large"])
def test_nothing_is_kept_of_a_message(two_ranks: ProcessPool, size: int) -> None:
    assert two_ranks.run(work.keep_nothing, size) == [[], []]


def test_transports_leave_nothing_behind(two_ranks: ProcessPool) -> None:
    for files, threads, files_after, threads_after in two_ranks.run(work.count_leftovers, 5):
        assert files_after <= files
        assert threads_after <= threads
