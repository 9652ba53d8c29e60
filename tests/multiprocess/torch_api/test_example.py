"""The example in torchtitan's style gives the same losses with either package."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.multiprocess.torch_api.programs import OURS, TORCH
from tests.support.process_pool import ProcessPool

pytestmark = pytest.mark.multiprocess

EXAMPLE = Path(__file__).parents[3] / "examples" / "torchtitan_style.py"


def train(package: str, schedule: str) -> list[float]:
    spec = importlib.util.spec_from_file_location("torchtitan_style", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    losses: list[float] = example.train(package, schedule)
    return losses


def require_equal(some: list[list[float]], others: list[list[float]]) -> None:
    assert sum(map(len, some)) == sum(map(len, others)) == 2 * 4
    known = [[losses for losses in each if losses] for each in (some, others)]
    for mine, expected in zip(*known, strict=True):
        assert mine == pytest.approx(expected, rel=1e-4)
        assert sorted(mine, reverse=True) == mine, "the losses fall"


def test_either_package_gives_the_same_losses(four_ranks: ProcessPool) -> None:
    theirs = four_ranks.run(train, TORCH, "Interleaved1F1B", timeout=100)
    ours = four_ranks.run(train, OURS, "Interleaved1F1B", timeout=100)
    require_equal(ours, theirs)


def test_a_v_gives_the_same_losses_where_torch_stalls_on_gloo(four_ranks: ProcessPool) -> None:
    looped = four_ranks.run(train, OURS, "Interleaved1F1B", timeout=100)
    for name in ("ZBVZeroBubble", "DualPipeV"):
        require_equal(four_ranks.run(train, OURS, name, timeout=100), looped)
