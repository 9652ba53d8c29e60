"""Split every full backward into the backward of inputs and the backward of weights.

::

    before   1F0  1B0       1F1  1B1
    after    1F0  1I0  1W0  1F1  1I1  1W1

    before   1F0  1B0  1SEND_B0            (with communication)
    after    1F0  1I0  1SEND_B0  1W0       the message no longer waits for the weights
"""

from __future__ import annotations

from pipeloom.ir.action import Action
from pipeloom.ir.dependencies import Role
from pipeloom.ir.questions import halves_of, role_of
from pipeloom.ir.schedule import Schedule


def split_backward(schedule: Schedule) -> Schedule:
    """Split B into I and W; W follows I, after the sends that directly followed B.

    The parts of a fused action stay whole: that a forward overlaps with the *full* backward is
    what its schedule counts on.

    W only leaves its place next to I to let sends pass that do not need it, so no rank waits for
    anything it did not wait for before.

    >>> from pipeloom.ir.notation import parse_grid
    >>> print(split_backward(parse_grid("0F0 0B0\\n1F0 1B0", name="tiny")))
    # tiny · 2 ranks · 2 stages · 1 microbatches
    rank 0   0F0  0I0  0W0
    rank 1   1F0  1I0  1W0
    """
    rows = []
    for row in schedule.actions:
        split: list[Action] = []
        delayed: Action | None = None
        for action in row:
            if delayed is not None and role_of(action) is not Role.SEND:
                split.append(delayed)
                delayed = None
            halves = halves_of(action)
            if halves is None:
                split.append(action)
            else:
                first, delayed = halves
                split.append(first)
        if delayed is not None:
            split.append(delayed)
        rows.append(split)
    return schedule.with_actions(rows)
