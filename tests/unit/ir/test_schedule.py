"""Schedules as values: equality, hash, pickle, fingerprint; and what is read off the actions."""

from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace

import pytest

from pipeloom.errors import ScheduleError
from pipeloom.ir.action import Action, Kind, fuse
from pipeloom.ir.notation import parse_action, parse_grid
from pipeloom.ir.placement import Placement
from pipeloom.ir.schedule import Schedule, make_schedule
from pipeloom.ir.topology import Topology

TEXT = "0F0 0F1 0B0 0B1 \n 1F0 1B0 1F1 1B1"


def test_equal_schedules() -> None:
    one, other = parse_grid(TEXT, name="one"), parse_grid(TEXT, name="other")
    assert one == other, "the name has no part in it"
    assert hash(one) == hash(other)
    assert one.fingerprint() == other.fingerprint()
    assert len({one, other}) == 1
    assert one != TEXT


DIFFERENT = {
    "actions": replace(parse_grid("0F0 0F1 \n 1F0 1F1"), num_microbatches=2),
    "order": parse_grid("0F0 0F1 0B1 0B0 \n 1F0 1B0 1F1 1B1"),
    "microbatches": replace(parse_grid(TEXT), num_microbatches=3),
    "communication": replace(parse_grid(TEXT), has_communication=True),
    "placement": replace(parse_grid(TEXT), placement=Placement((1, 0), 2)),
    "ranks": replace(parse_grid(TEXT), placement=Placement((0, 1), 3)),
    "topology": replace(parse_grid(TEXT), topology=Topology(((0,), (1,)))),
    "replicas": replace(parse_grid(TEXT), topology=Topology.bidirectional(1)),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_schedules_that_differ(what: str) -> None:
    one, other = parse_grid(TEXT), DIFFERENT[what]
    assert one != other
    assert one.fingerprint() != other.fingerprint()


def test_a_schedule_cannot_be_changed() -> None:
    schedule = parse_grid(TEXT)
    with pytest.raises(FrozenInstanceError):
        schedule.num_microbatches = 5  # type: ignore[misc]


def test_pickle_leaves_out_what_differs_between_processes() -> None:
    schedule = parse_grid(TEXT, name="mine")
    hash(schedule)
    assert schedule.has_backward
    again = pickle.loads(pickle.dumps(schedule))
    assert again == schedule
    assert again.name == "mine"
    assert hash(again) == hash(schedule)
    assert set(schedule.__getstate__()) == {
        "placement",
        "topology",
        "num_microbatches",
        "actions",
        "has_communication",
        "name",
    }


def test_fingerprint_and_hash_in_another_process() -> None:
    schedule = parse_grid(TEXT)
    hash(schedule)
    code = (
        "import pickle, sys; from pipeloom.ir.notation import parse_grid\n"
        "other = pickle.loads(sys.stdin.buffer.read())\n"
        f"mine = parse_grid({TEXT!r})\n"
        "assert other == mine and hash(other) == hash(mine)\n"
        "print(other.fingerprint())"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        input=pickle.dumps(schedule),
        capture_output=True,
        check=True,
        timeout=60,
    )
    assert result.stdout.decode().strip() == schedule.fingerprint()


def test_what_is_read_off_the_actions() -> None:
    schedule = parse_grid("0F0 3F0 3B0 0B0 \n 1F0 2F0 2B0 1B0")
    assert schedule.placement == Placement((0, 1, 1, 0), 2)
    assert schedule.topology == Topology.chain(4)
    assert (schedule.num_stages, schedule.num_ranks, schedule.num_microbatches) == (4, 2, 1)
    assert not schedule.has_communication
    assert schedule.has_backward
    assert schedule.sharded_stages == frozenset()
    assert parse_grid("0UNSHARD 0F0").sharded_stages == {0}
    assert not parse_grid("0F0 0F1").has_backward
    assert parse_grid("(0F1;1B0)OVERLAP_F_B").has_backward
    assert parse_grid("0F0 0SEND_F0 \n 1RECV_F0 1F0").has_communication


def test_a_misplaced_message_does_not_move_a_stage() -> None:
    schedule = parse_grid("0F0 1RECV_F0 0SEND_F0 \n 1F0")
    assert schedule.placement.ranks == (0, 1)
    only_messages = parse_grid("0SEND_F0 \n 1F0")
    assert only_messages.placement.ranks == (0, 1)


def test_fused_actions_place_the_stages_of_their_parts() -> None:
    row = [fuse(Action(Kind.F, 0, 4), Action(Kind.B, 2, 1))]
    schedule = make_schedule([row, [Action(Kind.F, 1, 0)]])
    assert schedule.placement.ranks == (0, 1, 0)
    assert schedule.num_microbatches == 5


def test_texts_are_no_actions() -> None:
    with pytest.raises(ScheduleError, match="not of '0F0'; parse_action"):
        make_schedule([["0F0"]])  # type: ignore[list-item]


def test_given_shapes_are_kept() -> None:
    rows = [[parse_action("0F0")], [parse_action("1F0")]]
    schedule = make_schedule(rows, topology=Topology.chain(3), num_microbatches=4, name="mine")
    assert schedule.placement.ranks == (0, 1, None)
    assert (schedule.num_microbatches, schedule.name) == (4, "mine")


def test_copies_of_a_schedule() -> None:
    schedule = parse_grid(TEXT, name="mine")
    assert schedule.renamed("yours").name == "yours"
    assert schedule.renamed("yours") == schedule
    shorter = schedule.with_actions([row[:1] for row in schedule.actions])
    assert [list(map(str, row)) for row in shorter.actions] == [["0F0"], ["1F0"]]
    assert (shorter.name, shorter.placement) == ("mine", schedule.placement)
    assert shorter.with_actions(shorter.actions, has_communication=True).has_communication


def test_text() -> None:
    schedule: Schedule = parse_grid(TEXT, name="mine")
    assert repr(schedule) == "<Schedule mine: 2 ranks, 2 stages, 2 microbatches, 8 actions>"
    assert str(schedule) == (
        "# mine · 2 ranks · 2 stages · 2 microbatches\n"
        "rank 0   0F0  0F1  0B0  0B1\n"
        "rank 1   1F0  1B0  1F1  1B1"
    )
