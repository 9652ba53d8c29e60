"""A simulator that is slow and obvious, to check the real one against.

Time is a counter. At every tick each rank looks whether it can do what comes next in its row; then
the clock moves on by one. Nothing is computed ahead and nothing is clever. It knows the rules in
words only: it uses neither the dependency table nor anything of ``pipeloom.simulate``.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from pipeloom.ir.action import Action

COMPUTE = ("F", "B", "I", "W", "OVERLAP_F_B")
SENDS = ("SEND_F", "SEND_B")
RECEIVES = ("RECV_F", "RECV_B")
MESSAGES = SENDS + RECEIVES


@dataclass
class World:
    """What is simulated. All times are whole numbers of ticks."""

    rows: list[list[Action]]
    #: stage → the stages that take its output.
    following: dict[int, list[int]]
    rank_of: dict[int, int]
    #: (kind, stage) → ticks.
    ticks: dict[tuple[str, int], int]
    overlap: str = "sum"
    #: (from rank, to rank) → ticks.
    latency: dict[tuple[int, int], int] = field(default_factory=dict)
    #: (from rank, to rank, stage whose output or gradient of the output travels) → ticks.
    occupies: dict[tuple[int, int, int], int] = field(default_factory=dict)
    written: bool = False  # the rows have sends and receives
    backward: bool = True  # the rows have backwards at all
    sends: str = "buffered"
    channel: str = "edge"
    serialised: bool = False
    #: Stages that hold the same parameters.
    copies: list[set[int]] = field(default_factory=list)
    activation: dict[int, float] = field(default_factory=dict)
    retained: dict[int, float] = field(default_factory=dict)
    buffer: dict[int, float] = field(default_factory=dict)
    whole: dict[int, float] = field(default_factory=dict)  # parameters that UNSHARD gathers
    #: (rank, position) → ticks that this very computation takes longer.
    delays: dict[tuple[int, int], int] = field(default_factory=dict)


@dataclass
class Result:
    stuck: bool
    makespan: int = 0
    span: int = 0
    peaks: list[float] = field(default_factory=list)
    #: (rank, cause) → ticks.
    idle: Counter[tuple[int, str]] = field(default_factory=Counter)
    #: (rank, position) → (start, end), of computations.
    times: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)


def run(world: World) -> Result:
    return _Run(world).run()


# A message is named by what travels: ("F", from stage, microbatch, to stage) for outputs,
# ("B", from stage, microbatch, to stage) for gradients.


class _Run:
    def __init__(self, world: World) -> None:
        self.w = world
        self.now = 0
        self.position = [0] * len(world.rows)
        self.computing: dict[int, tuple[int, int]] = {}  # rank → (position, end)
        self.done: dict[tuple[str, int, int], int] = {}  # ("F" | "I" | "W", stage, mb) → when
        self.here: dict[tuple[Any, ...], int] = {}  # message → when it can be used
        self.on_the_way: dict[tuple[Any, ...], int] = {}  # message → when it arrives
        self.landed: set[tuple[Any, ...]] = set()
        self.gathered: dict[tuple[int, int], int] = {}  # (rank, position of UNSHARD) → when over
        self.posted_sends: list[tuple[Any, ...]] = []
        self.held: dict[int, tuple[str, Any]] = {}  # rank → why it does not go on
        # Every rank's operations in the order in which it issued them, until they are over.
        self.queue: dict[Any, list[tuple[str, Any]]] = {}
        self.edge_busy: dict[Any, int] = {}
        self.waiting_wires: dict[Any, list[tuple[Any, ...]]] = {}
        self.sending: dict[tuple[Any, ...], int] = {}  # message → when the send is over
        self.gathers: list[list[dict[str, Any]]] = [[] for _ in world.rows]
        self.memory = [Counter() for _ in world.rows]  # type: ignore[var-annotated]
        self.result = Result(False, peaks=[0.0] * len(world.rows))
        self.log: list[list[tuple[str, Any]]] = [[] for _ in world.rows]
        self.last_end = 0

    def run(self) -> Result:
        while True:
            while self.settle():
                pass
            if self.finished():
                break
            if not self.something_runs():
                return Result(True)
            self.take_notes()
            self.now += 1
        return self.sum_up()

    # ── the clock ────────────────────────────────────────────────────────────────────────────

    def finished(self) -> bool:
        return (
            all(p == len(row) for p, row in zip(self.position, self.w.rows, strict=True))
            and not self.computing
            and not self.held
            and not any(self.queue.values())
            and not any(self.gathers)
            and not self.sending
            and not self.on_the_way
        )

    def something_runs(self) -> bool:
        return bool(
            self.computing
            or self.sending
            or self.on_the_way
            or any(g["end"] is not None for row in self.gathers for g in row)
        )

    def settle(self) -> bool:
        """Everything that can happen at this very moment; True if anything did."""
        changed = False
        for rank, (position, end) in list(self.computing.items()):
            if end <= self.now:
                del self.computing[rank]
                self.finish(rank, self.w.rows[rank][position])
                self.last_end = max(self.last_end, self.now)
                changed = True
        for message, end in list(self.sending.items()):
            if end <= self.now:
                del self.sending[message]
                self.send_is_over(message)
                changed = True
        for message, when in list(self.on_the_way.items()):
            if when <= self.now and message not in self.sending:
                del self.on_the_way[message]
                if self.w.written:  # usable once the receive is over
                    self.landed.add(message)
                else:
                    self.here[message] = self.now
                changed = True
        changed |= self.move_gathers()
        changed |= self.move_messages()
        for rank in range(len(self.w.rows)):
            while self.step(rank):
                changed = True
        return changed

    # ── a rank ───────────────────────────────────────────────────────────────────────────────

    def step(self, rank: int) -> bool:
        """Do the next thing in the row, if it can be done now."""
        if rank in self.computing or rank in self.held:
            return False
        if self.position[rank] == len(self.w.rows[rank]):
            return False
        position = self.position[rank]
        action = self.w.rows[rank][position]
        kind = action.kind.value
        if kind in COMPUTE:
            if not self.ready(rank, action):
                return False
            ticks = self.ticks_of(action) + self.w.delays.get((rank, position), 0)
            self.computing[rank] = (position, self.now + ticks)
            self.result.times[rank, position] = (self.now, self.now + ticks)
            for part in action.parts or (action,):
                if part.kind.value == "F":
                    self.memory[rank]["activation", part.stage, part.microbatch] = (
                        self.w.activation.get(part.stage, 0)
                    )
            self.note_peak(rank)
        elif kind in MESSAGES:
            message = self.message_of(action)
            if kind in SENDS and self.source(message) not in self.done:
                return False
            if kind in RECEIVES:
                self.memory[rank]["buffer", message] = self.size_of(message)
                self.note_peak(rank)
            queue = self.queue.setdefault(self.queue_of(rank, message), [])
            queue.append((kind[:4], message))
            if self.holds():
                self.held[rank] = (kind[:4], message)
        else:
            entry = {
                "action": action,
                "end": None,
                "group": None,
                "ticks": self.w.ticks.get((kind, action.stage), 0),
            }
            if kind == "REDUCE_GRAD":
                if not all(
                    ("W", action.stage, m) in self.done for m in self.microbatches_of(action.stage)
                ):
                    return False
                entry["group"] = self.group_of(action.stage, rank)
                if entry["group"]:
                    self.held[rank] = ("meet", action.stage)
            if self.holds():
                self.held[rank] = ("gather", action)
            self.gathers[rank].append(entry)
        self.position[rank] += 1
        return True

    def holds(self) -> bool:
        return self.w.serialised or self.w.sends == "blocking"

    def ready(self, rank: int, action: Action) -> bool:
        for part in action.parts or (action,):
            if any(when is None or when > self.now for when, _ in self.inputs(rank, part)):
                return False
        return True

    def inputs(self, rank: int, part: Action) -> list[tuple[int | None, int | None]]:
        """(when it was here, when its origin had ended) of everything a computation uses."""
        kind, stage, mb = part.kind.value, part.stage, part.microbatch
        found: list[tuple[int | None, int | None]] = []

        def use(fact: str, other: int) -> None:
            made = self.done.get((fact, other, mb))
            if self.w.rank_of[other] == rank:
                found.append((made, made))
            else:
                letter = "F" if fact == "F" else "B"
                found.append((self.here.get((letter, other, mb, stage)), made))

        if kind == "F":
            for other, nexts in self.w.following.items():
                if stage in nexts:
                    use("F", other)
        elif kind == "W":
            found.append((self.done.get(("I", stage, mb)),) * 2)
        else:
            found.append((self.done.get(("F", stage, mb)),) * 2)
            for other in self.w.following[stage]:
                use("I", other)
        # Parameters that are sharded must have been gathered since they were last released.
        state = None
        for index, earlier in enumerate(self.w.rows[rank][: self.position[rank]]):
            if earlier.stage == stage and earlier.kind.value == "UNSHARD":
                state = index
            if earlier.stage == stage and earlier.kind.value == "RESHARD":
                state = None
        if state is not None:
            found.append((self.gathered.get((rank, state)), None))
        return found

    def ticks_of(self, action: Action) -> int:
        if action.parts:
            parts = [self.ticks_of(part) for part in action.parts]
            return max(parts) if self.w.overlap == "max" else sum(parts)
        return self.w.ticks[action.kind.value, action.stage]

    def finish(self, rank: int, action: Action) -> None:
        for part in action.parts or (action,):
            kind, stage, mb = part.kind.value, part.stage, part.microbatch
            held = self.memory[rank]
            if kind == "F":
                self.done["F", stage, mb] = self.now
                self.leave("F", stage, mb, self.w.following[stage], rank)
                if not self.w.backward:
                    del held["activation", stage, mb]
                    self.drop_buffers(rank, "F", stage, mb)
            if kind in ("B", "I"):
                self.done["I", stage, mb] = self.now
                previous = [s for s, nexts in self.w.following.items() if stage in nexts]
                self.leave("B", stage, mb, previous, rank)
                del held["activation", stage, mb]
                self.drop_buffers(rank, "B", stage, mb)
            if kind == "I":
                held["retained", stage, mb] = self.w.retained.get(stage, 0)
            if kind in ("B", "W"):
                self.done["W", stage, mb] = self.now
                held.pop(("retained", stage, mb), None)
                self.drop_buffers(rank, "F", stage, mb)

    def drop_buffers(self, rank: int, letter: str, stage: int, mb: int) -> None:
        for key in list(self.memory[rank]):
            if key[0] == "buffer" and (key[1][0], key[1][3], key[1][2]) == (letter, stage, mb):
                del self.memory[rank][key]

    def note_peak(self, rank: int) -> None:
        self.result.peaks[rank] = max(self.result.peaks[rank], sum(self.memory[rank].values()))

    # ── messages ─────────────────────────────────────────────────────────────────────────────

    def message_of(self, action: Action) -> tuple[Any, ...]:
        kind, stage, mb = action.kind.value, action.stage, action.microbatch
        down = self.w.following[stage]
        up = [s for s, nexts in self.w.following.items() if stage in nexts]
        near = down if kind in ("SEND_F", "RECV_B") else up
        peer = action.peer if action.peer is not None else near[0]
        if kind[:4] == "SEND":
            return (kind[-1], stage, mb, peer)
        return (kind[-1], peer, mb, stage)

    def source(self, message: tuple[Any, ...]) -> tuple[str, int, int]:
        letter, stage, mb, _ = message
        return ("F" if letter == "F" else "I", stage, mb)

    def ranks(self, message: tuple[Any, ...]) -> tuple[int, int]:
        return self.w.rank_of[message[1]], self.w.rank_of[message[3]]

    def boundary(self, message: tuple[Any, ...]) -> int:
        """The stage whose output, or its gradient, travels."""
        return message[1] if message[0] == "F" else message[3]

    def size_of(self, message: tuple[Any, ...]) -> float:
        return self.w.buffer.get(self.boundary(message), 0)

    def occupation(self, message: tuple[Any, ...]) -> int:
        return self.w.occupies.get((*self.ranks(message), self.boundary(message)), 0)

    def delay(self, message: tuple[Any, ...]) -> int:
        return self.w.latency.get(self.ranks(message), 0)

    def queue_of(self, rank: int, message: tuple[Any, ...]) -> Any:
        sender, receiver = self.ranks(message)
        if self.w.channel == "edge":
            return (rank, sender, receiver)
        if self.w.channel == "pair":
            return (rank, receiver if rank == sender else sender)
        return rank

    def leave(self, letter: str, stage: int, mb: int, others: list[int], rank: int) -> None:
        """A product sets off by itself where nobody writes the sends."""
        if self.w.written:
            return
        for other in others:
            if self.w.rank_of[other] == rank:
                continue
            message = (letter, stage, mb, other)
            if self.holds():
                self.waiting_wires.setdefault(rank, []).append(message)
                self.held[rank] = ("SEND", message)
            else:
                self.waiting_wires.setdefault(self.ranks(message), []).append(message)

    def move_messages(self) -> bool:
        changed = False
        for key, waiting in self.waiting_wires.items():
            if not waiting or any(self.wire_of(m) == key for m in self.sending):
                continue
            message = waiting.pop(0)
            self.start(message, self.holds())
            changed = True
        for queue in self.queue.values():
            if not queue:
                continue
            what, message = queue[0]
            if what == "SEND" and message not in self.sending:
                if message in self.posted_sends:
                    continue
                if self.w.sends != "buffered" and not self.receiver_is_there(message):
                    continue
                self.posted_sends.append(message)
                self.start(message, self.holds())
                changed = True
            elif what == "RECV" and message in self.landed:
                queue.pop(0)
                self.here[message] = self.now
                self.last_end = max(self.last_end, self.now)
                rank = self.ranks(message)[1]
                if self.held.get(rank) == ("RECV", message):
                    del self.held[rank]
                changed = True
        return changed

    def wire_of(self, message: tuple[Any, ...]) -> Any:
        return self.ranks(message)[0] if self.holds() else self.ranks(message)

    def receiver_is_there(self, message: tuple[Any, ...]) -> bool:
        """The receive is posted and, where a queue mixes directions, first in its queue."""
        queue = self.queue.get(self.queue_of(self.ranks(message)[1], message), [])
        if self.w.channel == "edge" or self.holds():
            return ("RECV", message) in queue
        return bool(queue) and queue[0] == ("RECV", message)

    def start(self, message: tuple[Any, ...], whole: bool) -> None:
        over = self.now + self.occupation(message)
        arrives = over + self.delay(message)
        self.sending[message] = arrives if whole else over
        self.on_the_way[message] = arrives

    def send_is_over(self, message: tuple[Any, ...]) -> None:
        self.last_end = max(self.last_end, self.now) if self.w.written else self.last_end
        rank = self.ranks(message)[0]
        if self.w.written:
            queue = self.queue[self.queue_of(rank, message)]
            assert queue[0] == ("SEND", message)
            queue.pop(0)
        if self.held.get(rank) == ("SEND", message):
            del self.held[rank]
            waiting = self.waiting_wires.get(rank) if not self.w.written else None
            if waiting:
                self.held[rank] = ("SEND", waiting[0])
        if not self.w.written and self.holds():
            self.last_end = max(self.last_end, self.now)
            waiting = self.waiting_wires.get(rank)
            if waiting:
                self.held[rank] = ("SEND", waiting[0])
            else:
                self.held.pop(rank, None)

    # ── parameters and gradients ─────────────────────────────────────────────────────────────

    def microbatches_of(self, stage: int) -> set[int]:
        return {
            part.microbatch
            for row in self.w.rows
            for action in row
            for part in action.parts or (action,)
            if part.stage == stage and part.kind.value == "F"
        }

    def group_of(self, stage: int, rank: int) -> list[int]:
        for group in self.w.copies:
            if stage in group:
                others = [s for s in group if self.w.rank_of[s] != rank]
                return [stage, *others] if others else []
        return []

    def move_gathers(self) -> bool:
        changed = False
        for rank, waiting in enumerate(self.gathers):
            if not waiting:
                continue
            first = waiting[0]
            if first["end"] is None:
                group = first["group"]
                if group and not self.all_met(group):
                    continue
                for other in group or [first["action"].stage]:
                    entry = self.gathers[self.w.rank_of[other] if group else rank][0]
                    entry["end"] = self.now + entry["ticks"]
                    other_rank = self.w.rank_of[other] if group else rank
                    if entry["action"].kind.value == "UNSHARD":
                        self.memory[rank]["whole", other] = self.w.whole.get(other, 0)
                        self.note_peak(rank)
                    if self.held.get(other_rank, ("",))[0] == "meet":
                        del self.held[other_rank]
                changed = True
            if first["end"] is not None and first["end"] <= self.now:
                waiting.pop(0)
                self.last_end = max(self.last_end, self.now)
                action = first["action"]
                if action.kind.value == "UNSHARD":
                    row = self.w.rows[rank]
                    index = next(
                        i
                        for i, other in enumerate(row[: self.position[rank]])
                        if other == action and (rank, i) not in self.gathered
                    )
                    self.gathered[rank, index] = self.now
                elif action.kind.value == "RESHARD":
                    del self.memory[rank]["whole", action.stage]
                if self.held.get(rank) == ("gather", action):
                    del self.held[rank]
                changed = True
        return changed

    def all_met(self, group: list[int]) -> bool:
        for stage in group:
            waiting = self.gathers[self.w.rank_of[stage]]
            if not waiting or waiting[0]["action"].kind.value != "REDUCE_GRAD":
                return False
            if waiting[0]["action"].stage != stage or waiting[0]["end"] is not None:
                return False
        return True

    # ── the report ───────────────────────────────────────────────────────────────────────────

    def take_notes(self) -> None:
        """What every rank does in the tick that begins now."""
        for rank, log in enumerate(self.log):
            if rank in self.computing:
                log.append(("compute", None))
            elif rank in self.held:
                log.append(self.held[rank])
            elif self.position[rank] < len(self.w.rows[rank]):
                log.append(("next", self.position[rank]))
            else:
                log.append(("nothing", None))

    def sum_up(self) -> Result:
        result = self.result
        result.makespan = self.last_end
        for rank, log in enumerate(self.log):
            times = [time for (r, _), time in result.times.items() if r == rank]
            first = min((start for start, _ in times), default=None)
            last = max((end for _, end in times), default=0)
            if first is not None:
                result.span = max(result.span, last - first)
            # A computation that takes no time still is one: what came before it was not nothing.
            for tick in range(result.makespan):
                what, detail = log[tick]
                if what == "compute":
                    continue
                if first is not None and tick < first:
                    cause = "warm-up"
                elif tick >= last:
                    cause = "drain"
                elif what == "RECV":
                    cause = "waiting" if self.origin_end(detail) > tick else "communication"
                elif what == "next":
                    cause = self.cause_of_wait(rank, detail, tick)
                else:
                    cause = "communication"
                result.idle[rank, cause] += 1
        return result

    def origin_end(self, message: tuple[Any, ...]) -> int:
        return self.done[self.source(message)]

    def cause_of_wait(self, rank: int, position: int, tick: int) -> str:
        """The input that came last decides; of several, the one that was finished last."""
        action = self.w.rows[rank][position]
        self.position[rank] = position  # inputs() looks at what stands before it
        latest: tuple[int, int] = (-1, -1)
        for part in action.parts or (action,):
            for here, made in self.inputs(rank, part):
                assert here is not None
                latest = max(latest, (here, -1 if made is None else made))
        return "waiting" if latest[1] > tick else "communication"
