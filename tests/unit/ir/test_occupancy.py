"""The walk of memory over an order, against sums made by hand and a slow recount."""

from __future__ import annotations

import random

import pytest

from pipeloom.ir.notation import parse_grid
from pipeloom.ir.occupancy import Occupancy, walk_occupancy
from pipeloom.ir.products import Product
from tests.support.random_programs import make_program

SIZES = {"activation": 1.0, "retained": 0.5, "received output": 0.25, "received gradient": 0.125}


def size_of(product: Product) -> float:
    return SIZES.get(product[0], 0.0)


def walk(row: str, *others: str) -> Occupancy:
    schedule = parse_grid("\n".join((row, *others)))
    return walk_occupancy(schedule.dependencies, schedule.actions[0], size_of)


def test_one_activation_a_microbatch() -> None:
    occupancy = walk("0F0 0F1 0F2 0B0 0B1 0B2")
    assert occupancy.during == (1, 2, 3, 3, 2, 1)
    assert occupancy.after == (1, 2, 3, 2, 1, 0)
    assert (occupancy.peak, occupancy.peak_position) == (3, 2)
    assert occupancy.alive_at_peak == tuple((("activation", 0, m, None), 1.0) for m in range(3))


def test_what_i_leaves_does_not_count_beside_what_it_replaces() -> None:
    occupancy = walk("0F0 0F1 0I0 0F2 0W0 0I1 0W1 0B2")
    assert occupancy.during == (1, 2, 2, 2.5, 2.5, 2, 1.5, 1)
    assert occupancy.after == (1, 2, 1.5, 2.5, 2, 1.5, 1, 0)
    assert (occupancy.peak, occupancy.peak_position) == (2.5, 3)
    assert dict(occupancy.alive_at_peak) == {
        ("activation", 0, 1, None): 1.0,
        ("activation", 0, 2, None): 1.0,
        ("retained", 0, 0, None): 0.5,
    }


def test_receive_buffers_live_until_their_computation_no_longer_needs_them() -> None:
    full = walk(
        "1RECV_F0 1F0 1RECV_B0 1B0", "0F0 0SEND_F0 0RECV_B0 0B0", "2RECV_F0 2F0 2B0 2SEND_B0"
    )
    assert full.during == (0.25, 1.25, 1.375, 1.375)
    assert full.after == (0.25, 1.25, 1.375, 0)
    split = walk(
        "1RECV_F0 1F0 1RECV_B0 1I0 1W0", "0F0 0SEND_F0 0RECV_B0 0B0", "2RECV_F0 2F0 2B0 2SEND_B0"
    )
    assert split.after == (0.25, 1.25, 1.375, 0.75, 0)


def test_forward_only_keeps_nothing() -> None:
    assert walk("0F0 0F1 0F2").during == (1, 1, 1)


def test_fused_actions_hold_what_both_parts_hold() -> None:
    occupancy = walk("0F0 (0F1;0B0)OVERLAP_F_B 0B1")
    assert occupancy.during == (1, 2, 1)


def test_no_actions() -> None:
    schedule = parse_grid("0F0")
    occupancy = walk_occupancy(schedule.dependencies, (), size_of)
    assert occupancy == Occupancy(0.0, None, (), (), ())


@pytest.mark.parametrize("seed", range(3))
def test_against_a_recount_at_every_action(seed: int) -> None:
    rng = random.Random(f"recount {seed}")
    for _ in range(40):
        program = make_program(rng, written=rng.random() < 0.5)
        table = program.dependencies
        for row in program.actions:
            occupancy = walk_occupancy(table, row, size_of)
            alive: set[Product] = set()
            sums = []
            for action in row:
                new = set(table.allocates(action))
                replaced = {product for product in new if product[0] == "retained"}
                sums.append(sum(map(size_of, alive | (new - replaced))))
                alive = (alive | new) - set(table.frees(action))
            assert occupancy.during == pytest.approx(sums)
            assert occupancy.peak == pytest.approx(max(sums, default=0))
            if program.has_backward:
                assert occupancy.after[-1:] in ((), (pytest.approx(0),))
            assert sum(size for _, size in occupancy.alive_at_peak) == pytest.approx(occupancy.peak)
