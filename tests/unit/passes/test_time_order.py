"""The common order of all ranks."""

from __future__ import annotations

import pytest

from pipeloom.errors import ScheduleError
from pipeloom.ir.notation import parse_csv, parse_grid
from pipeloom.ir.schedule import Schedule, make_schedule
from pipeloom.ir.topology import Topology
from pipeloom.passes.time_order import walk_in_time_order
from pipeloom.schedules.registry import build_schedule, list_schedules


def common_order(schedule: Schedule) -> list[tuple[int, str]]:
    return [
        (rank, str(action))
        for instant in walk_in_time_order(schedule)
        for rank, action, _ in instant.started
    ]


@pytest.mark.parametrize("name", [entry.name for entry in list_schedules()])
def test_every_rank_keeps_its_order_and_nothing_starts_before_what_it_needs(name: str) -> None:
    schedule = build_schedule(name, ranks=4, microbatches=8)
    produced = set()
    rows: list[list[str]] = [[] for _ in schedule.actions]
    running: dict[int, str] = {}
    for instant in walk_in_time_order(schedule):
        for rank, action, _ in instant.ended:
            assert running.pop(rank) == str(action)
            produced |= set(schedule.dependencies.produces(action))
        for rank, action, _ in instant.started:
            assert rank not in running, "one computation at a time"
            assert produced >= set(schedule.dependencies.needs(action))
            running[rank] = str(action)
            rows[rank].append(str(action))
    assert not running
    assert rows == [list(map(str, row)) for row in schedule.actions]


def test_a_full_backward_takes_as_long_as_its_halves() -> None:
    # Rank 1 starts 1F1 when rank 0 would be half through 0B0 if that were split.
    order = common_order(parse_grid("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"))
    split = common_order(parse_grid("0F0 0F1 0I0 0W0 0I1 0W1\n1F0 1I0 1W0 1F1 1I1 1W1"))
    assert order.index((0, "0B0")) > order.index((1, "1F1"))
    assert split.index((0, "0I0")) < split.index((1, "1F1"))


def test_copies_start_their_reduction_together() -> None:
    rows = parse_csv("0F0,0B0,0REDUCE_GRAD\n1F1,1B1,1REDUCE_GRAD\n")
    schedule = make_schedule(rows, topology=Topology.bidirectional(1), num_microbatches=2)
    instants = [[str(a) for _, a, _ in i.started] for i in walk_in_time_order(schedule)]
    assert instants[-1] == ["0REDUCE_GRAD", "1REDUCE_GRAD"]


def test_reductions_in_opposite_order_cannot_be_carried_through() -> None:
    rows = parse_csv(
        "0F0,3F1,3B1,0B0,0REDUCE_GRAD,3REDUCE_GRAD\n2F1,1F0,1B0,2B1,1REDUCE_GRAD,2REDUCE_GRAD\n"
    )
    schedule = make_schedule(rows, topology=Topology.bidirectional(2))
    with pytest.raises(ScheduleError):
        list(walk_in_time_order(schedule))
