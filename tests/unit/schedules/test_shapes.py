"""Every schedule on many shapes: it verifies, and is the same each time it is built."""

from __future__ import annotations

import random

import pytest

from pipeloom import UniformCosts, simulate
from pipeloom.errors import CostFileError, ScheduleError
from pipeloom.schedules.fill_drain import forward_only_like
from pipeloom.schedules.interleaved import interleaved_1f1b
from pipeloom.schedules.registry import build_schedule, list_schedules
from pipeloom.verify.verifier import verify
from tests.support.tiny_simulator import TinyCosts, simulate_tiny
from tests.support.zoo import ZOO

NAMES = [entry.name for entry in list_schedules()]
SHAPES = [(1, 1), (1, 3), (2, 1), (2, 5), (3, 7), (4, 8), (4, 9), (4, 10), (5, 3), (6, 12), (6, 13)]


@pytest.mark.parametrize("entry", list_schedules(), ids=lambda entry: entry.name)
def test_every_legal_shape_verifies(entry: object) -> None:
    num_built = 0
    for ranks, microbatches in SHAPES:
        for chunks in (1, 2, 3, 4):
            try:
                schedule = build_schedule(
                    entry.name,  # type: ignore[attr-defined]
                    ranks=ranks,
                    microbatches=microbatches,
                    chunks=chunks,
                )
            except ScheduleError:
                continue
            num_built += 1
            verify(schedule).raise_for_errors()
            assert schedule.name == entry.name  # type: ignore[attr-defined]
            assert schedule.num_ranks == ranks
            assert schedule.num_microbatches == microbatches
    assert num_built >= 3


@pytest.mark.parametrize("name", NAMES)
def test_built_twice_is_equal(name: str) -> None:
    one, other = (build_schedule(name, ranks=4, microbatches=8) for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)


@pytest.mark.parametrize("group_size", [4, 5, 6, 7, 9, 13])
def test_ragged_groups_verify(group_size: int) -> None:
    for microbatches in (9, 10, 13):
        for chunks in (1, 2, 3):
            verify(
                interleaved_1f1b(
                    ranks=4, microbatches=microbatches, chunks=chunks, group_size=group_size
                )
            ).raise_for_errors()


@pytest.mark.parametrize("name", NAMES)
def test_forward_only_like_keeps_the_placement(name: str) -> None:
    schedule = build_schedule(name, ranks=4, microbatches=8)
    for microbatches in (1, 2, 3, 8, 17):
        forward = forward_only_like(schedule, microbatches)
        verify(forward).raise_for_errors()
        assert (forward.placement, forward.topology) == (schedule.placement, schedule.topology)
        assert forward.num_microbatches == microbatches
        assert not forward.has_backward
    assert forward_only_like(schedule).num_microbatches == 8
    with pytest.raises(ScheduleError, match="1 or more, not 0"):
        forward_only_like(schedule, 0)


@pytest.mark.parametrize("name", ZOO)
def test_forward_only_like_of_the_zoo(name: str) -> None:
    verify(forward_only_like(ZOO[name](), 3)).raise_for_errors()


@pytest.mark.parametrize("name", ["v_half", "v_min", "zb_auto"])
def test_made_to_measure_for_random_costs(name: str) -> None:
    """Whatever the costs: valid, within the limit, and no longer than what the default takes."""
    rng = random.Random(name)
    for _ in range(12):
        ranks, microbatches = rng.randint(2, 6), rng.randint(1, 14)
        given = {
            "forward": rng.uniform(1, 3),
            "input": rng.uniform(1, 3),
            "weight": rng.uniform(0, 3),
            "latency": rng.choice((0, 0.3, 2)),
            "retained": rng.choice((0.0, 0.5, 1.0)),
        }
        limit = rng.choice((ranks, ranks + 0.5, 2 * ranks))
        shape = {"ranks": ranks, "microbatches": microbatches, "memory_limit": limit}
        schedule = build_schedule(name, **shape, costs=given)
        verify(schedule).raise_for_errors()
        share = given.pop("retained")
        result = simulate_tiny(schedule, TinyCosts(**given), retained=share)
        assert result.peak <= limit + 1e-6
        plain = build_schedule(name, ranks=ranks, microbatches=microbatches)
        if simulate_tiny(plain, retained=share).peak <= limit:
            assert result.makespan <= simulate_tiny(plain, TinyCosts(**given)).makespan + 1e-6


def test_made_to_measure_for_costs_per_stage() -> None:
    given = {"forward": [1, 1, 1, 2], "input": [1, 1, 1, 2], "weight": [1, 1, 1, 2]}
    schedule = build_schedule("zb_auto", ranks=4, microbatches=12, costs=given, memory_limit=8)
    verify(schedule).raise_for_errors()
    costs = TinyCosts(extra_last=1)
    # The last rank is the slowest and never waits once it has begun.
    assert simulate_tiny(schedule, costs).makespan == 3 + 12 * 6


def test_limits_in_bytes() -> None:
    costs = UniformCosts(forward=1, input=1, weight=1, activation=2, weights=5, memory_unit="GiB")
    by_text, by_number = (
        build_schedule("zb_auto", ranks=4, microbatches=9, costs=costs, memory_limit=limit)
        for limit in ("13 GiB", 13)
    )
    assert by_text == by_number
    # Of 13 GiB the weights take 5; what is left holds 4 activations.
    assert simulate_tiny(by_text).peak == 4
    with pytest.raises(CostFileError, match="cannot be compared"):
        build_schedule("v_half", ranks=4, microbatches=9, memory_limit="13GiB")


def test_limits_and_costs_that_cannot_be() -> None:
    with pytest.raises(ScheduleError, match=r"memory_limit of 0\.5: rank 0 needs 1, rank 1 needs"):
        build_schedule("zb_auto", ranks=2, microbatches=2, memory_limit=0.5)
    with pytest.raises(ScheduleError, match=r"v_min cannot run with a memory_limit of 1"):
        build_schedule("v_min", ranks=8, microbatches=8, memory_limit=1)
    with pytest.raises(CostFileError, match="forward must be a number"):
        build_schedule(
            "zb_auto", ranks=2, microbatches=2, costs={"forward": -1, "input": 1, "weight": 1}
        )
    with pytest.raises(CostFileError, match="'colour'"):
        build_schedule(
            "zb_auto",
            ranks=2,
            microbatches=2,
            costs={"forward": 1, "input": 1, "weight": 1, "colour": 1},
        )


def test_a_large_shape_has_every_pass_once() -> None:
    schedule = build_schedule("interleaved_1f1b", ranks=64, microbatches=512, chunks=4)
    actions = set(schedule.all_actions())
    assert len(actions) == sum(map(len, schedule.actions)) == 2 * 64 * 512 * 4


@pytest.mark.parametrize("name", NAMES)
def test_the_simulator_says_the_same(name: str) -> None:
    given = {"forward": 1.5, "input": 1.25, "weight": 0.75, "latency": 0.1}
    for ranks, microbatches in ((2, 4), (4, 12), (6, 12)):
        schedule = build_schedule(name, ranks=ranks, microbatches=microbatches)
        timeline = simulate(schedule, costs=UniformCosts(**given, retained=0.5))
        result = simulate_tiny(schedule, TinyCosts(**given), retained=0.5)
        assert timeline.makespan == pytest.approx(result.makespan)
        assert timeline.span == pytest.approx(result.span)
        if schedule.has_backward:
            assert timeline.peak_memory == pytest.approx(result.peaks)
