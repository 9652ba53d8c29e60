"""Every idle span has one cause, and they are the right ones where one can see it."""

from __future__ import annotations

import itertools

import pytest

from pipeloom import UniformCosts, build_schedule, simulate
from pipeloom.ir.notation import parse_grid


def test_a_small_case_by_hand() -> None:
    #  rank 0   |0F0|0F1|·········|0B0  |·····|0B1  |
    #  rank 1   ·····|1F0|1B0  |1F1|1B1  |··········|
    timeline = simulate(
        parse_grid("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"), UniformCosts(1, 1, 1, latency=0.5)
    )
    told = [
        (i.rank, i.cause, i.start, i.end, str(i.waits_for), i.waits_for_rank, str(i.before))
        for i in timeline.idle_causes
    ]
    assert told == [
        (0, "waiting", 2, 4.5, "1B0", 1, "0B0"),
        (0, "communication", 4.5, 5, "1B0", 1, "0B0"),
        (0, "waiting", 7, 7.5, "1B1", 1, "0B1"),
        (0, "communication", 7.5, 8, "1B1", 1, "0B1"),
        (1, "warm-up", 0, 1.5, "0F0", 0, "1F0"),
        (1, "drain", 7.5, 10, "None", None, "None"),
    ]


@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "zb_h2", "zbv", "dualpipe"])
def test_causes_fill_all_idle_time_without_overlap(name: str) -> None:
    schedule = build_schedule(name, ranks=4, microbatches=8)
    timeline = simulate(schedule, UniformCosts(1.1, 0.9, 0.37, latency=0.21))
    for rank in range(4):
        busy = [(s.start, s.end) for s in timeline.spans_of(rank, "compute")]
        idle = [(i.start, i.end) for i in timeline.idle_causes if i.rank == rank]
        pieces = sorted(busy + idle)
        assert pieces[0][0] == 0
        assert pieces[-1][1] == timeline.makespan
        assert all(a[1] == b[0] for a, b in itertools.pairwise(pieces))
