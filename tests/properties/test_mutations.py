"""A mutation of a right program is caught, or a run with symbols shows that it does no harm."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from pipeloom.ir.action import Action, Kind, fuse
from pipeloom.ir.schedule import Schedule
from pipeloom.verify.verifier import verify
from tests.support.brute_force_executor import find_fault
from tests.support.random_programs import make_program

Rows = list[list[Action]]


def pick(rng: random.Random, rows: Rows) -> tuple[int, int]:
    rank = rng.choice([rank for rank, row in enumerate(rows) if row])
    return rank, rng.randrange(len(rows[rank]))


def drop(rng: random.Random, rows: Rows) -> None:
    rank, position = pick(rng, rows)
    del rows[rank][position]


def duplicate(rng: random.Random, rows: Rows) -> None:
    rank, position = pick(rng, rows)
    rows[rank].insert(rng.randint(0, len(rows[rank])), rows[rank][position])


def swap_neighbours(rng: random.Random, rows: Rows) -> None:
    rank, position = pick(rng, rows)
    row = rows[rank]
    if position + 1 < len(row):
        row[position], row[position + 1] = row[position + 1], row[position]


def swap_any(rng: random.Random, rows: Rows) -> None:
    rank, position = pick(rng, rows)
    other = rng.randrange(len(rows[rank]))
    row = rows[rank]
    row[position], row[other] = row[other], row[position]


def move_to_another_rank(rng: random.Random, rows: Rows) -> None:
    rank, position = pick(rng, rows)
    action = rows[rank].pop(position)
    target = rng.choice(rows)
    target.insert(rng.randint(0, len(target)), action)


def move_within_rank(rng: random.Random, rows: Rows) -> None:
    rank, position = pick(rng, rows)
    action = rows[rank].pop(position)
    rows[rank].insert(rng.randint(0, len(rows[rank])), action)


def change_number(rng: random.Random, rows: Rows) -> None:
    rank, position = pick(rng, rows)
    action = rows[rank][position]
    if action.parts:
        return
    field = rng.choice(("stage", "microbatch"))
    value = getattr(action, field)
    if value is not None:
        rows[rank][position] = action._replace(**{field: max(0, value + rng.choice((-1, 1)))})


def change_kind(rng: random.Random, rows: Rows) -> None:
    rank, position = pick(rng, rows)
    action = rows[rank][position]
    if not action.parts and action.microbatch is not None:
        kinds = [Kind.F, Kind.B, Kind.I, Kind.W]
        if action.kind not in kinds:
            kinds = [Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B]
        rows[rank][position] = action._replace(kind=rng.choice(kinds))


def fuse_neighbours(rng: random.Random, rows: Rows) -> None:
    rank, position = pick(rng, rows)
    pair = rows[rank][position : position + 2]
    if len(pair) == 2 and all(a.kind in (Kind.F, Kind.B, Kind.I, Kind.W) for a in pair):
        rows[rank][position : position + 2] = [fuse(*pair)]


MUTATIONS = [
    drop,
    duplicate,
    swap_neighbours,
    swap_any,
    move_to_another_rank,
    move_within_rank,
    change_number,
    change_kind,
    fuse_neighbours,
]


def make_right_program(rng: random.Random) -> Schedule:
    while True:
        program = make_program(rng, written=rng.random() < 0.7, sharded=rng.random() < 0.3)
        if 4 <= sum(map(len, program.actions)) <= 120:
            return program


def test_unchanged_programs_are_right_for_both() -> None:
    rng = random.Random("unchanged")
    for _ in range(200):
        program = make_right_program(rng)
        assert find_fault(program) is None, program
        report = verify(program, sends="blocking", channel="all")
        assert report.ok, report


@pytest.mark.parametrize("mutate", MUTATIONS)
def test_a_mutation_is_caught_or_harmless(mutate) -> None:  # type: ignore[no-untyped-def]
    rng = random.Random(mutate.__name__)
    verdicts: Counter[bool] = Counter()
    for _ in range(250):
        program = make_right_program(rng)
        rows = [list(row) for row in program.actions]
        mutate(rng, rows)
        mutant = program.with_actions(rows)
        if mutant == program:
            continue
        report = verify(mutant, sends="buffered", channel="edge")
        fault = find_fault(mutant)
        # Stronger than asked: what is caught is also really wrong.
        assert report.ok == (fault is None), f"{fault}\n{report}\n{mutant}\n{mutant.topology}"
        verdicts[report.ok] += 1
    assert verdicts[False] > 50


def test_many_mutations_at_once_never_crash_the_verifier() -> None:
    rng = random.Random("many")
    for _ in range(300):
        program = make_right_program(rng)
        rows = [list(row) for row in program.actions]
        for _ in range(rng.randint(2, 12)):
            if any(rows):
                rng.choice(MUTATIONS)(rng, rows)
        mutant = program.with_actions(rows)
        for sends, channel in (("blocking", "all"), ("rendezvous", "pair"), ("buffered", "edge")):
            report = verify(mutant, sends=sends, channel=channel)
            assert str(report)
            if report.ok:
                assert find_fault(mutant) is None, f"{report}\n{mutant}"
