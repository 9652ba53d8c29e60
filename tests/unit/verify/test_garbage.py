"""Whatever a schedule is made of, the verifier reports it and does not fall over."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from pipeloom.errors import ScheduleError
from pipeloom.ir.action import Action, Kind, fuse
from pipeloom.ir.notation import parse_grid
from pipeloom.ir.placement import Placement
from pipeloom.ir.schedule import Schedule
from pipeloom.ir.topology import Topology
from pipeloom.passes.pipeline import lower
from pipeloom.simulate.engine import simulate
from pipeloom.verify.deadlock import CHANNELS, SENDS
from pipeloom.verify.verifier import verify

RIGHT = parse_grid("0F0 0B0 \n 1F0 1B0")

GARBAGE: list[Any] = [
    Action(Kind.F, 0),
    Action(Kind.F, None, 0),
    Action(Kind.F, -1, 0),
    Action(Kind.F, 0, -1),
    Action(Kind.UNSHARD, 0, 0),
    Action(Kind.F, 0, 0, peer=1),
    Action(Kind.F, 0, 0, (Action(Kind.F, 0, 0),)),
    Action(Kind.OVERLAP_F_B, None, None),
    Action(Kind.OVERLAP_F_B, 0, 0, (Action(Kind.F, 0, 0), Action(Kind.B, 0, 0))),
    fuse(Action(Kind.F, 0, 0)),
    fuse(Action(Kind.F, 0, 0), Action(Kind.SEND_F, 0, 0)),
    fuse(Action(Kind.F, 0, 0), fuse(Action(Kind.F, 0, 0), Action(Kind.B, 0, 0))),
    Action("F", 0, 0),  # type: ignore[arg-type]
    Action(Kind.F, "0", 0),  # type: ignore[arg-type]
    Action(Kind.F, [0], 0),  # type: ignore[arg-type]
    Action(Kind.F, 0, 0.5),  # type: ignore[arg-type]
    Action(Kind.F, True, 0),
    Action(Kind.SEND_F, 0, 0, (), "1"),  # type: ignore[arg-type]
    Action(Kind.OVERLAP_F_B, None, None, 5),  # type: ignore[arg-type]
    Action(Kind.OVERLAP_F_B, None, None, (1, 2)),  # type: ignore[arg-type]
    (Kind.F, 0, 0, (), None),
    "0F0",
    None,
    7,
]


@pytest.mark.parametrize("garbage", GARBAGE, ids=repr)
@pytest.mark.parametrize("position", [0, 1, 2])
def test_garbage_among_the_actions(garbage: Any, position: int) -> None:
    row = list(RIGHT.actions[0])
    row.insert(position, garbage)
    report = verify(RIGHT.with_actions([row, RIGHT.actions[1]]))
    assert report.codes == ("MALFORMED_ACTION",)
    assert report.violations[0].position == position
    assert "MALFORMED_ACTION at rank 0" in str(report)


@pytest.mark.parametrize(
    ("broken", "code"),
    [
        (replace(RIGHT, actions=()), "MISSING_RANK"),
        (replace(RIGHT, actions=((), ())), "MISSING_RANK"),
        (replace(RIGHT, actions=RIGHT.actions * 3), "UNKNOWN_RANK"),
        (replace(RIGHT, placement=Placement((0, 1), 3)), "MISSING_RANK"),
        (replace(RIGHT, placement=Placement((0, 1), 10**6)), "MISSING_RANK"),
        (replace(RIGHT, placement=Placement((), 0)), "STAGE_ON_NO_RANK"),
        (replace(RIGHT, placement=Placement((0,), 2)), "STAGE_ON_NO_RANK"),
        (replace(RIGHT, placement=Placement((None, None), 2)), "STAGE_ON_NO_RANK"),
        (replace(RIGHT, placement=Placement((0, 1, 0), 2)), "UNKNOWN_STAGE"),
        (replace(RIGHT, topology=Topology.chain(9)), "STAGE_ON_NO_RANK"),
        (replace(RIGHT, num_microbatches=0), "NO_MICROBATCHES"),
        (replace(RIGHT, num_microbatches=-3), "NO_MICROBATCHES"),
        (replace(RIGHT, num_microbatches=10**15), "TOO_FEW_ACTIONS"),
    ],
)
def test_shapes_that_do_not_fit(broken: Schedule, code: str) -> None:
    report = verify(broken)
    assert code in report.codes
    assert code in str(report)
    # Whoever is handed such a schedule either needs nothing of what is wrong, or says so.
    for use in (simulate, lower):
        with suppress(ScheduleError):
            use(broken)


def test_a_large_gap_in_the_microbatches_is_said_in_few_words() -> None:
    report = verify(parse_grid("0F0 0F99999 0B0 \n 1F0 1B0"))
    assert [v.code for v in report.violations] == [
        "MISSING_FORWARD",
        "MISSING_BACKWARD",
        "MISSING_FORWARD",
        "MISSING_BACKWARD",
    ]
    assert "microbatches 1..99998" in report.violations[0].why


def test_random_garbage_never_crashes() -> None:
    rng = random.Random("garbage")
    topologies = [
        Topology.chain(3),
        Topology.bidirectional(2),
        Topology.chain(4).with_edges((0, 2), (1, 3)),
    ]

    def make_action() -> Action:
        kind = rng.choice(list(Kind))
        if kind is Kind.OVERLAP_F_B:
            return fuse(make_action(), make_action()) if rng.random() < 0.9 else fuse()
        microbatch = rng.randrange(4) if rng.random() < 0.9 else None
        peer = rng.randrange(5) if rng.random() < 0.3 else None
        return Action(kind, rng.randrange(5), microbatch, (), peer)

    seen: set[str] = set()
    for _ in range(400):
        topology = rng.choice(topologies)
        num_ranks = rng.randint(1, 4)
        ranks = tuple(
            rng.choice([None, *range(num_ranks)]) if rng.random() < 0.2 else s % num_ranks
            for s in range(topology.num_stages + rng.choice((-1, 0, 0, 0, 1)))
        )
        rows = tuple(
            tuple(make_action() for _ in range(rng.randrange(12)))
            for _ in range(num_ranks + rng.choice((-1, 0, 0, 0, 1)))
        )
        schedule = Schedule(
            Placement(ranks, num_ranks), topology, rng.randint(0, 4), rows, rng.random() < 0.5
        )
        report = verify(schedule, sends=rng.choice(SENDS), channel=rng.choice(CHANNELS))
        assert not report.ok
        assert str(report)
        seen.update(report.codes)
    assert len(seen) > 25
