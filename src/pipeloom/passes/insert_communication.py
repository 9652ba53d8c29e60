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

from collections.abc import Iterator
from operator import itemgetter
from typing import NamedTuple, TypeAlias

from pipeloom.errors import ScheduleError
from pipeloom.ir.action import Action, Kind
from pipeloom.ir.garbage import paused_garbage_collection
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
    with paused_garbage_collection():
        return schedule.with_actions(_insert(schedule), has_communication=True)


def _insert(schedule: Schedule) -> list[list[Action]]:
    new = tuple.__new__  # What Action(…) comes to, without its call in between.
    routes = _Routes(schedule)
    programs: list[list[Action]] = [[] for _ in schedule.actions]
    append_to = [program.append for program in programs]
    for instant in walk_in_time_order(schedule):
        messages: list[_Message] = []
        for _, action, _ in instant.ended:
            for part in action[3] or (action,):
                microbatch = part[2]
                for route in routes[part[0], part[1]]:
                    messages.append((route[0], route, microbatch))  # noqa: PERF401
        messages.sort(key=_turn_of)
        for _, route, microbatch in messages:
            _, sender, receiver, send, from_stage, to, receive, to_stage, source = route
            append_to[sender](new(Action, (send, from_stage, microbatch, (), to)))
            append_to[receiver](new(Action, (receive, to_stage, microbatch, (), source)))
        for rank, action, _ in instant.started:
            append_to[rank](action)
    return programs


class _Route(NamedTuple):
    """How what a stage produces reaches a stage of another rank, for any microbatch."""

    turn: int
    sender: int
    receiver: int
    #: Kind, stage and peer of both ends.
    send: Kind
    from_stage: int | None
    send_peer: int | None
    receive: Kind
    to_stage: int | None
    receive_peer: int | None


#: Its turn, its route, its microbatch.
_Message: TypeAlias = tuple[int, _Route, int | None]
_turn_of = itemgetter(0)


class _Routes(dict[tuple[Kind, int | None], list[_Route]]):
    """The routes for what actions of a kind and stage produce, worked out when first asked for."""

    def __init__(self, schedule: Schedule) -> None:
        super().__init__()
        self.table = schedule.dependencies
        self.rank_of = schedule.placement.rank_of

    def __missing__(self, key: tuple[Kind, int | None]) -> list[_Route]:
        routes = self[key] = list(self._find(Action(*key, 0)))
        return routes

    def _find(self, action: Action) -> Iterator[_Route]:
        num_ranks = self.table.placement.num_ranks
        for product in self.table.produces(action):
            sender = self.rank_of(product[1])
            for stage in self.table.remote_consumers(product):
                receiver = self.rank_of(stage)
                send, receive = self.table.make_message(product, stage)
                turn = _turn(sender, receiver, num_ranks)
                ends = [(end.kind, end.stage, end.peer) for end in (send, receive)]
                yield _Route(turn, sender, receiver, *ends[0], *ends[1])


def _turn(sender: int, receiver: int, num_ranks: int) -> int:
    """Where among the messages of one instant: the edges of the ring 0–1–2–…–0, every other one
    first."""
    low, high = min(sender, receiver), max(sender, receiver)
    edge = low if high - low == 1 else high
    return ((edge % 2) * num_ranks + edge) * num_ranks + sender
