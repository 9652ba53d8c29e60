from __future__ import annotations

import pytest

from pipeloom import CostFileError
from pipeloom.cost.units import parse_memory


@pytest.mark.parametrize(
    ("amount", "unit", "expected"),
    [
        ("40GiB", "GiB", 40),
        ("40 gib", "MiB", 40960),
        ("1.5KB", "B", 1500),
        ("1TB", "GB", 1000),
        ("12.5", "", 12.5),
        (7, "GiB", 7),
        (".5MiB", "KiB", 512),
        ("0", "", 0),
    ],
)
def test_amounts(amount: float | str, unit: str, expected: float) -> None:
    assert parse_memory(amount, unit) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("amount", "unit", "message"),
    [
        ("40GiB", "", "without a memory unit"),
        ("40GiB", "activations", "in 'activations'"),
        ("40GiBs", "GiB", "unknown unit"),
        ("lots", "GiB", "no amount"),
        ("-1GiB", "GiB", "no amount"),
        (-1, "GiB", "from 0 up"),
        (float("nan"), "", "from 0 up"),
        ("", "", "no amount"),
        ([1, 2], "", r"a number or a text, not \[1, 2\]"),
        (None, "", "a number or a text, not None"),
        (True, "", "a number or a text, not True"),
    ],
)
def test_what_is_no_amount(amount: float | str, unit: str, message: str) -> None:
    with pytest.raises(CostFileError, match=message):
        parse_memory(amount, unit)
