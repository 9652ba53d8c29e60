"""The programs that pipelines run: complete, and receives posted so that messages travel early."""

from __future__ import annotations

import pytest

import pipeloom
from pipeloom.ir.dependencies import RULES, Role
from pipeloom.ir.questions import is_compute
from pipeloom.runtime.programs import Programs

NAMES = [entry.name for entry in pipeloom.list_schedules() if entry.name != "forward_only"]


def find_programs(name: str, microbatches: int, *, sends="rendezvous", channel="edge"):
    source = pipeloom.build_schedule(name, ranks=4, microbatches=microbatches)
    return Programs(
        source,
        num_stages=source.num_stages,
        ranks=4,
        microbatches=None,
        options={},
        sends=sends,
        channel=channel,
    )


def look_at_receives(program: pipeloom.Schedule) -> tuple[int, int, int]:
    """How many are posted right before their use though the rank had computed before; how many
    there are; how many messages of one edge at most are awaited at once."""
    table = program.dependencies
    late = total = pending_most = 0
    for row in program.actions:
        posted: dict[object, tuple[int, object]] = {}
        pending: dict[object, int] = {}
        computed = 0
        for action in row:
            if RULES[action.kind].role is Role.RECEIVE:
                source = table.message_of(action)[1]
                edge = (action.kind, source, action.stage)
                posted[table.produces(action)[0]] = (computed, edge)
                pending[edge] = pending.get(edge, 0) + 1
                pending_most = max(pending_most, pending[edge])
            elif is_compute(action):
                for product in table.needs(action):
                    if product in posted:
                        when, edge = posted.pop(product)
                        late += when == computed and computed > 0
                        total += 1
                        pending[edge] -= 1
                computed += 1
    return late, total, pending_most


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("microbatches", [8, 24])
def test_receives_are_posted_a_computation_before_their_use(name, microbatches):
    programs = find_programs(name, microbatches)
    late, total, most = look_at_receives(programs.training())
    late_before, total_before, most_before = look_at_receives(pipeloom.lower(programs.source))
    assert total == total_before
    assert late_before > total / 8
    # All but a few, which must come after another message of their sender that is used later.
    assert late <= total / 6
    # One more buffer at most per edge, however many microbatches there are.
    assert most <= most_before + 1


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "zbv", "interleaved_1f1b", "chimera"])
def test_receives_do_not_pile_up_with_microbatches(name):
    few = look_at_receives(find_programs(name, 8).training())
    many = look_at_receives(find_programs(name, 32).training())
    assert many[1] > 3 * few[1]
    assert many[2] <= few[2] <= 2


def test_evaluation_posts_early_too():
    late, total, most = look_at_receives(find_programs("zbv", 8).forward_only(12))
    assert total
    assert (late, most) == (0, 2)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("sends", "channel"),
    [("buffered", "edge"), ("rendezvous", "edge"), ("rendezvous", "pair"), ("blocking", "all")],
)
def test_programs_suit_the_model_of_any_transport(name, sends, channel):
    programs = find_programs(name, 8, sends=sends, channel=channel)
    for program in (programs.training(), programs.forward_only(3)):
        assert pipeloom.verify(program, sends=sends, channel=channel).ok
