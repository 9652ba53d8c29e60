"""Make one full backward of the two halves of a backward that stand next to each other.

::

    before   1F0  1I0  1W0  1F1  1I1  1F2  1W1
    after    1F0  1B0       1F1  1I1  1F2  1W1

A full backward walks the graph once, so it is quicker than its halves; where nothing stands
between them, splitting gained nothing.
"""

from __future__ import annotations

from pipeloom.ir.action import Action
from pipeloom.ir.questions import whole_of
from pipeloom.ir.schedule import Schedule


def merge_backward(schedule: Schedule) -> Schedule:
    """Merge I and W of one stage and microbatch into B where they are neighbours.

    A message between the two keeps them apart, since it would have to wait for the whole backward;
    so merge before communication is inserted. Parts of fused actions stay as they are.

    >>> from pipeloom.ir.notation import parse_grid
    >>> print(merge_backward(parse_grid("0F0 0I0 0W0 0F1 0I1 0F2 0W1 0I2 0W2", name="tiny")))
    # tiny · 1 ranks · 1 stages · 3 microbatches
    rank 0   0F0  0B0  0F1  0I1  0F2  0W1  0B2
    """
    rows = []
    for row in schedule.actions:
        merged: list[Action] = []
        for action in row:
            whole = whole_of(merged[-1], action) if merged else None
            if whole is None:
                merged.append(action)
            else:
                merged[-1] = whole
        rows.append(merged)
    return schedule.with_actions(rows)
