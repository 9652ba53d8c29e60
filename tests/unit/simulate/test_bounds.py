"""No order beats a lower bound: checked against all orders of small shapes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest

from pipeloom import UniformCosts, VerificationError, build_schedule, list_schedules, simulate
from pipeloom.ir.action import Action, Kind
from pipeloom.ir.schedule import Schedule, make_schedule
from pipeloom.simulate import find_lower_bounds


def rows_of(stage: int, microbatches: int, split: bool) -> Iterator[tuple[Action, ...]]:
    """Every order of one rank's actions that its own dependencies allow, microbatches in turn."""
    kinds = (Kind.F, Kind.I, Kind.W) if split else (Kind.F, Kind.B)
    slots = [kind for kind in kinds for _ in range(microbatches)]
    for order in set(itertools.permutations(slots)):
        seen = dict.fromkeys(kinds, 0)
        row = []
        for kind in order:
            row.append(Action(kind, stage, seen[kind]))
            seen[kind] += 1
            if any(seen[b] > seen[a] for a, b in itertools.pairwise(kinds)):
                break
        else:
            yield tuple(row)


def fastest(schedules: Iterator[Schedule], costs: UniformCosts, limit: float | None) -> float:
    best = float("inf")
    for schedule in schedules:
        try:
            timeline = simulate(schedule, costs)
        except VerificationError:
            continue
        if limit is None or max(timeline.peak_memory) <= limit:
            best = min(best, timeline.makespan)
    return best


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("limit", [None, 1, 2])
@pytest.mark.parametrize("split", [False, True])
def test_against_all_orders_of_two_ranks(seed: int, limit: float | None, split: bool) -> None:
    rng = random.Random(seed)
    microbatches = 2 if split else 3
    costs = UniformCosts(
        *(rng.randint(1, 5), rng.randint(1, 5), rng.randint(1, 5)), latency=rng.choice([0, 1])
    )
    rows = [list(rows_of(stage, microbatches, split)) for stage in (0, 1)]
    orders = (make_schedule(pair) for pair in itertools.product(*rows))
    best = fastest(orders, costs, limit)
    any_order = build_schedule("1f1b", ranks=2, microbatches=microbatches)
    bounds = find_lower_bounds(costs.bind(any_order), limit)
    assert max(bounds.values()) <= best


@pytest.mark.parametrize("limit", [None, 4, 8])
def test_no_schedule_of_the_library_beats_its_bound(limit: float | None) -> None:
    rng = random.Random(0)
    for entry in list_schedules():
        costs = UniformCosts(*(rng.uniform(0.5, 2) for _ in range(3)), latency=rng.uniform(0, 0.2))
        timeline = simulate(
            build_schedule(entry.name, ranks=4, microbatches=8), costs, memory=limit
        )
        assert timeline.figures is not None
        assert timeline.figures.distance_to_bound >= -1e-9, entry.name


def test_bounds_that_are_attained() -> None:
    unit = UniformCosts(1, 1, 1)
    for name, memory in (("zbv", 4), ("zb_h1", 4), ("zb_h2", 7)):
        timeline = simulate(build_schedule(name, ranks=4, microbatches=8), unit, memory=memory)
        assert timeline.figures is not None
        if name != "zb_h1":
            assert timeline.figures.distance_to_bound == 0, name
    one_by_one = simulate(build_schedule("1f1b", ranks=4, microbatches=1), unit)
    assert one_by_one.figures.bounds["chain"] == 4 + 4 + 1
    assert one_by_one.figures.bounds["compute"] == 3


def test_a_limit_that_is_not_kept_does_not_bound() -> None:
    schedule = build_schedule("gpipe", ranks=4, microbatches=8)
    free = simulate(schedule, UniformCosts(1, 1, 1))
    tight = simulate(schedule, UniformCosts(1, 1, 1), memory=1)
    assert tight.figures.bounds == free.figures.bounds
