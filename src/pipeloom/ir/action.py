"""One thing that one rank does.

::

    2F0      stage 2, forward, microbatch 0
    2I0      stage 2, gradient of its inputs
    2W0      stage 2, gradient of its weights
    2B0      both at once
    1SEND_F0 → 2RECV_F0        an output travels from stage 1 to stage 2
    2SEND_B0 → 1RECV_B0        the gradient of that output travels back
    1UNSHARD 1RESHARD 1REDUCE_GRAD
    (0F4;3B1)OVERLAP_F_B       two actions that run as one

What a kind *means* (what it waits for, produces, holds) is not said here but in
:mod:`pipeloom.ir.dependencies`, once for everybody.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Kind(Enum):
    """The kinds of action. The value is the text that stands in schedules and files."""

    F = "F"
    B = "B"
    I = "I"
    W = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE_GRAD = "REDUCE_GRAD"
    OVERLAP_F_B = "OVERLAP_F_B"

    # Enum hashes the name in Python code; identity is the same and a schedule hashes 800,000 kinds.
    __hash__ = object.__hash__

    def __str__(self) -> str:
        return self._value_


class Action(NamedTuple):
    """Kind, stage, microbatch (``None`` for stage-wide kinds), the parts of a fused action, and
    the other stage of a send or receive where the edge is not the only one.

    >>> str(Action(Kind.F, 2, 0))
    '2F0'
    >>> Action(Kind.SEND_F, 1, 0, peer=3)
    1SEND_F0>3
    """

    kind: Kind
    #: ``None`` only for a fused action: its parts have the stages.
    stage: int | None
    microbatch: int | None = None
    parts: tuple[Action, ...] = ()
    peer: int | None = None

    def __str__(self) -> str:
        try:
            return self._text()
        except (AttributeError, TypeError):
            # Made in Python of things no action has; the verifier still has to name it.
            return f"Action{tuple(self)}"

    def _text(self) -> str:
        kind, stage, microbatch, parts, peer = self
        if parts:
            return f"({';'.join(map(str, parts))}){kind._value_}"
        text = f"{'' if stage is None else stage}{kind._value_}"
        if microbatch is not None:
            text += str(microbatch)
        if peer is not None:
            text += f"{'<' if kind in _RECEIVES else '>'}{peer}"
        return text

    def __repr__(self) -> str:
        return str(self)


_RECEIVES = frozenset({Kind.RECV_F, Kind.RECV_B})


def fuse(*parts: Action) -> Action:
    """Make one action of two that overlap.

    >>> fuse(Action(Kind.F, 0, 4), Action(Kind.B, 3, 1))
    (0F4;3B1)OVERLAP_F_B
    """
    return Action(Kind.OVERLAP_F_B, None, None, parts)
