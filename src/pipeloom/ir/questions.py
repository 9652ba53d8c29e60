"""Questions about an action alone, answered from the table without the shape of a schedule.

>>> is_compute(Action(Kind.W, 2, 0)), is_communication(Action(Kind.SEND_F, 1, 0))
(True, True)
"""

from __future__ import annotations

from typing import Any

from pipeloom.ir.action import Action, Kind
from pipeloom.ir.dependencies import RULES, Role


def role_of(action: Action) -> Role:
    """The role of an action's kind."""
    return RULES[action[0]].role


def is_compute(action: Action) -> bool:
    """True for what occupies the compute lane: F, B, I, W and fused actions."""
    return RULES[action[0]].lane == "compute"


def is_communication(action: Action) -> bool:
    """True for a send or a receive."""
    return RULES[action[0]].role in (Role.SEND, Role.RECEIVE)


def is_backward(action: Action) -> bool:
    """True if an action, or a part of it, works on gradients: B, I, W and what is fused of them."""
    return any(part[0] in _BACKWARD_KINDS for part in simple_actions(action))


def simple_actions(action: Action) -> tuple[Action, ...]:
    """The parts of a fused action; an ordinary action is its own only part."""
    return action[3] or (action,)


_BACKWARD_KINDS = frozenset({Kind.B, Kind.I, Kind.W})

#: What can be split, and into what.
_HALVES = {Kind.B: (Kind.I, Kind.W)}
_WHOLES = {halves: whole for whole, halves in _HALVES.items()}


def halves_of(action: Action) -> tuple[Action, Action] | None:
    """The two actions that together do the same, ``None`` where an action cannot be split.

    >>> halves_of(Action(Kind.B, 2, 0))
    (2I0, 2W0)
    """
    halves = _HALVES.get(action[0])
    if halves is None:
        return None
    first, second = halves
    return action._replace(kind=first), action._replace(kind=second)


def whole_of(first: Action, second: Action) -> Action | None:
    """The action that does the same as two in a row, ``None`` where there is none.

    >>> whole_of(Action(Kind.I, 2, 0), Action(Kind.W, 2, 0))
    2B0
    """
    whole = _WHOLES.get((first[0], second[0]))
    return None if whole is None or first[1:] != second[1:] else first._replace(kind=whole)


def find_malformed(action: Action) -> str | None:
    """Say what is wrong with the form of an action made in Python, ``None`` if nothing is.

    >>> find_malformed(Action(Kind.F, 2))
    'F needs a microbatch'
    """
    fields: tuple[Any, ...] = action  # nothing has checked their types
    kind, stage, microbatch, parts, peer = fields
    if not isinstance(kind, Kind):
        return f"its kind must be a Kind, not {kind!r}"
    if not isinstance(parts, tuple):
        return f"its parts must be a tuple of actions, not {parts!r}"
    rule = RULES[kind]
    if rule.role is Role.FUSED:
        if stage is not None or microbatch is not None or peer is not None:
            return f"{kind} has its stages and microbatches in its parts"
        if len(parts) < 2:
            return f"{kind} needs at least two parts"
        for part in parts:
            if not isinstance(part, Action):
                return f"{kind} can only fuse actions, not {part!r}"
            problem = find_malformed(part)
            if problem is None and RULES[part.kind].role is not Role.COMPUTE:
                problem = f"{kind} can only fuse computations, not {part}"
            if problem is not None:
                return problem
        return None
    if parts:
        return f"{kind} has no parts"
    for what, number in (("stage", stage), ("microbatch", microbatch), ("peer", peer)):
        if number is not None and (type(number) is not int or number < 0):
            return f"its {what} must be a number from 0 up, not {number!r}"
    if stage is None:
        return f"{kind} needs a stage"
    if rule.has_microbatch and microbatch is None:
        return f"{kind} needs a microbatch"
    if not rule.has_microbatch and microbatch is not None:
        return f"{kind} concerns a whole stage and has no microbatch"
    if peer is not None and rule.role not in (Role.SEND, Role.RECEIVE):
        return f"{kind} has no peer stage"
    return None
