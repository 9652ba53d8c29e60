"""Repeat one microbatch's pattern, and squeeze what its start and end leave idle.

::

    a pattern: when each pass of a microbatch runs, in slots; the next one follows a period later
    rank 0   F · · · · · · f  i w · · · · · · I W
    rank 1     F · · · · f ·  · i w · · · · I W
    rank 2       F · · f · ·  · · i w · · I W
    rank 3         F f · · ·  · · · i w I W

A pattern fits together with itself when on every rank its slots differ modulo the period; then the
steady state has no idle time. At the start and at the end it leaves gaps. So its slots are not
taken as times, but as the order in which each rank prefers its passes: each rank runs the first
that is there; W's wait until nothing else can run, or until their memory is needed.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from pipeloom.ir.action import Action, Kind
from pipeloom.ir.placement import Placement
from pipeloom.schedules.pass_costs import PassCosts

_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Pattern:
    """The slots of one microbatch, and how freely ranks may deviate from their order."""

    period: float
    #: Per stage of the chain.
    forward: Sequence[float]
    backward: Sequence[float]
    #: A forward may run before its turn if its slot is at most this much later.
    reach: float = 0
    #: A backward may run before its turn.
    overtakes: bool = False
    #: Per stage: so many forwards may run as soon as they can, before the rank's first backward.
    eager: Sequence[int] = ()
    #: So many of every stage may do so from then on.
    eager_later: int = 0


@dataclass(frozen=True)
class Squeezed:
    """What came out."""

    makespan: float
    rows: tuple[tuple[Action, ...], ...]


def squeeze_pattern(
    pattern: Pattern,
    passes: PassCosts,
    placement: Placement,
    *,
    microbatches: int,
    splits_backward: bool = True,
) -> Squeezed | None:
    """Play a pattern through in time, within the room that every rank has.

    ``None`` if memory runs full with forwards whose backwards need more of it. A forward that runs
    before its turn leaves room for the later stages of its rank, so that this is rare.
    """
    num_stages, last = placement.num_stages, placement.num_stages - 1
    rank_of = [placement.rank_of(stage) for stage in range(num_stages)]
    stages_on = [placement.stages_on(rank) for rank in range(placement.num_ranks)]
    # When the output of each forward, and the input gradient of each backward, is there for whom
    # it is meant: lists by microbatch, which every stage goes through in order.
    outputs: list[list[float]] = [[] for _ in range(num_stages)]
    gradients: list[list[float]] = [[] for _ in range(num_stages)]
    own_outputs: list[list[float]] = [[] for _ in range(num_stages)]
    reserved = [
        sum(passes.activation[later] for later in stages_on[rank_of[stage]] if later > stage)
        for stage in range(num_stages)
    ]
    num_eager = pattern.eager or [0] * num_stages
    has_drained = [False] * placement.num_ranks
    backward_kind = Kind.I if splits_backward else Kind.B
    backward_time = (
        passes.input
        if splits_backward
        else [i + w for i, w in zip(passes.input, passes.weight, strict=True)]
    )
    free = list(passes.room)
    free_at = [0.0] * placement.num_ranks
    rows: list[list[Action]] = [[] for _ in range(placement.num_ranks)]
    pending: list[list[tuple[int, int]]] = [[] for _ in range(placement.num_ranks)]
    num_weights_done = [0] * placement.num_ranks

    def find_candidates(rank: int) -> list[tuple[float, bool, int]]:
        """(slot, is backward, stage) of the next passes of a rank, in the order of preference."""
        candidates = []
        for stage in stages_on[rank]:
            microbatch = len(own_outputs[stage])
            if microbatch < microbatches:
                slot = pattern.forward[stage] + pattern.period * microbatch
                candidates.append((slot, False, stage))
            microbatch = len(gradients[stage])
            if microbatch < microbatches:
                slot = pattern.backward[stage] + pattern.period * microbatch
                candidates.append((slot, True, stage))
        candidates.sort()
        return candidates

    def is_there(stage: int, is_backward: bool, time: float) -> bool:
        if is_backward:
            microbatch = len(gradients[stage])
            source = gradients[stage + 1] if stage < last else own_outputs[stage]
            return (
                microbatch < len(own_outputs[stage])
                and microbatch < len(source)
                and source[microbatch] <= time
            )
        microbatch = len(own_outputs[stage])
        if stage == 0:
            return True
        source = outputs[stage - 1]
        return microbatch < len(source) and source[microbatch] <= time

    def choose(rank: int, time: float) -> tuple[bool, int] | None:
        candidates = find_candidates(rank)
        for turn, (slot, is_backward, stage) in enumerate(candidates):
            if is_backward:
                allowed = turn == 0 or pattern.overtakes
            else:
                limit = pattern.eager_later if has_drained[rank] else num_eager[stage]
                eager = len(own_outputs[stage]) < limit
                spare = reserved[stage] if turn and not eager else 0.0
                fits = passes.activation[stage] + spare <= free[rank] + _TOLERANCE
                allowed = fits and (
                    eager or slot - candidates[0][0] <= (pattern.reach if turn else 0)
                )
            if allowed and is_there(stage, is_backward, time + _TOLERANCE):
                return is_backward, stage
        return None

    # Ranks look for work when they become free and when something arrives.
    order = count()
    alarms = [(0.0, next(order), rank) for rank in range(placement.num_ranks)]

    def run_forward(rank: int, stage: int, time: float) -> float:
        end = time + passes.forward[stage]
        rows[rank].append(Action(Kind.F, stage, len(own_outputs[stage])))
        own_outputs[stage].append(end)
        outputs[stage].append(end + passes.output_delay[stage])
        free[rank] -= passes.activation[stage]
        if stage < last:
            heapq.heappush(alarms, (outputs[stage][-1], next(order), rank_of[stage + 1]))
        return end

    def run_backward(rank: int, stage: int, time: float) -> float:
        end = time + backward_time[stage]
        microbatch = len(gradients[stage])
        rows[rank].append(Action(backward_kind, stage, microbatch))
        gradients[stage].append(end + passes.gradient_delay[stage])
        free[rank] += passes.activation[stage]
        has_drained[rank] = True
        if splits_backward:
            free[rank] -= passes.retained[stage]
            pending[rank].append((stage, microbatch))
        if stage:
            heapq.heappush(alarms, (gradients[stage][-1], next(order), rank_of[stage - 1]))
        return end

    def run_weight(rank: int, time: float) -> float:
        stage, microbatch = pending[rank][num_weights_done[rank]]
        num_weights_done[rank] += 1
        rows[rank].append(Action(Kind.W, stage, microbatch))
        free[rank] += passes.retained[stage]
        return time + passes.weight[stage]

    while alarms:
        time, _, rank = heapq.heappop(alarms)
        if time < free_at[rank]:
            continue
        choice = choose(rank, time)
        if choice is not None:
            is_backward, stage = choice
            end = (run_backward if is_backward else run_forward)(rank, stage, time)
        elif num_weights_done[rank] < len(pending[rank]):
            end = run_weight(rank, time)
        else:
            continue
        free_at[rank] = end
        heapq.heappush(alarms, (end, next(order), rank))
    if any(len(done) < microbatches for done in (*own_outputs, *gradients)):
        return None
    return Squeezed(max(free_at), tuple(map(tuple, rows)))


def squeeze_best(
    patterns: Sequence[Pattern],
    passes: PassCosts,
    placement: Placement,
    *,
    microbatches: int,
    splits_backward: bool = True,
) -> Squeezed | None:
    """The shortest of several patterns; where the run is long, they compete on a shorter one."""
    short = min(microbatches, 3 * placement.num_ranks + 2)

    def squeeze(pattern: Pattern, num_microbatches: int) -> Squeezed | None:
        return squeeze_pattern(
            pattern,
            passes,
            placement,
            microbatches=num_microbatches,
            splits_backward=splits_backward,
        )

    if len(patterns) > 1:
        scored = []
        for index, pattern in enumerate(patterns):
            squeezed = squeeze(pattern, short)
            if squeezed is not None:
                scored.append((round(squeezed.makespan, 9), index))
        patterns = [patterns[index] for _, index in sorted(scored)]
    for pattern in patterns:
        squeezed = squeeze(pattern, microbatches)
        if squeezed is not None:
            return squeezed
    return None
