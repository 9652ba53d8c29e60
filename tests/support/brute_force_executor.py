"""Run a program with symbols for tensors, and see whether every stage ends with its gradients.

Written from the words of the schedule language, not from the dependency table: it knows what a
forward and a backward compute, that a rank runs its row in order, and that the k-th receive of a
directed pair of ranks gets the k-th message sent there, whatever both think it is. A program is
right if it runs to its end, each stage's gradient is the sum of one exact term a microbatch, and
nothing is left over. ::

    x(1, 0) = ("x", 1, 0, {0: x(0, 0)})            the output of stage 1 for microbatch 0
    g(1, 0) = ("g", 1, x(1, 0), {2: g(2, 0)})      the gradient of its input
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

from pipeloom.ir.action import Action
from pipeloom.ir.schedule import Schedule

Slot = tuple[int, int]


class Wrong(Exception):
    """The program does something that cannot be right."""


def find_fault(schedule: Schedule) -> str | None:
    """Why the program is wrong, ``None`` if it is right. Messages are buffered."""
    try:
        _Run(schedule).run()
    except Wrong as wrong:
        return str(wrong)
    return None


class _Run:
    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.rank_of = schedule.placement.ranks
        self.after: dict[int, list[int]] = {s: [] for s in range(len(self.rank_of))}
        self.before: dict[int, list[int]] = {s: [] for s in range(len(self.rank_of))}
        edges = [edge for chain in schedule.topology.chains for edge in pairwise(chain)]
        for one, other in [*edges, *schedule.topology.extra_edges]:
            self.after[one].append(other)
            self.before[other].append(one)
        self.chain_of = {
            stage: index for index, chain in enumerate(schedule.topology.chains) for stage in chain
        }
        self.texts = [
            part.kind.value for row in schedule.actions for a in row for part in a.parts or (a,)
        ]
        self.trains = any(text in ("B", "I", "W") for text in self.texts)
        self.speaks = any(text.startswith(("SEND", "RECV")) for text in self.texts)
        self.sharded = {
            a.stage
            for row in schedule.actions
            for a in row
            if a.kind.value in ("UNSHARD", "RESHARD")
        }
        self.pc = [0] * len(schedule.actions)
        self.outputs: dict[Slot, Any] = {}
        self.input_gradients: dict[Slot, Any] = {}
        self.saved: dict[Slot, Any] = {}
        self.pending: dict[Slot, Any] = {}
        self.gradients: dict[int, Counter[Any]] = {s: Counter() for s in self.after}
        self.reduced: dict[int, Counter[Any]] = {}
        self.wires: dict[Slot, list[Any]] = {}
        self.listeners: dict[Slot, int] = {}
        #: (direction, from stage, to stage, microbatch) → (pair, which message of it).
        self.expected: dict[tuple[str, int, int, int], tuple[Slot, int]] = {}
        self.gathered: set[int] = set()

    # ── the machine ──────────────────────────────────────────────────────────────────────────

    def run(self) -> None:
        rows = self.schedule.actions
        if len(rows) != self.schedule.num_ranks:
            raise Wrong("a rank is missing")
        moved = True
        while moved:
            moved = False
            for rank, row in enumerate(rows):
                while self.pc[rank] < len(row) and self.step(rank, row[self.pc[rank]]):
                    self.pc[rank] += 1
                    moved = True
        for rank, row in enumerate(rows):
            if self.pc[rank] < len(row):
                raise Wrong(f"rank {rank} never gets past {row[self.pc[rank]]}")
        self.check_end()

    def step(self, rank: int, action: Action) -> bool:
        """Do an action; false if it has to wait."""
        parts = action.parts or (action,)
        if not all(self.can_run(rank, part) for part in parts):
            return False
        for part in parts:
            self.do(rank, part)
        return True

    def can_run(self, rank: int, action: Action) -> bool:
        kind, stage, microbatch = action.kind.value, action.stage, action.microbatch
        if stage is None or stage not in self.after:
            raise Wrong(f"{action}: no such stage")
        if self.rank_of[stage] != rank:
            raise Wrong(f"{action}: its stage is elsewhere")
        if microbatch is not None and microbatch not in self.microbatches(stage):
            raise Wrong(f"{action}: no such microbatch")
        slot = (stage, microbatch if microbatch is not None else -1)
        if kind == "F":
            return all(self.has("F", other, stage, slot[1]) for other in self.before[stage])
        if kind in ("B", "I"):
            return slot in self.outputs and all(
                self.has("B", other, stage, slot[1]) for other in self.after[stage]
            )
        if kind == "W":
            return slot in self.pending
        if kind == "SEND_F":
            return slot in self.outputs
        if kind == "SEND_B":
            return slot in self.input_gradients
        if kind == "REDUCE_GRAD":
            return self.can_reduce(rank, stage)
        return True

    def do(self, rank: int, action: Action) -> None:
        kind, stage, microbatch = action.kind.value, action.stage, action.microbatch
        assert stage is not None
        if kind in ("F", "B", "I", "W"):
            assert microbatch is not None
            if stage in self.sharded and stage not in self.gathered:
                raise Wrong(f"{action}: the parameters are not there")
            self.compute(kind, (stage, microbatch))
        elif kind in ("SEND_F", "SEND_B", "RECV_F", "RECV_B"):
            assert microbatch is not None
            self.exchange(rank, kind, action)
        elif kind == "UNSHARD":
            if stage in self.gathered:
                raise Wrong(f"{action}: gathered already")
            self.gathered.add(stage)
        elif kind == "RESHARD":
            self.gathered.discard(stage)
        elif kind == "REDUCE_GRAD":
            if stage in self.reduced:
                raise Wrong(f"{action}: reduced already")
            total: Counter[Any] = Counter()
            for copy in self.copies(stage):
                total += self.gradients[copy]
            self.reduced[stage] = total
        else:
            raise Wrong(f"{action}: unknown")

    # ── what the kinds do ────────────────────────────────────────────────────────────────────

    def compute(self, kind: str, slot: Slot) -> None:
        stage, microbatch = slot
        if kind == "F":
            if slot in self.outputs:
                raise Wrong(f"the forward of {slot} runs twice")
            inputs = {o: self.get("F", o, stage, microbatch) for o in self.before[stage]}
            self.outputs[slot] = self.saved[slot] = ("x", stage, microbatch, inputs)
            return
        if kind == "W":
            self.gradients[stage][repr(self.pending.pop(slot))] += 1
            return
        if slot not in self.saved:
            raise Wrong(f"the backward of {slot} runs twice")
        outer = {o: self.get("B", o, stage, microbatch) for o in self.after[stage]}
        gradient = ("g", stage, self.saved.pop(slot), outer)
        self.input_gradients[slot] = gradient
        if kind == "I":
            self.pending[slot] = gradient
        else:
            self.gradients[stage][repr(gradient)] += 1

    def exchange(self, rank: int, kind: str, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch
        assert stage is not None
        assert microbatch is not None
        goes_down = kind in ("SEND_F", "RECV_B")
        others = self.after[stage] if goes_down else self.before[stage]
        if action.peer is None and len(others) != 1:
            raise Wrong(f"{action}: with whom?")
        other = others[0] if action.peer is None else action.peer
        if other not in others:
            raise Wrong(f"{action}: no such edge")
        other_rank = self.rank_of[other]
        if other_rank is None or other_rank == rank:
            raise Wrong(f"{action}: nothing to send there")
        if kind.startswith("SEND"):
            values = self.outputs if kind == "SEND_F" else self.input_gradients
            self.wires.setdefault((rank, other_rank), []).append(values[stage, microbatch])
            return
        pair = (other_rank, rank)
        number = self.listeners[pair] = self.listeners.get(pair, -1) + 1
        label = (kind[-1], other, stage, microbatch)
        if label in self.expected:
            raise Wrong(f"{action}: received already")
        self.expected[label] = (pair, number)

    def has(self, direction: str, other: int, stage: int, microbatch: int) -> bool:
        """Is what stage ``other`` made for ``stage`` here?"""
        if self.speaks and self.rank_of[other] != self.rank_of[stage]:
            label = (direction, other, stage, microbatch)
            if label not in self.expected:
                return False
            pair, number = self.expected[label]
            return number < len(self.wires.get(pair, ()))
        made = self.outputs if direction == "F" else self.input_gradients
        return (other, microbatch) in made

    def get(self, direction: str, other: int, stage: int, microbatch: int) -> Any:
        if self.speaks and self.rank_of[other] != self.rank_of[stage]:
            pair, number = self.expected[direction, other, stage, microbatch]
            return self.wires[pair][number]
        made = self.outputs if direction == "F" else self.input_gradients
        return made[other, microbatch]

    def can_reduce(self, rank: int, stage: int) -> bool:
        """All gradients of the stage are there, and its copies have come to theirs."""
        if self.gradients[stage].total() < len(self.microbatches(stage)):
            return False
        for copy in self.copies(stage):
            home = self.rank_of[copy]
            if copy == stage or home is None:
                continue
            row = self.schedule.actions[home]
            places = [i for i, a in enumerate(row) if str(a) == f"{copy}REDUCE_GRAD"]
            if not places:
                return False
            if home != rank and self.pc[home] < places[0]:
                return False
        return True

    # ── the end ──────────────────────────────────────────────────────────────────────────────

    def check_end(self) -> None:
        for pair, values in self.wires.items():
            if len(values) != self.listeners.get(pair, -1) + 1:
                raise Wrong(f"messages of {pair} are left over, or awaited")
        for pair, last in self.listeners.items():
            if last + 1 != len(self.wires.get(pair, ())):
                raise Wrong(f"messages of {pair} are awaited")
        if not self.outputs:
            raise Wrong("nothing was computed")
        for stage in self.after:
            for microbatch in self.microbatches(stage):
                if self.outputs.get((stage, microbatch)) != self.true_output(stage, microbatch):
                    raise Wrong(f"the output of {stage} for {microbatch} is wrong")
            if self.trains:
                expected = Counter(
                    repr(self.true_gradient(stage, microbatch))
                    for microbatch in self.microbatches(stage)
                )
                if self.gradients[stage] != expected:
                    raise Wrong(f"the gradients of {stage} are wrong")
                if stage in self.sharded and stage not in self.reduced:
                    raise Wrong(f"the gradients of {stage} are never reduced")
        for stage in self.reduced:
            for copy in self.copies(stage):
                if self.reduced.get(copy) != self.reduced[stage]:
                    raise Wrong(f"the copies of {stage} disagree")

    def true_output(self, stage: int, microbatch: int) -> Any:
        inputs = {other: self.true_output(other, microbatch) for other in self.before[stage]}
        return ("x", stage, microbatch, inputs)

    def true_gradient(self, stage: int, microbatch: int) -> Any:
        outer = {other: self.true_gradient(other, microbatch) for other in self.after[stage]}
        return ("g", stage, self.true_output(stage, microbatch), outer)

    def microbatches(self, stage: int) -> range:
        """Equal consecutive shares of the microbatches for the chains."""
        count, chains = self.schedule.num_microbatches, len(self.schedule.topology.chains)
        chain = self.chain_of[stage]
        return range(chain * count // chains, (chain + 1) * count // chains)

    def copies(self, stage: int) -> tuple[int, ...]:
        groups = [group for group in self.schedule.topology.replicas if stage in group]
        return groups[0] if groups else (stage,)
