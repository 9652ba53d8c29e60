"""The four irregular schedules are the same as text and as Python."""

from __future__ import annotations

import pytest

from pipeloom.ir.notation import parse_csv
from pipeloom.ir.schedule import make_schedule
from tests.support.zoo import TEXTS, ZOO


@pytest.mark.parametrize("name", ZOO)
def test_text_and_python_agree(name: str) -> None:
    schedule = ZOO[name]()
    assert make_schedule(parse_csv(TEXTS[name])) == schedule
    assert schedule.num_ranks == 2
    assert schedule.num_microbatches == 2
    assert schedule.has_communication == ("COMMUNICATION" in name)


def test_placements_are_irregular() -> None:
    assert ZOO["V_SHAPED"]().placement.ranks == (0, 1, 1, 0)
    assert ZOO["UNBALANCED"]().placement.ranks == (0, 0, 1, 1, 0)
    assert ZOO["SEPARATE_WEIGHTS"]().placement.ranks == (0, 1, 0, 1)
