"""B and its halves."""

from __future__ import annotations

import pytest

from pipeloom.ir.notation import parse_grid
from pipeloom.passes.insert_communication import insert_communication
from pipeloom.passes.merge_backward import merge_backward
from pipeloom.passes.split_backward import split_backward
from unit.passes.blocking_run import edges_of, find_stuck


def row_of(grid: str, *, change: object) -> str:
    (row,) = change(parse_grid(grid)).actions  # type: ignore[operator]
    return " ".join(map(str, row))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("0F0 0I0 0W0", "0F0 0B0"),
        ("0F0 0F1 0I0 0W0 0I1 0W1", "0F0 0F1 0B0 0B1"),
        # Not neighbours, not the same microbatch, not the same stage, not in this order.
        ("0F0 0F1 0I0 0I1 0W0 0W1", "0F0 0F1 0I0 0I1 0W0 0W1"),
        ("0F0 1F0 1I0 0I0 1W0 0W0", "0F0 1F0 1I0 0I0 1W0 0W0"),
        ("0F0 0F1 0I0 0F2 0W0", "0F0 0F1 0I0 0F2 0W0"),
        # A merged backward is not merged again.
        ("0F0 0I0 0W0 0W0", "0F0 0B0 0W0"),
        ("0F0 (0F1;0I0)OVERLAP_F_B 0W0", "0F0 (0F1;0I0)OVERLAP_F_B 0W0"),
        ("", ""),
    ],
)
def test_merge(before: str, after: str) -> None:
    if not before:
        schedule = parse_grid("0F0").with_actions([[]])
        assert merge_backward(schedule) == schedule
        return
    assert row_of(before, change=merge_backward) == after


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("0F0 0B0", "0F0 0I0 0W0"),
        ("0F0 0F1 0B0 0B1", "0F0 0F1 0I0 0W0 0I1 0W1"),
        ("0F0 0I0 0W0", "0F0 0I0 0W0"),
        ("0F0 (0F1;0B0)OVERLAP_F_B 0B1", "0F0 (0F1;0B0)OVERLAP_F_B 0I1 0W1"),
    ],
)
def test_split(before: str, after: str) -> None:
    assert row_of(before, change=split_backward) == after


def test_each_undoes_the_other() -> None:
    whole = parse_grid("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1")
    assert merge_backward(split_backward(whole)) == whole
    assert split_backward(merge_backward(split_backward(whole))) == split_backward(whole)


def test_a_message_goes_out_before_the_weights() -> None:
    program = insert_communication(parse_grid("0F0 0B0 0F1 0B1\n1F0 1B0 1F1 1B1"))
    split = split_backward(program)
    row = " ".join(map(str, split.actions[1]))
    assert "1I0 1SEND_B0 1W0" in row
    assert row.endswith("1I1 1SEND_B1 1W1")
    rows = [list(map(str, row)) for row in split.actions]
    assert find_stuck(rows, edges_of(split.topology)) == []


def test_a_message_between_the_halves_keeps_them_apart() -> None:
    program = insert_communication(parse_grid("0F0 0B0\n1F0 1I0 1W0"))
    assert merge_backward(program).actions[1] == program.actions[1]


def test_torch_merges_the_same() -> None:
    pipelining = pytest.importorskip("torch.distributed.pipelining.schedules")
    text = "0F0 0F1 0I0 0W0 0F2 0I1 0I2 0W1 0W2 1F0 1I0 1W0 0F3 0I3 0W3"
    theirs = pipelining._merge_bw([pipelining._Action.from_str(t) for t in text.split()])
    assert row_of(text, change=merge_backward) == " ".join(map(str, theirs))
