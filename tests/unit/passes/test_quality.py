"""Messages stand where they cost no time: the simulator as the judge."""

from __future__ import annotations

from typing import Any

import pytest

from pipeloom.cost.constant import UniformCosts
from pipeloom.passes.insert_communication import insert_communication
from pipeloom.passes.place_receives import place_receives
from pipeloom.schedules.registry import build_schedule, list_schedules
from pipeloom.simulate.engine import simulate

UNIT = UniformCosts(forward=1, input=1, weight=1)
LATENT = UniformCosts(forward=1, input=1, weight=1, latency=0.4)


@pytest.mark.parametrize(
    ("sends", "channel"),
    [("buffered", "edge"), ("buffered", "all"), ("rendezvous", "edge")],
)
@pytest.mark.parametrize("name", [entry.name for entry in list_schedules()])
def test_messages_that_take_no_time_cost_no_time(name: str, sends: Any, channel: Any) -> None:
    """Where sends wait for their receives to be posted, or all of a rank's share one queue. (With
    both, or with ranks that are held, what a rank is busy with may hold up others.)"""
    schedule = build_schedule(name, ranks=4, microbatches=8)
    program = insert_communication(schedule)
    makespan = simulate(program, UNIT, sends=sends, channel=channel).makespan
    assert makespan == pytest.approx(simulate(schedule, UNIT).makespan)


@pytest.mark.parametrize(
    "name", ["gpipe", "1f1b", "eager_1f1b", "interleaved_1f1b", "zb_h1", "zbv", "chimera"]
)
def test_one_computation_of_lookahead_hides_what_can_be_hidden(name: str) -> None:
    """As fast as if every message could leave at once, which a receive posted late prevents."""
    schedule = build_schedule(name, ranks=4, microbatches=8)
    program = insert_communication(schedule)

    def makespan_of(candidate: Any) -> float:
        return simulate(candidate, LATENT, sends="rendezvous", channel="edge").makespan

    early = makespan_of(place_receives(program, "early", lookahead=1))
    assert early == pytest.approx(simulate(schedule, LATENT).makespan)
    assert early < makespan_of(program) <= makespan_of(place_receives(program, "late"))
