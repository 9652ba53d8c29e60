"""The picture in the terminal."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pipeloom
from pipeloom.view.text import can_encode, draw_coloured, draw_text
from support.golden import check_golden
from support.hand_made_timelines import make_small_timeline

COSTS = pipeloom.UniformCosts(forward=1, input=1, weight=1, latency=0.1)


def simulate(name: str, ranks: int, microbatches: int, *, lower: bool = False) -> pipeloom.Timeline:
    schedule = pipeloom.build_schedule(name, ranks=ranks, microbatches=microbatches)
    return pipeloom.simulate(pipeloom.lower(schedule) if lower else schedule, costs=COSTS)


def test_a_small_timeline_to_the_character() -> None:
    """Three columns to a unit of time: two characters of name and an edge."""
    lines = draw_text(make_small_timeline(), width=60).splitlines()
    assert lines[3] == "rank 0 │F0│F1░░░░░░│B0   ░░░│B1     33% idle  peak 2"
    assert lines[4] == "rank 1 ···│F0│B0   │F1│B1   ______  33% idle  peak 1"
    ascii_lines = draw_text(make_small_timeline(), width=60, unicode=False).splitlines()
    assert ascii_lines[3] == "rank 0 |F0|F1------|B0   ---|B1     33% idle  peak 2"


@pytest.mark.parametrize("unicode", [True, False], ids=["unicode", "ascii"])
@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "width"),
    [
        ("1f1b", 4, 8, 120),
        ("1f1b", 4, 8, 70),
        ("zbv", 4, 8, 100),
        ("dualpipev", 4, 8, 110),
        ("interleaved_1f1b", 8, 64, 100),
        ("gpipe", 160, 16, 90),
    ],
)
def test_golden(name: str, ranks: int, microbatches: int, width: int, unicode: bool) -> None:
    text = draw_text(simulate(name, ranks, microbatches), width=width, unicode=unicode)
    file = f"{name}_r{ranks}_m{microbatches}_w{width}_{'unicode' if unicode else 'ascii'}.txt"
    check_golden(f"view/{file}", text)


def test_golden_with_messages() -> None:
    text = draw_text(simulate("1f1b", 3, 4, lower=True), width=100, communication=True)
    check_golden("view/1f1b_r3_m4_messages.txt", text)


def test_two_timelines_have_one_scale() -> None:
    quick, slow = make_small_timeline(), make_small_timeline(name="slow", scale=2.0)
    text = draw_text([quick, slow], width=100)
    rows = [line for line in text.splitlines() if line.startswith("rank 0")]
    assert len(rows) == 2
    box = re.compile(r"│B0 *")
    lengths = [len(match[0]) for row in rows if (match := box.search(row))]
    assert lengths[1] == 2 * lengths[0]


def test_every_action_is_named_where_names_fit() -> None:
    schedule = pipeloom.build_schedule("zbv", ranks=4, microbatches=8)
    timeline = pipeloom.simulate(schedule)
    text = draw_text(timeline, width=100)
    assert "part 1 of" in text
    for rank, row in enumerate(timeline.schedule.actions):
        drawn = "".join(line for line in text.splitlines() if line.startswith(f"rank {rank} "))
        assert re.findall(r"\d+[FIW]\d+", drawn) == [str(action) for action in row]


@settings(max_examples=40)
@given(
    name=st.sampled_from(["gpipe", "1f1b", "zb_h1", "zbv", "interleaved_1f1b", "dualpipev"]),
    ranks=st.integers(1, 6),
    factor=st.integers(2, 5),
    width=st.integers(40, 200),
    unicode=st.booleans(),
    communication=st.booleans(),
)
def test_no_line_is_too_long_and_ascii_is_ascii(
    name: str, ranks: int, factor: int, width: int, unicode: bool, communication: bool
) -> None:
    timeline = simulate(name, ranks, ranks * factor)
    text = draw_text(timeline, width=width, unicode=unicode, communication=communication)
    for line in text.splitlines():
        assert len(line) <= width, line
        assert unicode or line.isascii()
    assert "makespan" in text
    assert "  key" in text


def test_a_density_view_shows_the_shape_of_the_pipeline() -> None:
    """200 microbatches in 60 columns: no names, but the shape of the pipeline."""
    text = draw_text(simulate("gpipe", 2, 200), width=60, unicode=False)
    assert "density view" in text
    row = next(line for line in text.splitlines() if line.startswith("rank 0"))
    drawn = row.removeprefix("rank 0 ").split()[0]
    third = len(drawn) / 3
    assert set(drawn[: int(third) - 1]) == {"F"}
    assert set(drawn[int(third) + 2 :]) <= {"B", "-"}


def test_in_a_density_view_characters_stand_in_proportion_to_time() -> None:
    """In the steady state of 1f1b a third is F and two thirds are B."""
    schedule = pipeloom.build_schedule("1f1b", ranks=4, microbatches=400)
    text = draw_text(pipeloom.simulate(schedule), width=100, unicode=False)
    row = next(line for line in text.splitlines() if line.startswith("rank 3"))
    drawn = row.removeprefix("rank 3 ").split()[0].strip("._-")
    assert set(drawn) == {"F", "B"}
    assert drawn.count("F") / len(drawn) == pytest.approx(1 / 3, abs=0.03)
    assert "FFF" not in drawn
    assert "BBBB" not in drawn


def test_many_ranks_share_lines() -> None:
    text = draw_text(simulate("gpipe", 200, 4), width=80)
    rows = [line for line in text.splitlines() if line.startswith("rank ")]
    assert 32 <= len(rows) <= 64
    assert rows[0].startswith("rank 0-3 ")


def test_colours_change_no_character() -> None:
    timeline = simulate("1f1b", 4, 8)
    coloured = draw_coloured(timeline, width=100)
    plain = draw_text(timeline, width=100)
    assert [line.rstrip() for line in coloured.plain.splitlines()] == plain.splitlines()
    styles = {str(span.style) for span in coloured.spans}
    assert "#FFFFFF on #0072B2" in styles
    assert "#FFFFFF on #C85802" in styles


def test_names_with_markup_are_names() -> None:
    timeline = make_small_timeline(name="[red]x[/red]")
    assert "[red]x[/red]" in draw_coloured(timeline, width=100).plain


def test_a_text_file(tmp_path: Path) -> None:
    path = make_small_timeline().save(tmp_path / "small.txt", width=60)
    assert path.read_text(encoding="utf-8") == draw_text(make_small_timeline(), width=60)


def test_an_empty_timeline_says_so() -> None:
    empty = pipeloom.Timeline(pipeloom.make_schedule([[], []]), ())
    assert "nothing ran" in draw_text(empty)


def test_terminals_without_the_characters_are_known() -> None:
    assert can_encode("UTF-8")
    assert not can_encode("latin-1")
    assert not can_encode("no such encoding")
