"""When every pass of a compute-only schedule runs, worked out from the words of the conventions.

Independent of the dependency table, the cost models and the simulator: it knows chains, latency
between ranks and four kinds of pass, nothing else. Times are per rank and microbatch; a chunk takes
its share. A fused pass costs ``overlap`` times the sum of its parts and gives its results at the
end.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import pairwise

from pipeloom.ir.action import Action
from pipeloom.ir.schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class TinyCosts:
    forward: float = 1
    input: float = 1
    weight: float = 1
    latency: float = 0
    extra_first: float = 0
    extra_last: float = 0
    overlap: float = 1


@dataclass(frozen=True)
class TinyResult:
    makespan: float
    span: float
    #: Activations of one microbatch on one rank, for each rank.
    peaks: tuple[float, ...]
    #: (rank, position) → (start, end)
    times: dict[tuple[int, int], tuple[float, float]]

    @property
    def peak(self) -> float:
        return max(self.peaks)


def simulate_tiny(
    schedule: Schedule, costs: TinyCosts | None = None, *, retained: float = 1
) -> TinyResult:
    """Run the order as early as possible; an order that gets stuck is an AssertionError."""
    costs = costs or TinyCosts()
    chains = schedule.topology.chains
    rank_of = schedule.placement.ranks
    before: dict[int, int] = {}
    after: dict[int, int] = {}
    share: dict[int, float] = {}
    extra: dict[int, float] = {}
    for chain in chains:
        for one, other in pairwise(chain):
            after[one], before[other] = other, one
        for stage in chain:
            share[stage] = schedule.num_ranks / len(chain)
            extra[stage] = 0
        extra[chain[0]] += costs.extra_first
        extra[chain[-1]] += costs.extra_last
    unit = {
        "F": costs.forward,
        "I": costs.input,
        "W": costs.weight,
        "B": costs.input + costs.weight,
    }

    def duration(action: Action) -> float:
        if action.parts:
            return costs.overlap * sum(map(duration, action.parts))
        assert action.stage is not None
        return unit[str(action.kind)] * (share[action.stage] + extra[action.stage])

    def needs(action: Action) -> list[tuple[str, int, int]]:
        _, stage, microbatch, parts, _ = action
        if parts:
            return [need for part in parts for need in needs(part)]
        assert stage is not None
        assert microbatch is not None
        kind = str(action.kind)
        if kind == "F":
            return [("F", before[stage], microbatch)] if stage in before else []
        if kind == "W":
            return [("I", stage, microbatch)]
        upstream = [("I", after[stage], microbatch)] if stage in after else []
        return [("F", stage, microbatch), *upstream]

    finished: dict[tuple[str, int, int], tuple[float, int]] = {}
    waiting: dict[tuple[str, int, int], list[int]] = {}
    position = [0] * schedule.num_ranks
    clock = [0.0] * schedule.num_ranks
    times: dict[tuple[int, int], tuple[float, float]] = {}
    ready = deque(range(schedule.num_ranks))
    while ready:
        rank = ready.popleft()
        row = schedule.actions[rank]
        while position[rank] < len(row):
            action = row[position[rank]]
            missing = [need for need in needs(action) if need not in finished]
            if missing:
                waiting.setdefault(missing[0], []).append(rank)
                break
            start = clock[rank]
            for need in needs(action):
                end, where = finished[need]
                start = max(start, end + (costs.latency if where != rank else 0))
            end = start + duration(action)
            times[rank, position[rank]] = (start, end)
            clock[rank] = end
            position[rank] += 1
            for part in action.parts or (action,):
                assert part.stage is not None
                assert part.microbatch is not None
                for what in {"F": "F", "I": "I", "B": "I", "W": "W"}[str(part.kind)]:
                    product = (what, part.stage, part.microbatch)
                    assert product not in finished, f"{product} twice"
                    assert rank_of[part.stage] == rank
                    finished[product] = (end, rank)
                    ready.extend(waiting.pop(product, []))
    stuck = {
        r: str(schedule.actions[r][p])
        for r, p in enumerate(position)
        if p < len(schedule.actions[r])
    }
    assert not stuck, f"stuck: {stuck}"
    return TinyResult(
        makespan=max(clock),
        span=max(
            clock[rank] - times[rank, 0][0] for rank, row in enumerate(schedule.actions) if row
        ),
        peaks=tuple(_peak(row, share, retained) for row in schedule.actions),
        times=times,
    )


def _peak(row: tuple[Action, ...], share: dict[int, float], retained: float) -> float:
    alive = peak = 0.0
    for action in row:
        parts = action.parts or (action,)
        alive += sum(share[p.stage] for p in parts if str(p.kind) == "F")  # type: ignore[index]
        peak = max(peak, alive)
        for part in parts:
            gone = {"F": 0, "B": 1, "I": 1 - retained, "W": retained}[str(part.kind)]
            alive -= gone * share[part.stage]  # type: ignore[index]
    assert abs(alive) < 1e-6 or all(str(p.kind) == "F" for action in row for p in (action,))
    return peak
