"""Where torch builds a schedule, ours is the same, action by action."""

from __future__ import annotations

import csv
import random
import re
from pathlib import Path

import pytest

from pipeloom.errors import ScheduleError
from pipeloom.schedules.registry import build_schedule
from tests.unit.schedules.torch_peer import TORCH_CLASSES, V_SHAPED, build_torch_order

ORDERS = sorted((Path(__file__).parents[2] / "data" / "reference" / "orders").glob("*.csv"))


@pytest.mark.parametrize("path", ORDERS, ids=lambda path: path.stem)
def test_golden_orders_of_torch(path: Path) -> None:
    match = re.fullmatch(r"(\w+)_r(\d+)_m(\d+)_v(\d+)", path.stem)
    assert match
    name, ranks, microbatches, chunks = match.groups()
    schedule = build_schedule(
        name, ranks=int(ranks), microbatches=int(microbatches), chunks=int(chunks)
    )
    with path.open(newline="") as file:
        golden = [[cell for cell in row if cell] for row in csv.reader(file)]
    assert [[str(action) for action in row] for row in schedule.actions] == golden


def test_there_are_golden_orders() -> None:
    assert len(ORDERS) == 11


def find_difference(name: str, ranks: int, microbatches: int, chunks: int) -> str | None:
    """What differs from torch for one shape, also in what is refused."""
    torch_order = build_torch_order(name, ranks=ranks, microbatches=microbatches, chunks=chunks)
    try:
        schedule = build_schedule(name, ranks=ranks, microbatches=microbatches, chunks=chunks)
    except ScheduleError as error:
        return None if torch_order is None else f"we refuse: {error}"
    if torch_order is None:
        return "torch refuses"
    for rank, row in enumerate(torch_order):
        if [str(action) for action in schedule.actions[rank]] != row:
            return f"rank {rank} differs"
    return None


def draw_shape(rng: random.Random, *, most_ranks: int, most_microbatches: int) -> tuple[int, ...]:
    ranks = rng.randint(2, most_ranks)
    chunks = rng.randint(1, 8)
    # Half of the time a multiple of the ranks, which every family takes.
    if rng.random() < 0.5:
        return ranks, ranks * rng.randint(1, max(1, most_microbatches // ranks)), chunks
    return ranks, rng.randint(1, most_microbatches), chunks


@pytest.mark.parametrize("name", TORCH_CLASSES)
def test_orders_of_torch_on_random_shapes(name: str) -> None:
    pytest.importorskip("torch")
    rng = random.Random(20)
    compared = 0
    while compared < 12:
        ranks, microbatches, chunks = draw_shape(rng, most_ranks=12, most_microbatches=60)
        if name in V_SHAPED:
            chunks = 2
        shape = (ranks, microbatches, chunks)
        assert find_difference(name, *shape) is None, shape
        compared += 1
