"""Which rank holds which stage."""

from __future__ import annotations

import pytest

from pipeloom.errors import ScheduleError
from pipeloom.ir.placement import Placement


@pytest.mark.parametrize(
    ("placement", "rows"),
    [
        (Placement.loop(4), [(0,), (1,), (2,), (3,)]),
        (Placement.loop(4, 2), [(0, 4), (1, 5), (2, 6), (3, 7)]),
        (Placement.vee(4), [(0, 7), (1, 6), (2, 5), (3, 4)]),
        (Placement.mirrored(4), [(0, 7), (1, 6), (2, 5), (3, 4)]),
        (Placement.zigzag(2, 2), [(0, 3), (1, 2)]),
        (Placement.zigzag(2, 4), [(0, 3, 4, 7), (1, 2, 5, 6)]),
        (Placement.zigzag(3, 1), [(0,), (1,), (2,)]),
    ],
)
def test_stages_on_ranks(placement: Placement, rows: list[tuple[int, ...]]) -> None:
    assert [placement.stages_on(rank) for rank in range(placement.num_ranks)] == rows
    for rank, stages in enumerate(rows):
        assert all(placement.rank_of(stage) == rank for stage in stages)
    assert placement.num_stages == sum(map(len, rows))
    assert Placement.of_rows(rows, placement.num_stages) == placement


def test_of_rows() -> None:
    assert Placement.of_rows({0: (1,), 2: (0,)}, 2) == Placement((2, 0), 3)
    assert Placement.of_rows([(0, 1), (1, 2)], 3).ranks == (0, 0, 1), "the first rank keeps it"
    assert Placement.of_rows([(0,), ()], 2).ranks == (0, None)


def test_a_stage_on_no_rank() -> None:
    with pytest.raises(ScheduleError, match="stage 1 is on no rank"):
        Placement((0, None), 1).rank_of(1)


def test_ranks_that_do_not_exist() -> None:
    with pytest.raises(ScheduleError, match=r"stage 1 on rank 2, stage 2 on rank -1.*0\.\.1"):
        Placement((0, 2, -1), 2)
