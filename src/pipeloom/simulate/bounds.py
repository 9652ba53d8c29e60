"""How short a step could be at best, whatever the order: lower bounds on the makespan.

::

    compute      the busiest rank's whole work
    chain        one microbatch: down the chain, up again, and the last weight gradient
    fill         a rank's work, and what nobody can avoid before it:
                 │ head │ first forwards …  β │ the rest of the work │
                 head: the first input reaches the rank;  β: idle, because no more forwards fit in
                 memory before the first backward can come back
    fill_drain   the same with the forwards and input gradients only, and, behind the last of
                 them, the shortest way to the end

Split or full backward, whichever is shorter: no order of the same stages on the same ranks can
beat these, with the memory limit given or, without one, with any memory.
"""

from __future__ import annotations

from pipeloom.cost.model import ScheduleCosts
from pipeloom.ir.action import Kind
from pipeloom.ir.dependencies import Role
from pipeloom.ir.questions import role_of


def find_lower_bounds(costs: ScheduleCosts, memory_limit: float | None = None) -> dict[str, float]:
    """Lower bounds on the makespan by name, for a schedule's shape and costs."""
    return _Bounds(costs, memory_limit).find()


class _Bounds:
    def __init__(self, costs: ScheduleCosts, memory_limit: float | None) -> None:
        schedule = costs.schedule
        self.costs = costs
        self.memory_limit = memory_limit
        self.schedule = schedule
        self.topology = schedule.topology
        self.has_backward = schedule.has_backward
        self.saved = self._find_overlap_saving()
        durations = costs.durations
        none = (0.0,) * schedule.num_stages
        self.forward = durations[Kind.F]
        #: Until the input gradient leaves; a full backward lets it go only at its end.
        self.input = (
            tuple(map(min, durations[Kind.I], durations[Kind.B])) if self.has_backward else none
        )
        self.backward = costs.backward if self.has_backward else none
        self.head = self._walk_forward()
        self.back = self._walk_back()
        self.tail = self._walk_tail()

    def find(self) -> dict[str, float]:
        ranks = range(self.schedule.num_ranks)
        bounds = {
            "compute": max(map(self._work, ranks), default=0.0),
            "chain": max(self._chain(), default=0.0),
        }
        fill = [self._head_of(rank) + self._forced_idle(rank) for rank in ranks]
        bounds["fill"] = max((fill[rank] + self._work(rank) for rank in ranks), default=0.0)
        if self.has_backward:
            bounds["fill_drain"] = max(
                (
                    fill[rank] + self._work(rank, with_weights=False) + self._tail_of(rank)
                    for rank in ranks
                ),
                default=0.0,
            )
        return bounds

    # ── the whole chain ──────────────────────────────────────────────────────────────────────

    def _rank_of(self, stage: int) -> int:
        return self.schedule.placement.rank_of(stage)

    def _hop(self, sender: int, receiver: int, carried_of: int) -> float:
        """The shortest a message between two stages can take."""
        source, target = self._rank_of(sender), self._rank_of(receiver)
        if source == target:
            return 0.0
        link = self.costs.network.link_between(source, target)
        return link.latency + self.costs.boundary[carried_of] / link.bandwidth

    def _walk_forward(self) -> list[float]:
        """Per stage: the earliest start of its first forward."""
        head = [0.0] * self.topology.num_stages
        for chain in self.topology.chains:
            for stage in chain:
                for earlier in self.topology.predecessors(stage):
                    reached = head[earlier] + self.forward[earlier]
                    head[stage] = max(head[stage], reached + self._hop(earlier, stage, earlier))
        return head

    def _walk_back(self) -> list[float]:
        """Per stage: the earliest start of its first backward."""
        back = [0.0] * self.topology.num_stages
        for chain in self.topology.chains:
            for stage in reversed(chain):
                back[stage] = self.head[stage] + self.forward[stage]
                for later in self.topology.successors(stage):
                    reached = back[later] + self.input[later]
                    back[stage] = max(back[stage], reached + self._hop(later, stage, stage))
        return back

    def _walk_tail(self) -> list[float]:
        """Per stage: the shortest time from the start of an input gradient to the end of all."""
        tail = [0.0] * self.topology.num_stages
        for chain in self.topology.chains:
            for stage in chain:
                tail[stage] = self.backward[stage]
                for earlier in self.topology.predecessors(stage):
                    reached = self.input[stage] + self._hop(stage, earlier, earlier)
                    tail[stage] = max(tail[stage], reached + tail[earlier])
        return tail

    def _chain(self) -> list[float]:
        if not self.has_backward:
            return [h + f for h, f in zip(self.head, self.forward, strict=True)]
        return [b + t for b, t in zip(self.back, self.tail, strict=True)]

    # ── one rank ─────────────────────────────────────────────────────────────────────────────

    def _num_microbatches(self, stage: int) -> int:
        return len(self.topology.microbatches_of(stage, self.schedule.num_microbatches))

    def _work(self, rank: int, *, with_weights: bool = True) -> float:
        forward = backward = 0.0
        times = self.backward if with_weights else self.input
        for stage in self.schedule.placement.stages_on(rank):
            count = self._num_microbatches(stage)
            forward += count * self.forward[stage]
            backward += count * times[stage]
        if self.saved is None:
            return forward + backward
        # Overlapped pairs: each work can hide behind the other, or all of it shrinks.
        return max(forward, backward, self.saved * (forward + backward))

    def _find_overlap_saving(self) -> float | None:
        """The factor by which overlapping could shrink work; ``None`` if nothing overlaps or
        nothing is gained by it."""
        overlap = self.costs.overlap
        if overlap == "sum" or not any(
            role_of(action) is Role.FUSED for action in self.schedule.all_actions()
        ):
            return None
        if overlap == "max":
            return 0.0
        return min(1.0, overlap)

    def _head_of(self, rank: int) -> float:
        return min((self.head[s] for s in self.schedule.placement.stages_on(rank)), default=0.0)

    def _tail_of(self, rank: int) -> float:
        """From the end of the rank's last input gradient, of whatever stage, to the end of all."""
        stages = self.schedule.placement.stages_on(rank)
        return min((self.tail[s] - self.input[s] for s in stages), default=0.0)

    def _forced_idle(self, rank: int) -> float:
        """β: what a rank must idle before its first backward, since only so many forwards fit."""
        stages = self.schedule.placement.stages_on(rank)
        if not stages or not self.has_backward or self.saved is not None:
            return 0.0
        first_backward = min(self.back[stage] for stage in stages)
        return max(0.0, first_backward - self._head_of(rank) - self._most_forwards(rank))

    def _most_forwards(self, rank: int) -> float:
        """The longest a rank can be busy with forwards before its first backward."""
        stages = self.schedule.placement.stages_on(rank)
        everything = sum(self._num_microbatches(s) * self.forward[s] for s in stages)
        if self.memory_limit is None:
            return everything
        room = self.memory_limit - sum(self.costs.static_memory[rank].values())
        activation = self.costs.activation
        if len(stages) == 1:
            (stage,) = stages
            if not activation[stage]:
                return everything
            fitting = max(0, int(room / activation[stage] * (1 + 1e-12)))
            return min(fitting, self._num_microbatches(stage)) * self.forward[stage]
        # Fill the room with what is longest for its size; fractions only make the bound safer.
        time = 0.0
        for stage in sorted(stages, key=lambda s: activation[s] / max(self.forward[s], 1e-300)):
            count = float(self._num_microbatches(stage))
            if activation[stage]:
                count = min(count, max(0.0, room) / activation[stage])
            time += count * self.forward[stage]
            room -= count * activation[stage]
        return time
