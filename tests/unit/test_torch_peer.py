"""The peer the benchmarks measure against builds what torch really builds."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from benchmarks._torch_peer import build_torch_schedule

pytest.importorskip("torch")

ORDERS = sorted((Path(__file__).parents[1] / "data" / "reference" / "orders").glob("*.csv"))


@pytest.mark.parametrize("path", ORDERS, ids=lambda path: path.stem)
def test_the_order_is_the_one_on_record(path: Path) -> None:
    shape = re.fullmatch(r"(\w+)_r(\d+)_m(\d+)_v(\d+)", path.stem)
    assert shape is not None
    built = build_torch_schedule(
        f"Schedule{shape[1]}",
        num_ranks=int(shape[2]),
        num_microbatches=int(shape[3]),
        chunks=int(shape[4]),
    )
    with path.open(newline="") as file:
        recorded = [[cell for cell in row if cell] for row in csv.reader(file)]
    order = [
        [str(action) for action in built.pipeline_order[rank] if action is not None]
        for rank in range(len(recorded))
    ]
    assert len(built.pipeline_order) == len(recorded)
    assert order == recorded
