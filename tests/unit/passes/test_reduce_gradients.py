"""Gradients are reduced after the last backward, and copies meet."""

from __future__ import annotations

import pytest

from pipeloom.errors import ScheduleError
from pipeloom.ir.notation import parse_csv, parse_grid
from pipeloom.ir.schedule import Schedule, make_schedule
from pipeloom.ir.topology import Topology
from pipeloom.passes.insert_communication import insert_communication
from pipeloom.passes.reduce_gradients import reduce_gradients
from pipeloom.verify.verifier import verify


def bidirectional() -> Schedule:
    rows = parse_csv("0F0,3F1,3B1,0B0\n2F1,1F0,1B0,2B1\n")
    return make_schedule(rows, topology=Topology.bidirectional(2), name="both ways")


def rows_of(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, row)) for row in schedule.actions]


def test_right_after_the_last_backward() -> None:
    result = reduce_gradients(parse_grid("0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1"), stages=[0, 1])
    assert rows_of(result) == ["0F0 0F1 1F0 1F1 1B0 1B1 1REDUCE_GRAD 0B0 0B1 0REDUCE_GRAD"]


def test_torch_reduces_at_the_same_places() -> None:
    """The last backward may be a B or a W; parts of fused actions count."""
    pipelining = pytest.importorskip("torch.distributed.pipelining.schedules")
    text = (
        "0F0 0F1 0F2 1F0 1F1 2F0 2F1 1F2 2F2 2B0 2B1 1B0 1B1 0I0 2B2 0B1 1B2 0I2 0F3 1F3 2F3 "
        "(0F4;2B3)OVERLAP_F_B 0W0 1B3 0W2 0B3 1F4 2F4 2B4 1B4 0I4 0W4"
    )
    theirs = pipelining._add_reduce_grad([pipelining._Action.from_str(t) for t in text.split()], 5)
    assert rows_of(reduce_gradients(parse_grid(text), stages=[0, 1, 2])) == [
        " ".join(map(str, theirs))
    ]
    fused = "0F0 1F0 0F1 (1F1;1B0)OVERLAP_F_B (0F2;0B0)OVERLAP_F_B 1B1 1F2 1B2 0B1 0B2"
    theirs = pipelining._add_reduce_grad([pipelining._Action.from_str(t) for t in fused.split()], 3)
    assert rows_of(reduce_gradients(parse_grid(fused), stages=[0, 1])) == [
        " ".join(map(str, theirs))
    ]


def test_copies_meet_after_the_last_backward_of_both() -> None:
    result = reduce_gradients(bidirectional())
    assert rows_of(result) == [
        "0F0 3F1 3B1 3REDUCE_GRAD 0B0 0REDUCE_GRAD",
        "2F1 1F0 1B0 1REDUCE_GRAD 2B1 2REDUCE_GRAD",
    ]
    for complete in (result, insert_communication(result)):
        verify(complete, sends="blocking", channel="all").raise_for_errors()


def test_copies_named_alone_bring_the_others() -> None:
    result = reduce_gradients(bidirectional(), stages=[2])
    assert "0REDUCE_GRAD" in rows_of(result)[0]
    assert "1REDUCE_GRAD" not in rows_of(result)[1]
    verify(result).raise_for_errors()


def test_in_a_program_with_communication_copies_meet_at_the_end() -> None:
    result = reduce_gradients(insert_communication(bidirectional()))
    for row in rows_of(result):
        assert len(row.split("REDUCE_GRAD")) == 3
    assert rows_of(result)[0].endswith("0REDUCE_GRAD 3REDUCE_GRAD")
    assert rows_of(result)[1].endswith("2REDUCE_GRAD 1REDUCE_GRAD")
    for sends, channel in (("blocking", "all"), ("rendezvous", "edge"), ("buffered", "pair")):
        verify(result, sends=sends, channel=channel).raise_for_errors()  # type: ignore[arg-type]


def test_messages_do_not_wait_for_a_reduction() -> None:
    program = insert_communication(parse_grid("0F0 0B0\n1F0 1B0"))
    expected = "1RECV_F0 1F0 1B0 1SEND_B0 1REDUCE_GRAD"
    assert rows_of(reduce_gradients(program, stages=[0, 1]))[1] == expected
    reduced = reduce_gradients(parse_grid("0F0 0B0\n1F0 1B0"), stages=[0, 1])
    assert rows_of(insert_communication(reduced))[1] == expected


def test_a_second_run_changes_nothing() -> None:
    once = reduce_gradients(bidirectional())
    assert reduce_gradients(once) == once


def test_a_plain_chain_needs_none() -> None:
    schedule = parse_grid("0F0 0B0\n1F0 1B0")
    assert reduce_gradients(schedule) is schedule


def test_forwards_alone_have_nothing_to_reduce() -> None:
    with pytest.raises(ScheduleError, match="forward-only"):
        reduce_gradients(parse_grid("0F0\n1F0"), stages=[0])


def test_an_unknown_stage_is_named() -> None:
    with pytest.raises(ScheduleError, match=r"no stage 7; the stages are 0\.\.1"):
        reduce_gradients(parse_grid("0F0 0B0\n1F0 1B0"), stages=[0, 7])
