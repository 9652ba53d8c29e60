"""Actions as values and as text."""

from __future__ import annotations

import pickle

import pytest

from pipeloom.ir.action import Action, Kind, fuse
from pipeloom.ir.questions import find_malformed


@pytest.mark.parametrize(
    ("action", "text"),
    [
        (Action(Kind.F, 2, 0), "2F0"),
        (Action(Kind.I, 10, 31), "10I31"),
        (Action(Kind.SEND_F, 1, 0), "1SEND_F0"),
        (Action(Kind.SEND_F, 1, 0, peer=3), "1SEND_F0>3"),
        (Action(Kind.RECV_F, 3, 0, peer=1), "3RECV_F0<1"),
        (Action(Kind.SEND_B, 3, 0, peer=1), "3SEND_B0>1"),
        (Action(Kind.RECV_B, 1, 0, peer=3), "1RECV_B0<3"),
        (Action(Kind.UNSHARD, 1), "1UNSHARD"),
        (Action(Kind.REDUCE_GRAD, 0), "0REDUCE_GRAD"),
        (fuse(Action(Kind.F, 0, 4), Action(Kind.B, 3, 1)), "(0F4;3B1)OVERLAP_F_B"),
    ],
)
def test_text(action: Action, text: str) -> None:
    assert str(action) == repr(action) == text


def test_actions_are_values() -> None:
    assert Action(Kind.F, 2, 0) == Action(Kind.F, 2, 0)
    assert len({Action(Kind.F, 2, 0), Action(Kind.F, 2, 0), Action(Kind.B, 2, 0)}) == 2
    with pytest.raises(AttributeError):
        Action(Kind.F, 2, 0).stage = 3  # type: ignore[misc]


def test_actions_travel_between_processes() -> None:
    for action in (Action(Kind.SEND_F, 1, 0, peer=3), fuse(Action(Kind.F, 0, 1))):
        again = pickle.loads(pickle.dumps(action))
        assert again == action
        assert again.kind is action.kind
        assert hash(again) == hash(action)


@pytest.mark.parametrize(
    ("action", "problem"),
    [
        (Action(Kind.F, 0, 0), None),
        (Action(Kind.RESHARD, 0), None),
        (Action(Kind.SEND_F, 0, 0, peer=1), None),
        (fuse(Action(Kind.F, 0, 0), Action(Kind.B, 1, 0)), None),
        (Action(Kind.F, None, 0), "F needs a stage"),
        (Action(Kind.F, 0), "F needs a microbatch"),
        (Action(Kind.F, 0, -1), "its microbatch must be a number from 0 up, not -1"),
        (Action(Kind.UNSHARD, 0, 0), "UNSHARD concerns a whole stage and has no microbatch"),
        (Action(Kind.F, 0, 0, peer=1), "F has no peer stage"),
        (Action(Kind.F, 0, 0, (Action(Kind.F, 0, 0),)), "F has no parts"),
        (fuse(Action(Kind.F, 0, 0)), "OVERLAP_F_B needs at least two parts"),
        (
            fuse(Action(Kind.F, 0, 0), Action(Kind.UNSHARD, 0)),
            "OVERLAP_F_B can only fuse computations, not 0UNSHARD",
        ),
        (
            Action(Kind.OVERLAP_F_B, 0, None, (Action(Kind.F, 0, 0), Action(Kind.B, 0, 1))),
            "OVERLAP_F_B has its stages and microbatches in its parts",
        ),
    ],
)
def test_form(action: Action, problem: str | None) -> None:
    assert find_malformed(action) == problem
