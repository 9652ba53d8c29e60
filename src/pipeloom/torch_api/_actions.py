"""Actions as torch spells them, and the way from them to :mod:`pipeloom.ir` and back.

::

    _Action(2, FORWARD, 0)                       2F0
    _Action(1, UNSHARD)                          1UNSHARD
    _Action(-1, OVERLAP_F_B, None, (…, …))       (0F4;3B1)OVERLAP_F_B
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

from pipeloom.errors import ParseError
from pipeloom.ir.action import Action, Kind
from pipeloom.ir.notation import parse_action
from pipeloom.ir.questions import is_compute

#: What a rank runs; ``None`` is a cell in which it is idle.
Order = Mapping[int, Sequence["_Action | None"]]


class _ComputationType(str, Enum):  # noqa: UP042 - formats as torch's does
    """The kinds of action, by the names torch gives them."""

    FORWARD = "F"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    FULL_BACKWARD = "B"
    OVERLAP_F_B = "OVERLAP_F_B"
    REDUCE_GRAD = "REDUCE_GRAD"

    @staticmethod
    def from_str(action: str) -> _ComputationType:
        """The kind of a text; ``RuntimeError`` if there is none."""
        try:
            return _ComputationType(action)
        except ValueError:
            known = ", ".join(kind.value for kind in _ComputationType)
            raise RuntimeError(f"Invalid computation type {action}; known are {known}") from None


FORWARD = _ComputationType.FORWARD
BACKWARD_INPUT = _ComputationType.BACKWARD_INPUT
BACKWARD_WEIGHT = _ComputationType.BACKWARD_WEIGHT
UNSHARD = _ComputationType.UNSHARD
RESHARD = _ComputationType.RESHARD
SEND_F = _ComputationType.SEND_F
RECV_F = _ComputationType.RECV_F
SEND_B = _ComputationType.SEND_B
RECV_B = _ComputationType.RECV_B
FULL_BACKWARD = _ComputationType.FULL_BACKWARD
OVERLAP_F_B = _ComputationType.OVERLAP_F_B
REDUCE_GRAD = _ComputationType.REDUCE_GRAD

F = FORWARD
I = BACKWARD_INPUT
W = BACKWARD_WEIGHT
B = FULL_BACKWARD

_TYPE_OF = {kind: _ComputationType(kind.value) for kind in Kind}
_KIND_OF = {computation_type: kind for kind, computation_type in _TYPE_OF.items()}


class _Action(NamedTuple):
    """One thing that one rank does.

    >>> _Action.from_str("(0F4;3B1)OVERLAP_F_B").sub_actions
    (0F4, 3B1)
    """

    stage_index: int
    computation_type: _ComputationType
    microbatch_index: int | None = None
    sub_actions: tuple[_Action, ...] | None = None

    def __str__(self) -> str:
        return self.__repr__()

    def __repr__(self) -> str:
        if self.sub_actions is not None:
            parts = ";".join(map(repr, self.sub_actions))
            return f"({parts}){self.computation_type.value}"
        number = "" if self.microbatch_index is None else self.microbatch_index
        return f"{self.stage_index}{self.computation_type.value}{number}"

    @property
    def is_compute_op(self) -> bool:
        """True for F, B, I, W and what is fused of them."""
        return is_compute(Action(_KIND_OF[self.computation_type], None))

    @staticmethod
    def from_str(action_string: str) -> _Action | None:
        """Read what ``repr`` writes; ``None`` for an empty cell.

        >>> _Action.from_str("3SEND_F1").computation_type.name
        'SEND_F'
        """
        text = action_string.replace(" ", "").strip()
        if not text:
            return None
        try:
            action = parse_action(text)
        except ParseError as error:
            raise RuntimeError(
                f"Invalid action string: {action_string}, should be formatted as "
                f"[stage][action type][(microbatch)] e.g. 2F0; {error}"
            ) from None
        if action.peer is not None:
            raise RuntimeError(
                f"Invalid action string: {action_string}; here stages form a chain and a message "
                "needs no other stage: pipeloom.load_schedule reads schedules with skip connections"
            )
        return from_ir(action)


def from_ir(action: Action) -> _Action:
    """The action as torch spells it.

    >>> from_ir(Action(Kind.B, 1, 2))
    1B2
    """
    if action.parts:
        return _Action(-1, _TYPE_OF[action.kind], None, tuple(map(from_ir, action.parts)))
    assert action.stage is not None
    return _Action(action.stage, _TYPE_OF[action.kind], action.microbatch)


def to_ir(action: _Action) -> Action:
    """The action as pipeloom spells it.

    >>> to_ir(_Action(1, REDUCE_GRAD))
    1REDUCE_GRAD
    """
    kind = _KIND_OF[action.computation_type]
    if action.sub_actions is not None:
        return Action(kind, None, None, tuple(map(to_ir, action.sub_actions)))
    return Action(kind, action.stage_index, action.microbatch_index)


def rows_to_ir(order: Order) -> list[list[Action]]:
    """The rows of an order, by rank, without the idle cells."""
    return [
        [to_ir(action) for action in order[rank] if action is not None] for rank in sorted(order)
    ]


def rows_from_ir(rows: Iterable[Iterable[Action]]) -> dict[int, list[_Action | None]]:
    """An order of rows, by rank."""
    return {rank: [from_ir(action) for action in row] for rank, row in enumerate(rows)}


@lru_cache
def _get_profiler_function_name(action: _Action) -> str:
    """What a profiler shows while the action runs."""
    return f"PP:{action}"
