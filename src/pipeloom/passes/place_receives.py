"""Post receives earlier, so that messages travel while ranks compute, or as late as possible.

::

    inserted   1F3   1SEND_F3   1RECV_B1   1F4   1SEND_F4   1B1
    early      1RECV_B1   1F3   1SEND_F3   1F4   1SEND_F4   1B1     look-ahead: 2 computations
    late       1F3   1SEND_F3   1F4   1SEND_F4   1RECV_B1   1B1

Early hides latency, for a buffer that is held longer; late keeps a pending receive from holding up
what else uses the network, such as gathering parameters.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

from pipeloom.errors import ScheduleError
from pipeloom.ir.action import Action
from pipeloom.ir.dependencies import Dependencies, Role
from pipeloom.ir.questions import (
    is_communication,
    is_compute,
    role_of,
)
from pipeloom.ir.schedule import Schedule
from pipeloom.verify.deadlock import Channel, Sends, check_model, find_deadlock

#: How many actions all proofs together may walk, beyond the first proof.
MOST_ACTIONS_PROVED = 2_000_000


def place_receives(
    schedule: Schedule,
    when: Literal["early", "late"] = "early",
    *,
    lookahead: int = 1,
    sends: Sends = "rendezvous",
    channel: Channel = "edge",
) -> Schedule:
    """Move receives early or late, without a deadlock under the communication model.

    Early: to ``lookahead`` computations before the one that uses the data, where a receive is not
    that early yet. A rank then holds at most ``lookahead`` buffers more per edge, however many
    microbatches there are. Late: right before the computation that uses the data. Sends and
    computations keep their order, and so do the receives of one edge.

    Why nothing can deadlock that did not:

    - (buffered or rendezvous, edge): receives of one edge are alone in their queue, and a rank
      waits only for those that its next computation uses. All of these have been posted by then,
      in the order of their sends, so a computation waits for what it waited for before.
    - Otherwise a moved receive may pass computations only, so that the order of messages stays
      what it was on every rank; what could circle now could circle before. (Blocking receives are
      not moved forward like that: there a computation would wait for the message it lets pass.)
    - Beyond that, receives move to where they were asked for on all ranks, or else on one rank
      after the other (in large programs: one group of ranks), if the verifier's proof says that the
      program still has no deadlock.

    >>> from pipeloom.ir.notation import parse_grid
    >>> program = parse_grid("0F0 0SEND_F0 0F1 0SEND_F1\\n1RECV_F0 1F0 1RECV_F1 1F1", name="tiny")
    >>> print(place_receives(program, "early"))
    # tiny · 2 ranks · 2 stages · 2 microbatches
    rank 0   0F0       0SEND_F0  0F1  0SEND_F1
    rank 1   1RECV_F0  1RECV_F1  1F0  1F1
    """
    if when not in ("early", "late"):
        raise ScheduleError(f"receives are placed 'early' or 'late', not {when!r}")
    if lookahead < 0:
        raise ScheduleError(f"lookahead is a number of computations, not {lookahead!r}")
    check_model(sends, channel)
    if not schedule.has_communication:
        raise ScheduleError(
            f"{schedule.name} has no receives to place; run insert_communication before"
        )
    rows = [_Row(schedule.dependencies, row) for row in schedule.actions]

    def move(row: _Row, *, pass_messages: bool) -> list[Action]:
        if when == "late":
            return row.place_late(pass_messages=pass_messages)
        return row.place_early(lookahead, pass_messages=pass_messages)

    moved = [move(row, pass_messages=True) for row in rows]
    if channel == "edge" and sends != "blocking":
        return schedule.with_actions(moved)

    def is_safe(programs: Sequence[Sequence[Action]]) -> bool:
        program = schedule.with_actions(programs)
        return find_deadlock(program, sends=sends, channel=channel) is None

    if is_safe(moved):
        return schedule.with_actions(moved)
    if when == "late" or sends != "blocking":
        programs = [move(row, pass_messages=False) for row in rows]
    else:
        programs = [list(row) for row in schedule.actions]
    for group in _group_ranks(schedule):
        trial = [moved[rank] if rank in group else row for rank, row in enumerate(programs)]
        if trial != programs and is_safe(trial):
            programs = trial
    return schedule.with_actions(programs)


def _group_ranks(schedule: Schedule) -> list[range]:
    """The ranks whose receives are tried together: as many groups as there is time for proofs, so
    that a large program with many ranks does not take the square of its time."""
    num_ranks = schedule.num_ranks
    num_actions = sum(map(len, schedule.actions))
    num_groups = max(1, min(num_ranks, MOST_ACTIONS_PROVED // max(1, num_actions)))
    ends = [group * num_ranks // num_groups for group in range(num_groups + 1)]
    # All ranks together are no group: that has been tried.
    return [range(*pair) for pair in pairwise(ends)] if num_groups > 1 else []


class _Receive(NamedTuple):
    """A receive and where it stands."""

    action: Action
    #: Before which of the other actions.
    slot: int
    #: Before which of the other actions it must stand; ``None`` if nothing uses it.
    deadline: int | None
    #: The rank it comes from.
    sender: int


class _Row:
    """One rank's program: its receives, and the other actions, which keep their order.

    ::

        others      0F0   0SEND_F0   0B0           slot 0 is before 0F0, slot 3 at the end
        receives    0RECV_B0: slot 2, deadline 2
    """

    def __init__(self, table: Dependencies, row: Sequence[Action]) -> None:
        self.others: list[Action] = []
        self.receives: list[_Receive] = []
        #: The slots of computations, and of what a receive may not pass if messages keep order.
        self.computations: list[int] = []
        self.meetings: list[int] = []
        slot_of_user: dict[object, int] = {}
        arrivals = []
        for action in row:
            slot = len(self.others)
            if role_of(action) is Role.RECEIVE:
                arrivals.append((action, slot))
                continue
            if is_compute(action):
                self.computations.append(slot)
                for product in table.needs(action):
                    slot_of_user.setdefault(product, slot)
            elif is_communication(action) or table.partners_of(action):
                self.meetings.append(slot)
            self.others.append(action)
        for action, slot in arrivals:
            deadline = slot_of_user.get(table.produces(action)[0])
            sender, _ = table.ranks_of_message(table.message_of(action))
            self.receives.append(_Receive(action, slot, deadline, sender))

    def place_late(self, *, pass_messages: bool) -> list[Action]:
        """Each receive before its deadline, but not after the next receive of its edge; or, if it
        may not pass messages, of any edge, nor after the next send."""
        slots: list[int] = []
        not_after: dict[int, int] = {}
        for receive in reversed(self.receives):
            queue = receive.sender if pass_messages else -1
            slot = receive.slot
            if receive.deadline is not None and receive.deadline > slot:
                slot = min(receive.deadline, not_after.get(queue, len(self.others)))
                if not pass_messages:
                    slot = min(slot, self._next_meeting(receive.slot))
            not_after[queue] = slot
            slots.append(slot)
        return self._assemble(slots[::-1])

    def place_early(self, lookahead: int, *, pass_messages: bool) -> list[Action]:
        """Each receive as many computations before its deadline, but not before the receive of its
        edge that it follows; or, if it may not pass messages, that of any edge, nor a send."""
        slots: list[int] = []
        not_before: dict[int, int] = {}
        for receive in self.receives:
            queue = receive.sender if pass_messages else -1
            slot = receive.slot
            if receive.deadline is not None:
                index = bisect_left(self.computations, receive.deadline) - lookahead
                wanted = self.computations[index] if index > 0 else 0
                if not pass_messages:
                    wanted = max(wanted, self._end_of_last_meeting(receive.slot))
                slot = min(slot, max(wanted, not_before.get(queue, 0)))
            not_before[queue] = slot
            slots.append(slot)
        return self._assemble(slots)

    def _next_meeting(self, slot: int) -> int:
        index = bisect_left(self.meetings, slot)
        return self.meetings[index] if index < len(self.meetings) else len(self.others)

    def _end_of_last_meeting(self, slot: int) -> int:
        index = bisect_left(self.meetings, slot)
        return self.meetings[index - 1] + 1 if index else 0

    def _assemble(self, slots: Sequence[int]) -> list[Action]:
        arriving: dict[int, list[Action]] = {}
        for receive, slot in zip(self.receives, slots, strict=True):
            arriving.setdefault(slot, []).append(receive.action)
        program: list[Action] = []
        for slot, action in enumerate(self.others):
            program += arriving.get(slot, ())
            program.append(action)
        return program + arriving.get(len(self.others), [])
