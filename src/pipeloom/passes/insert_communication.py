"""Add a send and a receive for every edge between ranks.

::

    before   rank 0   0F0                     0B0
             rank 1             1F0  1B0

    after    rank 0   0F0  0SEND_F0            0RECV_B0  0B0
             rank 1        1RECV_F0  1F0  1B0  1SEND_B0

The passes ask the dependency table what an action produces and which stages of other ranks use
it; no kind of action is known here, so skip connections, two chains and fused actions need no
words of their own.
"""

from __future__ import annotations

from pipeloom.errors import ScheduleError
from pipeloom.ir.action import Action
from pipeloom.ir.dependencies import Product
from pipeloom.ir.schedule import Schedule
from pipeloom.passes.time_order import walk_in_time_order


def insert_communication(schedule: Schedule) -> Schedule:
    """Turn a compute-only schedule into one with a SEND and a RECV for every message.

    Both are put at the instant at which the product is there, in the common order of
    :func:`walk_in_time_order`: the send follows the computation, the receive stands before the
    computations that the receiving rank starts from then on. So a receive neither holds a rank
    that has something else to do, nor lets a sender wait for a computation it could precede.

    Why this cannot deadlock, even where every send and receive holds its rank until the two meet
    and each rank has one channel only (blocking, all): each rank's program is a part of one common
    order of computations and messages. Take the first of that order which has not happened. All
    that comes before it has, so each rank that takes part in it has reached it, and it happens.

    Messages of one instant are ordered so that pairs of ranks which share no rank go together
    (0–1 with 2–3, then 1–2 with 3–0), so the ranks do not pass a wave of waiting along.

    >>> from pipeloom.ir.notation import parse_grid
    >>> print(insert_communication(parse_grid("0F0 0B0\\n1F0 1B0", name="tiny")))
    # tiny · 2 ranks · 2 stages · 1 microbatches
    rank 0   0F0       0SEND_F0  0RECV_B0  0B0
    rank 1   1RECV_F0  1F0       1B0       1SEND_B0
    """
    if schedule.has_communication:
        raise ScheduleError(
            f"{schedule.name} has communication already; insert_communication takes the "
            "compute-only order (strip_communication gives it, or use the program as it is)"
        )
    table = schedule.dependencies
    rank_of = schedule.placement.rank_of
    programs: list[list[Action]] = [[] for _ in schedule.actions]
    consumers_of: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for instant in walk_in_time_order(schedule):
        messages: list[tuple[tuple[int, int, int], int, Product, int]] = []
        for rank, _, products in instant.ended:
            for product in products:
                kind_of_product = product[:2]
                consumers = consumers_of.get(kind_of_product)
                if consumers is None:
                    consumers = consumers_of[kind_of_product] = [
                        (stage, rank_of(stage)) for stage in table.remote_consumers(product)
                    ]
                for stage, receiver in consumers:
                    messages.append((_turn(rank, receiver), receiver, product, stage))
        if len(messages) > 1:
            messages.sort()
        for (_, _, sender), receiver, product, stage in messages:
            send, receive = table.make_message(product, stage)
            programs[sender].append(send)
            programs[receiver].append(receive)
        for rank, action in instant.started:
            programs[rank].append(action)
    return schedule.with_actions(programs, has_communication=True)


def _turn(sender: int, receiver: int) -> tuple[int, int, int]:
    """Where among the messages of one instant: the edges of the ring 0–1–2–…–0, every other one
    first."""
    low, high = (sender, receiver) if sender < receiver else (receiver, sender)
    edge = low if high - low == 1 else high
    return (edge % 2, edge, sender)
