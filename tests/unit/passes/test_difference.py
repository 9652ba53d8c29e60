"""What came, went and moved."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from pipeloom.ir.notation import parse_grid
from pipeloom.passes.difference import compare_programs


def line(before: str, after: str) -> str:
    difference = compare_programs(parse_grid(before), parse_grid(after))
    return str(difference).partition("rank 0")[2].strip()


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("0F0 0B0", "0F0 0F1 0B0", "0F0  +0F1  0B0"),
        ("0F0 0F1 0B0", "0F0 0B0", "0F0  -0F1  0B0"),
        ("0F0 0F1 0F2", "0F1 0F2 0F0", "0F1  0F2  ~0F0"),
        ("0F0 0B0", "0F0 0I0 0W0", "0F0  -0B0  +0I0  +0W0"),
        ("0F0", "0B0", "-0F0  +0B0"),
        ("0F0 0F1", "0F0 0F1", ""),
        # Equal actions are told apart by their number.
        ("0UNSHARD 0F0 0RESHARD 0UNSHARD", "0UNSHARD 0F0", "0UNSHARD  0F0  -0RESHARD  -0UNSHARD"),
    ],
)
def test_marks(before: str, after: str, expected: str) -> None:
    assert line(before, after) == expected


def test_nothing_changed() -> None:
    schedule = parse_grid("0F0 0B0")
    difference = compare_programs(schedule, schedule, name="idle")
    assert difference.is_empty
    assert str(difference) == "idle: nothing changed"


def test_only_ranks_that_changed_are_shown() -> None:
    text = str(compare_programs(parse_grid("0F0\n1F0"), parse_grid("0F0\n1F0 1F1")))
    assert text == "change: +1 F\n  rank 1   1F0  +1F1"


@pytest.mark.parametrize("seed", range(30))
def test_the_parts_make_up_the_programs_and_as_little_as_possible_moved(seed: int) -> None:
    rng = random.Random(seed)
    everything = [f"0F{i}" for i in range(8)]
    old = rng.sample(everything, 6)
    new = rng.sample(everything, 6)
    difference = compare_programs(parse_grid(" ".join(old)), parse_grid(" ".join(new)))
    (row,) = difference.rows
    assert [str(cell.action) for cell in row if cell.mark != "-"] == new
    assert set(map(str, difference.added[0])) == set(new) - set(old)
    assert set(map(str, difference.removed[0])) == set(old) - set(new)
    unmoved = [str(cell.action) for cell in row if cell.mark in " -"]
    assert unmoved == [text for text in old if text in unmoved]
    common = [text for text in new if text in old]
    longest = max(
        size
        for size in range(len(common) + 1)
        for kept in combinations(common, size)
        if list(kept) == sorted(kept, key=old.index)
    )
    assert len(difference.moved[0]) == len(common) - longest


def test_long_rows_show_what_is_near_a_change() -> None:
    before = [f"0F{i}" for i in range(40)]
    after = [*before[:20], "0B0", *before[20:]]
    assert line(" ".join(before), " ".join(after)) == (
        "… 18 more …  0F18  0F19  +0B0  0F20  0F21  … 18 more"
    )


def test_the_print_is_capped_and_the_data_is_not() -> None:
    grid = " ".join(f"0F{i}" for i in range(100))
    difference = compare_programs(parse_grid("0F200"), parse_grid(grid))
    assert str(difference).endswith("… 61 more")
    assert len(difference.added[0]) == 100
    assert "0F99" in difference.format(max_cells=None)
