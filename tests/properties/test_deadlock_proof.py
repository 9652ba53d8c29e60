"""The deadlock proof against a search of every order of events, both ways."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from pipeloom.ir.action import Action
from pipeloom.ir.questions import is_communication
from pipeloom.ir.schedule import Schedule
from pipeloom.verify.deadlock import CHANNELS, SENDS, find_deadlock
from tests.support.brute_force_interleavings import search
from tests.support.random_programs import make_program

MODELS = [
    ("blocking", "all"),
    *((sends, channel) for sends in SENDS if sends != "blocking" for channel in CHANNELS),
]


def make_small_program(rng: random.Random) -> Schedule:
    """A program of 2 or 3 ranks and at most 20 actions that can run, then disordered."""
    while True:
        program = make_program(rng, written=True, sharded=rng.random() < 0.3)
        num_messages = sum(map(is_communication, program.all_actions())) // 2
        num_actions = sum(map(len, program.actions))
        if program.num_ranks in (2, 3) and num_actions <= 22 and num_messages >= 4:
            break
    rows = [[action for action in row if not is_sharding(action)] for row in program.actions]
    change = rng.choice((disorder, delay_messages, delay_messages))
    for _ in range(rng.choice((0, 1, 1, 2, 3, 5))):
        change(rng, rows)
    return program.with_actions(rows, has_communication=True)


def is_sharding(action: Action) -> bool:
    return action.kind.value in ("UNSHARD", "RESHARD")


def disorder(rng: random.Random, rows: list[list[Action]]) -> None:
    """Move one action of a rank by a few places, or, rarely, drop it."""
    row = rng.choice([row for row in rows if row] or [[]])
    if not row:
        return
    position = rng.randrange(len(row))
    action = row.pop(position)
    if rng.random() < 0.95:
        row.insert(max(0, position + rng.choice((-3, -2, -1, 1, 2, 3))), action)


def delay_messages(rng: random.Random, rows: list[list[Action]]) -> None:
    """Send later or receive earlier: right within the rank, and often wrong between ranks."""
    row = rng.choice(rows)
    places = [i for i, action in enumerate(row) if is_communication(action)]
    if places:
        position = rng.choice(places)
        action = row.pop(position)
        is_send = action.kind.value.startswith("SEND")
        distance = rng.randint(1, 6)
        row.insert(position + distance if is_send else max(0, position - distance), action)


@pytest.mark.parametrize("block", range(5))
def test_the_proof_agrees_with_a_search_of_every_order_of_events(block: int) -> None:
    rng = random.Random(f"deadlocks {block}")
    outcomes: Counter[tuple[str, str, bool]] = Counter()
    for _ in range(100):
        program = make_small_program(rng)
        for sends, channel in MODELS:
            found = find_deadlock(program, sends=sends, channel=channel)
            outcome = search(program, sends, channel)
            # One order of events finishes exactly when all do: the reason why one run is a proof.
            assert outcome.can_finish != outcome.can_get_stuck
            assert outcome.can_finish == (found is None), (
                f"{sends}, {channel}, {found}\n{program.topology}\n{program}"
            )
            outcomes[sends, channel, outcome.can_finish] += 1
    # The programs are worth something only if under each model some run and some hang.
    for sends, channel in MODELS:
        assert outcomes[sends, channel, True] > 4
        assert outcomes[sends, channel, False] > 4


def test_a_weaker_model_never_hangs_where_a_stronger_one_runs() -> None:
    rng = random.Random("strength")
    differing = 0
    for _ in range(200):
        program = make_small_program(rng)
        runs = {
            (sends, channel): find_deadlock(program, sends=sends, channel=channel) is None
            for sends in SENDS
            for channel in CHANNELS
        }
        for sends in SENDS:
            assert runs[sends, "all"] <= runs[sends, "pair"] <= runs[sends, "edge"]
        for channel in CHANNELS:
            assert runs["blocking", channel] <= runs["rendezvous", channel]
            assert runs["rendezvous", channel] <= runs["buffered", channel]
        differing += len(set(runs.values())) > 1
    assert differing > 20
