"""Receives move, and nothing deadlocks that did not."""

from __future__ import annotations

import random
from importlib import import_module
from itertools import product
from typing import Any

import pytest

from pipeloom.errors import ScheduleError
from pipeloom.ir.dependencies import Role
from pipeloom.ir.notation import parse_action, parse_grid
from pipeloom.ir.occupancy import walk_occupancy
from pipeloom.ir.questions import is_compute, role_of
from pipeloom.ir.schedule import Schedule
from pipeloom.passes.insert_communication import insert_communication
from pipeloom.passes.place_receives import place_receives
from pipeloom.passes.strip_communication import strip_communication
from pipeloom.schedules.registry import build_schedule
from pipeloom.verify.deadlock import find_deadlock
from pipeloom.verify.verifier import verify
from unit.passes.blocking_run import edges_of, find_stuck

MODELS = list(product(("buffered", "rendezvous", "blocking"), ("all", "pair", "edge")))


def lowered(name: str, ranks: int = 4, microbatches: int = 8) -> Schedule:
    return insert_communication(build_schedule(name, ranks=ranks, microbatches=microbatches))


def distance_to_use(schedule: Schedule) -> list[int]:
    """For every receive, how many computations stand between it and the one that uses it."""
    distances = []
    table = schedule.dependencies
    for row in schedule.actions:
        for position, action in enumerate(row):
            if role_of(action) is not Role.RECEIVE:
                continue
            (received,) = table.produces(action)
            count = 0
            for later in row[position + 1 :]:
                if is_compute(later) and received in table.needs(later):
                    break
                count += is_compute(later)
            distances.append(count)
    return distances


def receives_by_edge(schedule: Schedule) -> dict[tuple[int, int], list[str]]:
    table = schedule.dependencies
    edges: dict[tuple[int, int], list[str]] = {}
    for row in schedule.actions:
        for action in row:
            if role_of(action) is Role.RECEIVE:
                edge = table.ranks_of_message(table.message_of(action))
                edges.setdefault(edge, []).append(str(action))
    return edges


def test_late_is_right_before_the_use() -> None:
    program = lowered("1f1b")
    assert max(distance_to_use(program)) > 0
    late = place_receives(program, "late")
    assert set(distance_to_use(late)) == {0}
    verify(late).raise_for_errors()


@pytest.mark.parametrize("lookahead", [0, 1, 2, 3])
def test_early_is_as_early_as_asked(lookahead: int) -> None:
    late = place_receives(lowered("1f1b"), "late")
    early = place_receives(late, "early", lookahead=lookahead)
    assert max(distance_to_use(early)) == lookahead
    verify(early).raise_for_errors()
    table = early.dependencies
    for row in early.actions:
        computations = [action for action in row if is_compute(action)]
        for position, action in enumerate(row):
            if role_of(action) is Role.RECEIVE:
                (received,) = table.produces(action)
                index = next(i for i, a in enumerate(computations) if received in table.needs(a))
                before = sum(map(is_compute, row[:position]))
                assert before == max(0, index - lookahead)


def test_early_never_makes_a_receive_later() -> None:
    program = lowered("interleaved_1f1b")
    early = place_receives(program, "early", lookahead=1)
    assert all(
        e >= p for e, p in zip(distance_by_name(early), distance_by_name(program), strict=True)
    )


def distance_by_name(schedule: Schedule) -> list[int]:
    table = schedule.dependencies
    found = {}
    for row in schedule.actions:
        for position, action in enumerate(row):
            if role_of(action) is Role.RECEIVE:
                (received,) = table.produces(action)
                user = next(i for i, a in enumerate(row) if received in table.needs(a))
                found[str(action)] = sum(map(is_compute, row[position:user]))
    return [found[name] for name in sorted(found)]


@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "zbv"])
def test_memory_of_early_receives_does_not_grow_with_microbatches(name: str) -> None:
    def peak(microbatches: int) -> float:
        program = place_receives(lowered(name, microbatches=microbatches), "early", lookahead=2)
        return max(
            walk_occupancy(
                program.dependencies, row, lambda product: float("received" in product[0])
            ).peak
            for row in program.actions
        )

    assert peak(16) == peak(48)


@pytest.mark.parametrize(("sends", "channel"), MODELS)
@pytest.mark.parametrize("when", ["early", "late"])
@pytest.mark.parametrize("name", ["1f1b", "zbv", "dualpipev", "chimera"])
def test_what_verified_still_does(name: str, when: Any, sends: Any, channel: Any) -> None:
    program = lowered(name)
    moved = place_receives(program, when, lookahead=3, sends=sends, channel=channel)
    verify(moved, sends=sends, channel=channel).raise_for_errors()
    assert strip_communication(moved) == strip_communication(program)
    assert receives_by_edge(moved) == receives_by_edge(program)
    if sends == "blocking":
        rows = [map(str, row) for row in moved.actions]
        assert find_stuck(rows, edges_of(moved.topology)) == []


@pytest.mark.parametrize("when", ["early", "late"])
@pytest.mark.parametrize("seed", range(25))
def test_random_programs_still_verify(seed: int, when: Any) -> None:
    """Random orders of computations on random placements, and every model."""
    program = random_program(random.Random(seed))
    for sends, channel in MODELS:
        for before in (program, place_receives(program, "early", lookahead=2)):
            if verify(before, sends=sends, channel=channel).ok:  # type: ignore[arg-type]
                moved = place_receives(
                    before,
                    when,
                    lookahead=seed % 4,
                    sends=sends,  # type: ignore[arg-type]
                    channel=channel,  # type: ignore[arg-type]
                )
                report = verify(moved, sends=sends, channel=channel)  # type: ignore[arg-type]
                assert report.ok, report


def random_program(rng: random.Random) -> Schedule:
    """Computations of 2 to 4 stages in any order that can run, dealt to 2 or 3 ranks."""
    num_stages, num_microbatches = rng.randint(2, 4), rng.randint(1, 4)
    rank_of = [*range(2), *(rng.randrange(3) for _ in range(num_stages))][:num_stages]
    rows: dict[int, list[str]] = {rank: [] for rank in sorted(set(rank_of))}
    done: set[str] = set()
    todo = {f"{s}{k}{m}" for s in range(num_stages) for k in "FB" for m in range(num_microbatches)}
    while todo:
        ready = []
        for text in sorted(todo):
            stage, kind, microbatch = int(text[0]), text[1], text[2]
            needs = {f"{stage - 1}F{microbatch}"} if stage else set()
            if kind == "B":
                needs = {f"{stage}F{microbatch}"}
                needs |= {f"{stage + 1}B{microbatch}"} if stage + 1 < num_stages else set()
            if needs <= done:
                ready.append(text)
        chosen = rng.choice(ready)
        todo.remove(chosen)
        done.add(chosen)
        rows[rank_of[int(chosen[0])]].append(chosen)
    return insert_communication(parse_grid("\n".join(" ".join(row) for row in rows.values())))


# Rank 0 must take 0RECV_B0 before it sends 0SEND_F1, since rank 1 does its part in that order.
CROSSING = """
rank 0  0F0 0SEND_F0 0F1 0RECV_B0 0SEND_F1 0B0 0RECV_B1 0B1
rank 1  1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1
"""


def test_a_deferral_that_would_deadlock_is_not_made() -> None:
    program = parse_grid(CROSSING)
    verify(program, sends="rendezvous", channel="all").raise_for_errors()
    fully_late = place_receives(program, "late")
    assert "0SEND_F1 0RECV_B0 0B0" in " ".join(map(str, fully_late.actions[0]))
    assert verify(fully_late, sends="rendezvous", channel="edge").ok
    assert not verify(fully_late, sends="rendezvous", channel="all").ok
    assert not verify(fully_late, sends="rendezvous", channel="pair").ok
    for channel in ("all", "pair"):
        careful = place_receives(program, "late", sends="rendezvous", channel=channel)  # type: ignore[arg-type]
        assert careful.actions[0] == program.actions[0]
        verify(careful, sends="rendezvous", channel=channel).raise_for_errors()  # type: ignore[arg-type]


@pytest.mark.parametrize(("allowed", "most"), [(10**9, 13), (1000, 3), (0, 1)])
def test_the_proofs_of_large_programs_are_counted(
    allowed: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proof a rank would make the time of programs with many ranks quadratic."""
    program = lowered("1f1b", ranks=12, microbatches=6)
    num_actions = sum(map(len, program.actions))
    assert 2 * num_actions < 1000 < 3 * num_actions
    proofs = 0

    def count_proofs(*args: Any, **kwargs: Any) -> Any:
        nonlocal proofs
        proofs += 1
        return find_deadlock(*args, **kwargs)

    module = import_module("pipeloom.passes.place_receives")
    monkeypatch.setattr(module, "find_deadlock", count_proofs)
    monkeypatch.setattr(module, "MOST_ACTIONS_PROVED", allowed)
    placed = place_receives(program, "late", sends="rendezvous", channel="all")
    assert 1 <= proofs <= most
    verify(placed, sends="rendezvous", channel="all").raise_for_errors()


def test_receives_of_one_edge_keep_their_order_where_uses_do_not() -> None:
    program = parse_grid(
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B1 0B1 0RECV_B0 0B0\n"
        "1RECV_F0 1RECV_F1 1F1 1B1 1SEND_B1 1F0 1B0 1SEND_B0"
    )
    late = place_receives(program, "late")
    assert " ".join(map(str, late.actions[1])).startswith("1RECV_F0 1RECV_F1 1F1")
    verify(late).raise_for_errors()


def test_what_nobody_uses_stays() -> None:
    program = parse_grid("0F0 0SEND_F0 0F1 0SEND_F1\n1RECV_F0 1RECV_F1 1F0")
    late = place_receives(program, "late")
    assert list(map(str, late.actions[1])) == ["1RECV_F0", "1RECV_F1", "1F0"]


@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b"])
def test_at_least_as_late_as_torch_defers(name: str) -> None:
    """torch also lets some sends flush receives that are not due yet. (It does not keep the order
    of one edge where outputs and gradients share it, so a V is not compared.)"""
    pipelining = pytest.importorskip("torch.distributed.pipelining.schedules")
    program = lowered(name)
    theirs = pipelining._defer_recv_ops(
        {
            rank: [pipelining._Action.from_str(str(action)) for action in row]
            for rank, row in enumerate(program.actions)
        },
        stage_to_rank=program.placement.rank_of,
    )
    ours = place_receives(program, "late")
    for rank, row in enumerate(ours.actions):
        their_row = [parse_action(str(action)) for action in theirs[rank]]
        assert sorted(map(str, their_row)) == sorted(map(str, row))
        for action in row:
            if role_of(action) is Role.RECEIVE:
                before = sum(map(is_compute, row[: row.index(action)]))
                assert before >= sum(map(is_compute, their_row[: their_row.index(action)]))


def test_nothing_to_place() -> None:
    with pytest.raises(ScheduleError, match="run insert_communication before"):
        place_receives(parse_grid("0F0\n1F0"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"when": "soon"}, "'early' or 'late', not 'soon'"),
        ({"lookahead": -1}, "not -1"),
        ({"sends": "eager"}, "buffered, rendezvous, blocking"),
        ({"channel": "one"}, "all, pair, edge"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        place_receives(lowered("1f1b", 2, 2), **options)
