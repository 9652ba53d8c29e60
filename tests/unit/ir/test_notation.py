"""Text, grids and CSV: what is read, what is refused, and what it says then."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeloom.errors import ParseError
from pipeloom.ir.action import Action, Kind, fuse
from pipeloom.ir.notation import (
    format_csv,
    format_excerpt,
    format_grid,
    parse_action,
    parse_csv,
    parse_grid,
)
from pipeloom.ir.serialization import load_schedule
from pipeloom.verify.verifier import verify

REFERENCE = Path(__file__).parents[2] / "data" / "reference"
ORDERS_OF_TORCH = sorted((REFERENCE / "orders").glob("*.csv"))


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("2F0", Action(Kind.F, 2, 0)),
        ("12W34", Action(Kind.W, 12, 34)),
        ("1SEND_F0", Action(Kind.SEND_F, 1, 0)),
        ("1SEND_F0>3", Action(Kind.SEND_F, 1, 0, peer=3)),
        ("3RECV_F0<1", Action(Kind.RECV_F, 3, 0, peer=1)),
        ("1RECV_B0<3", Action(Kind.RECV_B, 1, 0, peer=3)),
        ("1UNSHARD", Action(Kind.UNSHARD, 1)),
        ("1RESHARD", Action(Kind.RESHARD, 1)),
        ("1REDUCE_GRAD", Action(Kind.REDUCE_GRAD, 1)),
        ("(0F4;3B1)OVERLAP_F_B", fuse(Action(Kind.F, 0, 4), Action(Kind.B, 3, 1))),
    ],
)
def test_actions(text: str, action: Action) -> None:
    assert parse_action(text) == action
    assert str(action) == text


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it is empty"),
        ("F0", "must begin with the number of a stage"),
        ("-1F0", "must begin with the number of a stage"),
        (" 2F0", "must begin with the number of a stage"),
        ("2F", "F needs a microbatch"),
        ("2", "no kind of action at character 2"),
        ("2X0", "no kind of action at character 2; known are F, B, I, W"),
        ("2f0", "no kind of action at character 2"),
        ("2F0x", "'x' after the action, at character 4"),
        ("0F0xyz", "'xyz' after the action, at character 4"),
        ("2F0 ", "' ' after the action"),
        ("2F0\n", "after the action"),
        ("2F-1", "'-1' after the action"),
        ("1UNSHARD3", "UNSHARD concerns a whole stage and has no microbatch"),
        ("1UNSHARDx", "'x' after the action"),
        ("2F0>3", "F has no peer stage"),
        ("1SEND_F0<3", "written with '>', not '<'"),
        ("3RECV_F0>1", "written with '<', not '>'"),
        ("1SEND_F0>", "'>' after the action"),
        ("1SEND_F>3", "SEND_F needs a microbatch"),
        ("1SEND_FF0", "after the action"),
        ("1234567F0", "the stage number is larger than 999999"),
        ("1F1234567", "the microbatch number is larger than 999999"),
        ("٢F0", "must begin with the number of a stage"),
        ("0OVERLAP_F_B", "is written with its parts"),
        ("(0F4;3B1)", "a fused action is written (0F4;3B1)OVERLAP_F_B"),
        ("(0F4;3B1)F", "'F' after the parts is no fused kind; it must be OVERLAP_F_B"),
        ("(0F4;3B1)OVERLAP_F_Bx", "a fused action is written"),
        ("(0F4)OVERLAP_F_B", "needs at least two parts"),
        ("(0F4;)OVERLAP_F_B", "its part '': it is empty"),
        ("(0F4;3Bx)OVERLAP_F_B", "its part '3Bx'"),
        ("(0F4;3SEND_B1)OVERLAP_F_B", "can only fuse computations, not 3SEND_B1"),
        ("((0F4;3B1)OVERLAP_F_B;0F1)OVERLAP_F_B", "a fused action is written"),
    ],
)
def test_what_is_no_action_says_where_and_why(text: str, why: str) -> None:
    with pytest.raises(ParseError) as caught:
        parse_action(text)
    assert repr(text) in str(caught.value)
    assert why in str(caught.value)


# ── CSV ──────────────────────────────────────────────────────────────────────────────────────────


def test_empty_cells_are_skipped() -> None:
    assert parse_csv("0F0,,0B0,\n,1F0,1B0,,\n\n") == parse_csv("0F0,0B0\r\n1F0,1B0")
    assert parse_csv("\ufeff 0F0 , 0B0\n") == [[parse_action("0F0"), parse_action("0B0")]]


def test_an_empty_row_between_others_is_a_rank() -> None:
    assert parse_csv("0F0\n,,\n2F0\n")[1] == []


def test_every_bad_cell_is_named_with_row_and_column() -> None:
    with pytest.raises(ParseError) as caught:
        parse_csv("0F0,0Fx,0B0\n1F0,,B0\n2F0xyz", source="my.csv")
    lines = str(caught.value).splitlines()
    assert lines[0] == "my.csv is not a schedule, 3 bad cells:"
    assert [line.split(": ")[0] for line in lines[1:]] == [
        "  row 1, column 2",
        "  row 2, column 3",
        "  row 3, column 1",
    ]


@pytest.mark.parametrize("text", ["", "\n\n", ",,,\n"])
def test_a_csv_without_actions(text: str) -> None:
    with pytest.raises(ParseError, match="not a single action"):
        parse_csv(text)


def test_what_is_no_csv() -> None:
    with pytest.raises(ParseError, match="not a CSV file"):
        parse_csv('"0F0\n')


def test_a_long_bad_cell_is_cut() -> None:
    with pytest.raises(ParseError) as caught:
        parse_csv("x" * 10_000)
    assert len(str(caught.value)) < 300


def test_peers_and_fused_actions_in_csv() -> None:
    rows = [[parse_action("1SEND_F0>3"), parse_action("(0F4;3B1)OVERLAP_F_B")]]
    assert parse_csv(format_csv(rows)) == rows


@pytest.mark.parametrize("path", ORDERS_OF_TORCH, ids=lambda path: path.stem)
def test_what_torch_writes_loads_verifies_and_is_written_alike(path: Path) -> None:
    schedule = load_schedule(path)
    assert verify(schedule).ok
    # Its empty cells are bubbles, which a schedule does not have; a row may end with one.
    cells = [[cell for cell in line.split(",") if cell] for line in path.read_text().splitlines()]
    assert [line.split(",") for line in format_csv(schedule.actions).splitlines()] == cells


def test_torch_reads_the_text_of_every_action() -> None:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    for path in ORDERS_OF_TORCH:
        for action in load_schedule(path).all_actions():
            theirs = schedules._Action.from_str(str(action))
            assert str(theirs) == str(action)
    for text in ("1SEND_F0", "2RECV_F0", "2SEND_B0", "1RECV_B0", "1UNSHARD", "1RESHARD"):
        assert str(schedules._Action.from_str(text)) == str(parse_action(text)) == text


# ── grids ────────────────────────────────────────────────────────────────────────────────────────

UNEVEN = parse_grid("0F0 0F10 0B0 \n\n 1F0 # a comment \n # another \n 2F0 2B0", name="uneven")


def test_ranks_as_rows() -> None:
    assert format_grid(UNEVEN) == (
        "# uneven · 3 ranks · 3 stages · 11 microbatches\n"
        "rank 0   0F0  0F10  0B0\n"
        "rank 1   1F0\n"
        "rank 2   2F0  2B0"
    )


def test_ranks_as_columns() -> None:
    assert format_grid(UNEVEN, ranks_as="columns") == (
        "# uneven · 3 ranks · 3 stages · 11 microbatches\n"
        " step   rank 0  rank 1  rank 2\n"
        "    0   0F0     1F0     2F0\n"
        "    1   0F10            2B0\n"
        "    2   0B0"
    )


def test_marked_actions_stay_aligned() -> None:
    assert format_grid(UNEVEN, marked=[(2, 0)]).splitlines()[1:] == [
        "rank 0   0F0         0F10  0B0",
        "rank 1   1F0",
        "rank 2   2F0 ← here  2B0",
    ]


def test_around_an_action() -> None:
    row = " ".join(f"0F{m}" for m in range(20))
    text = format_grid(parse_grid(row), around=(0, 10))
    assert text.splitlines()[1] == (
        "rank 0   …  0F6  0F7  0F8  0F9  0F10 ← here  0F11  0F12  0F13  0F14  …"
    )


def test_an_excerpt() -> None:
    row = " ".join(f"0F{m}" for m in range(20))
    schedule = parse_grid(f"{row} \n 1F0 1F1")
    assert format_excerpt(schedule, [(0, 2), (1, 0), (0, 12)], reach=1) == (
        "rank 0   …  0F1  0F2 ← here  0F3  …  0F11  0F12 ←  0F13  …\nrank 1   1F0 ←  1F1"
    )
    many = parse_grid("\n".join(f"{stage}F0" for stage in range(12)))
    text = format_excerpt(many, [(rank, 0) for rank in range(12)], most_ranks=3)
    assert text.splitlines()[-1] == "… and 9 more ranks"


def test_labels_of_ranks() -> None:
    assert parse_grid("rank 0: 0F0\nrank 1 1F0") == parse_grid("0F0\n1F0")
    assert parse_grid("rank 0 0F0\nrank 1\nrank 2 2F0").actions[1] == ()
    with pytest.raises(ParseError, match="line 1 is for rank 1 where rank 0 is expected"):
        parse_grid("rank 1 1F0\nrank 0 0F0")
    with pytest.raises(ParseError, match="line 3 is for rank 2 where rank 1 is expected"):
        parse_grid("rank 0 0F0\n\nrank 2 2F0")


def test_bad_cells_of_a_grid() -> None:
    with pytest.raises(ParseError, match=r"row 2, column 2: 'bad'"):
        parse_grid("0F0 0B0\n1F0 bad")
