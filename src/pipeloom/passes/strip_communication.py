"""Take the sends and receives out: what is left is the order of computations.

::

    before   rank 0   0F0  0SEND_F0            0RECV_B0  0B0
             rank 1        1RECV_F0  1F0  1B0  1SEND_B0

    after    rank 0   0F0                     0B0
             rank 1             1F0  1B0
"""

from __future__ import annotations

from pipeloom.ir.questions import is_communication
from pipeloom.ir.schedule import Schedule


def strip_communication(schedule: Schedule) -> Schedule:
    """Take every send and receive out, whatever their order.

    >>> from pipeloom.ir.notation import parse_grid
    >>> program = parse_grid("0F0 0SEND_F0 0RECV_B0 0B0\\n1RECV_F0 1F0 1B0 1SEND_B0")
    >>> print(strip_communication(program))
    # custom · 2 ranks · 2 stages · 1 microbatches
    rank 0   0F0  0B0
    rank 1   1F0  1B0
    """
    return schedule.with_actions(
        ([action for action in row if not is_communication(action)] for row in schedule.actions),
        has_communication=False,
    )
