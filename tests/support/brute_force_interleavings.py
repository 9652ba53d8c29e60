"""Search every order of events of a small program under a communication model.

Written from the words that define the models, as plainly as possible: a state is where every rank
is and which messages have completed; from a state follow all its successors. Slow and obvious.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from pipeloom.ir.action import Action
from pipeloom.ir.schedule import Schedule

Place = tuple[int, int]
#: (direction, sending stage, receiving stage, microbatch)
Message = tuple[str, int, int, int]


class State(NamedTuple):
    at: tuple[int, ...]
    completed: frozenset[Place]


class Outcome(NamedTuple):
    """Some order of events finishes; some order of events gets stuck."""

    can_finish: bool
    can_get_stuck: bool


def search(schedule: Schedule, sends: str, channel: str) -> Outcome:
    """Follow every order of events."""
    space = _Space(schedule, sends, channel)
    start = State((0,) * len(schedule.actions), frozenset())
    seen = {start}
    todo = [start]
    can_finish = can_get_stuck = False
    while todo:
        state = todo.pop()
        if space.is_final(state):
            can_finish = True
            continue
        following = list(space.successors(state))
        can_get_stuck |= not following
        for successor in following:
            if successor not in seen:
                seen.add(successor)
                todo.append(successor)
    return Outcome(can_finish, can_get_stuck)


class _Space:
    def __init__(self, schedule: Schedule, sends: str, channel: str) -> None:
        self.rows = schedule.actions
        self.schedule = schedule
        self.sends, self.channel = sends, channel
        self.ranks = schedule.placement.ranks
        self.after: dict[int, list[int]] = {s: [] for s in range(len(self.ranks))}
        self.before: dict[int, list[int]] = {s: [] for s in range(len(self.ranks))}
        edges = [edge for chain in schedule.topology.chains for edge in pairwise(chain)]
        for one, other in [*edges, *schedule.topology.extra_edges]:
            self.after[one].append(other)
            self.before[other].append(one)
        self.message_at: dict[Place, Message] = {}
        self.send_of: dict[Message, Place] = {}
        self.receive_of: dict[Message, Place] = {}
        for rank, row in enumerate(self.rows):
            for position, action in enumerate(row):
                kind = action.kind.value
                if kind.startswith(("SEND", "RECV")):
                    message = self.read_message(action)
                    self.message_at[rank, position] = message
                    ends = self.send_of if kind.startswith("SEND") else self.receive_of
                    assert message not in ends, "each message is sent and received once"
                    ends[message] = (rank, position)

    def read_message(self, action: Action) -> Message:
        kind, stage, microbatch = action.kind.value, action.stage, action.microbatch
        assert stage is not None
        assert microbatch is not None
        others = self.after[stage] if kind in ("SEND_F", "RECV_B") else self.before[stage]
        other = others[0] if action.peer is None else action.peer
        one, two = (stage, other) if kind.startswith("SEND") else (other, stage)
        return (kind[-1], one, two, microbatch)

    def is_final(self, state: State) -> bool:
        at_end = all(at == len(row) for at, row in zip(state.at, self.rows, strict=True))
        return at_end and (self.sends == "blocking" or len(state.completed) == len(self.message_at))

    def successors(self, state: State) -> Iterator[State]:
        for rank, position in enumerate(state.at):
            if position < len(self.rows[rank]):
                yield from self.advance(state, rank, position)
        if self.sends != "blocking":
            yield from self.complete(state)

    # ── a rank goes on ───────────────────────────────────────────────────────────────────────

    def advance(self, state: State, rank: int, position: int) -> Iterator[State]:
        action = self.rows[rank][position]
        if not all(self.is_here(state, rank, position, part) for part in action.parts or (action,)):
            return
        if (rank, position) not in self.message_at or self.sends != "blocking":
            yield self.move(state, rank)
        elif action.kind.value.startswith("SEND"):
            match = self.receive_of.get(self.message_at[rank, position])
            if match is not None and state.at[match[0]] == match[1]:
                yield self.move(state, rank, match[0])  # a receive needs nothing of its own rank

    def move(self, state: State, *ranks: int) -> State:
        at = tuple(at + (rank in ranks) for rank, at in enumerate(state.at))
        return state._replace(at=at)

    def is_here(self, state: State, rank: int, position: int, action: Action) -> bool:
        """Is everything there that the action at this place needs?"""
        kind, stage, microbatch = action.kind.value, action.stage, action.microbatch
        assert stage is not None
        if kind.startswith("RECV"):
            return True
        if kind == "REDUCE_GRAD":
            return self.can_reduce(state, rank, position, stage)
        assert microbatch is not None
        earlier = {
            (part.kind.value, part.stage, part.microbatch)
            for action in self.rows[rank][:position]
            for part in action.parts or (action,)
        }
        own_forward = ("F", stage, microbatch) in earlier
        own_backward = bool({("B", stage, microbatch), ("I", stage, microbatch)} & earlier)
        if kind == "SEND_F":
            return own_forward
        if kind == "SEND_B":
            return own_backward
        if kind == "W":
            return ("I", stage, microbatch) in earlier
        if kind == "F":
            return all(
                self.has_come(state, rank, position, ("F", o, stage, microbatch), earlier)
                for o in self.before[stage]
            )
        return own_forward and all(
            self.has_come(state, rank, position, ("B", o, stage, microbatch), earlier)
            for o in self.after[stage]
        )

    def has_come(
        self,
        state: State,
        rank: int,
        position: int,
        message: Message,
        earlier: set[tuple[str, int | None, int | None]],
    ) -> bool:
        direction, other, _, microbatch = message
        if self.ranks[other] == rank:
            kinds = ("F",) if direction == "F" else ("B", "I")
            return any((kind, other, microbatch) in earlier for kind in kinds)
        receive = self.receive_of.get(message)
        if receive is None or receive[1] > position:
            return False
        return self.sends == "blocking" or receive in state.completed

    def can_reduce(self, state: State, rank: int, position: int, stage: int) -> bool:
        weights = {
            part.microbatch
            for action in self.rows[rank][:position]
            for part in action.parts or (action,)
            if part.stage == stage and part.kind.value in ("B", "W")
        }
        count, chains = self.schedule.num_microbatches, self.schedule.topology.chains
        chain = next(index for index, stages in enumerate(chains) if stage in stages)
        share = range(chain * count // len(chains), (chain + 1) * count // len(chains))
        if not weights >= set(share):
            return False
        for group in self.schedule.topology.replicas:
            for copy in group:
                home = self.ranks[copy]
                assert home is not None
                if stage in group and copy != stage and home != rank:
                    texts = [str(action) for action in self.rows[home]]
                    if f"{copy}REDUCE_GRAD" not in texts:
                        return False
                    if state.at[home] < texts.index(f"{copy}REDUCE_GRAD"):
                        return False
        return True

    # ── messages complete ────────────────────────────────────────────────────────────────────

    def complete(self, state: State) -> Iterator[State]:
        for message, send in self.send_of.items():
            receive = self.receive_of.get(message)
            if self.sends == "buffered":
                if self.is_head(state, send):
                    yield state._replace(completed=state.completed | {send})
                if receive is not None and send in state.completed and self.is_head(state, receive):
                    yield state._replace(completed=state.completed | {receive})
            elif receive is not None and self.is_head(state, send) and self.is_head(state, receive):
                yield state._replace(completed=state.completed | {send, receive})

    def is_head(self, state: State, place: Place) -> bool:
        """Posted, not completed, and nothing that was issued before it in its queue is left."""
        rank, position = place
        if state.at[rank] <= position or place in state.completed:
            return False
        return not any(
            other[0] == rank
            and other[1] < position
            and other not in state.completed
            and self.queue_of(other) == self.queue_of(place)
            for other in self.message_at
        )

    def queue_of(self, place: Place) -> object:
        direction, one, two, _ = self.message_at[place]
        del direction
        sending = self.rows[place[0]][place[1]].kind.value.startswith("SEND")
        other_rank = self.ranks[two if sending else one]
        if self.channel == "all":
            return None
        return other_rank if self.channel == "pair" else (other_rank, sending)
