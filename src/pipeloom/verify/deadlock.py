"""Does the program run to its end under a communication model? Proved by running it.

Each rank runs its actions in order. How it meets other ranks:

sends="blocking"
    At a SEND or RECV the rank itself waits until the other rank has reached the matching action;
    both then go on.
sends="rendezvous"
    SEND and RECV are *posted* and the rank goes on. It waits before a computation for the receives
    that the computation uses, and at the end of its program for all that it has posted. A send and
    its receive complete together, when each is at the head of its queue.
sends="buffered"
    As rendezvous, but a send completes as soon as it is at the head of its queue; a receive, when
    it is at the head of its queue and its send has completed.

Posted operations of a rank wait in queues, in the order in which they were issued: in one queue
with channel="all"; in one per other rank, sends and receives together, with channel="pair"; in one
per directed pair (sends to q; receives from q) with channel="edge". For a blocking rank, which has
one operation at a time, the channel makes no difference.

Sends and receives are matched by the message they carry (the k-th of several with one message with
the k-th); that a channel delivers them so is the question of ``channels.py``. A REDUCE_GRAD of a
stage with copies on other ranks is a collective: the rank waits until all copies have reached
theirs. An action whose products of its own rank are made later, or never, waits forever.

A compute-only schedule has no messages to order: a computation waits for the products of other
ranks, as if buffered messages carried each at once.

What can happen stays possible whatever else happens first: no step takes away another. So all
orders of events lead to the same end, and running one of them, as far as it goes, is a proof. What
is stuck then waits for something that is stuck too: the circle is the explanation. ::

    rank 0   0F0  0SEND_F0  0F1  0SEND_F1 ← here  0RECV_B0
    rank 1   1RECV_F0  1F0  1B0  1SEND_B0 ← here  1RECV_F1

    rank 0 waits at 0SEND_F1 for rank 1, which waits at 1SEND_B0 for rank 0
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, TypeAlias

from pipeloom.errors import ScheduleError
from pipeloom.ir.schedule import Schedule
from pipeloom.verify.program import NOWHERE, Program
from pipeloom.verify.report import Violation

Sends: TypeAlias = Literal["buffered", "rendezvous", "blocking"]
Channel: TypeAlias = Literal["all", "pair", "edge"]
SENDS: tuple[Sends, ...] = ("buffered", "rendezvous", "blocking")
CHANNELS: tuple[Channel, ...] = ("all", "pair", "edge")


def find_deadlock(
    schedule: Schedule, *, sends: Sends = "rendezvous", channel: Channel = "edge"
) -> Violation | None:
    """The first circular wait, or wait for what never comes; ``None`` proves there is none."""
    check_model(sends, channel)
    return next(check_deadlock(Program(schedule), sends, channel), None)


def check_model(sends: str, channel: str) -> None:
    """Refuse what is no communication model."""
    if sends not in SENDS:
        raise ScheduleError(f"sends must be one of {', '.join(SENDS)}, not {sends!r}")
    if channel not in CHANNELS:
        raise ScheduleError(f"channel must be one of {', '.join(CHANNELS)}, not {channel!r}")


def check_deadlock(program: Program, sends: Sends, channel: Channel) -> Iterator[Violation]:
    """Every circular wait, or, if nothing waits in a circle, one wait for what never comes."""
    machine = Machine(program, sends, channel)
    machine.run()
    if not machine.is_finished():
        from pipeloom.verify.wait_for import explain_deadlock

        yield from explain_deadlock(machine)


class Machine:
    """Runs a program as far as it goes."""

    def __init__(self, program: Program, sends: Sends, channel: Channel) -> None:
        self.program = program
        self.sends = sends
        self.channel = channel
        size = program.starts[-1]
        #: Where each rank is: the location of its next action.
        self.at = list(program.starts[:-1])
        self.done = bytearray(size)
        #: Of messages and collectives: the rank has come to it.
        self.posted = bytearray(size)
        self.is_send = bytearray(size)
        #: Of messages: the number of their queue; NOWHERE for all other actions.
        self.queue_of = [NOWHERE] * size
        self.queues: list[list[int]] = []
        #: Per queue: the index of its head, and the head, NOWHERE for an empty queue.
        self.head_index: list[int] = []
        self.heads: list[int] = []
        self._sort_into_queues()
        #: Location → ranks that wait until it is done, or, for a collective, posted.
        self.waiting: dict[int, list[int]] = {}
        self._ready: list[int] = []

    def _sort_into_queues(self) -> None:
        queue_of = self.queue_of
        members: dict[tuple[int, ...], list[int]] = {}
        for (sender, receiver), channel in self.program.channels.items():
            for is_send, locations in ((1, channel.sends), (0, channel.receives)):
                rank, other = (sender, receiver) if is_send else (receiver, sender)
                if self.channel == "edge":
                    key: tuple[int, ...] = (rank, other, is_send)
                elif self.channel == "pair":
                    key = (rank, other)
                else:
                    key = (rank,)
                members.setdefault(key, []).extend(locations)
                if is_send:
                    for location in locations:
                        self.is_send[location] = 1
        # Within a rank locations ascend in the order of its program.
        self.queues = [sorted(locations) for locations in members.values() if locations]
        for number, queue in enumerate(self.queues):
            for location in queue:
                queue_of[location] = number
        # The match of an action that stands on a wrong rank never comes.
        self.matches = [
            match if match != NOWHERE and queue_of[match] != NOWHERE else NOWHERE
            for match in self.program.matches
        ]
        self.head_index = [0] * len(self.queues)
        self.heads = [queue[0] for queue in self.queues]

    def is_finished(self) -> bool:
        """True if every rank has come to its end, with nothing left in its queues."""
        ends = self.program.starts[1:]
        return self.at == ends and all(head == NOWHERE for head in self.heads)

    def run(self) -> None:
        """Let every rank go on until none can."""
        self._ready = list(range(len(self.at) - 1, -1, -1))
        while self._ready:
            self._advance(self._ready.pop())

    def _advance(self, rank: int) -> None:
        program = self.program
        waits, collectives, matches = program.waits, program.collectives, self.matches
        done, posted, queue_of = self.done, self.posted, self.queue_of
        blocking = self.sends == "blocking"
        location, end = self.at[rank], program.starts[rank + 1]
        while location < end:
            needed = waits.get(location)
            if needed is not None and not self._have(needed, rank):
                break
            if queue_of[location] != NOWHERE:
                posted[location] = 1
                if blocking:
                    match = matches[location]
                    if match == NOWHERE or not posted[match]:
                        break  # held, until the other rank comes and lets both go
                    self._complete(location)
                    self._complete(match)
                    other = program.rank_at(match)
                    self.at[other] = match + 1
                    self._ready.append(other)
                elif self.heads[queue_of[location]] == location:
                    self._settle(location)
            elif location in collectives:
                if not posted[location]:
                    posted[location] = 1
                    self._ready += self.waiting.pop(location, ())
                absent = [p for p in collectives[location] if p == NOWHERE or not posted[p]]
                if absent:
                    if absent[0] != NOWHERE:
                        self.waiting.setdefault(absent[0], []).append(rank)
                    break
                done[location] = 1
            else:
                done[location] = 1
                if location in self.waiting:
                    self._ready += self.waiting.pop(location)
            location += 1
        self.at[rank] = location

    def _have(self, needed: tuple[int, ...], rank: int) -> bool:
        """True if all these are done; if not, the rank is called again when one of them is."""
        for location in needed:
            if location == NOWHERE:
                return False
            if not self.done[location]:
                self.waiting.setdefault(location, []).append(rank)
                return False
        return True

    def _settle(self, location: int) -> None:
        """Complete a posted operation that has come to the head of its queue, and all that this
        lets go on."""
        matches, posted, done = self.matches, self.posted, self.done
        buffered = self.sends == "buffered"
        check = [location]
        while check:
            location = check.pop()
            if location == NOWHERE or done[location] or not posted[location]:
                continue
            if self.heads[self.queue_of[location]] != location:
                continue
            match = matches[location]
            if buffered:
                if self.is_send[location]:
                    check += (self._complete(location), match)
                elif match != NOWHERE and done[match]:
                    check.append(self._complete(location))
            elif match != NOWHERE and posted[match] and self.heads[self.queue_of[match]] == match:
                check += (self._complete(location), self._complete(match))

    def _complete(self, location: int) -> int:
        """Take an operation from the head of its queue; the new head."""
        self.done[location] = 1
        if location in self.waiting:
            self._ready += self.waiting.pop(location)
        queue = self.queue_of[location]
        index = self.head_index[queue] = self.head_index[queue] + 1
        members = self.queues[queue]
        head = self.heads[queue] = members[index] if index < len(members) else NOWHERE
        return head
