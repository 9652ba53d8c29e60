"""Schedules on the V placement that trade memory for idle time, each from a pattern.

::

    stage → rank    0 → 1 → 2 → 3          activations of the first chunk live longest on rank 0,
                    7 ← 6 ← 5 ← 4          those of the second on the last rank: together they are
                                           equal on all ranks

    v_min    1/3 of 1F1B's activations      v_half   1/2      1f1b_v   2/3, without split backward
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pipeloom.errors import ScheduleError
from pipeloom.ir.placement import Placement
from pipeloom.ir.schedule import Schedule
from pipeloom.ir.topology import Topology
from pipeloom.schedules.entry import describe_schedule
from pipeloom.schedules.pass_costs import Costs, PassCosts, check_room, measure_passes
from pipeloom.schedules.pattern import Pattern, squeeze_best

#: Two chunks of F, I and W: the slots of one microbatch on one rank.
_PERIOD = 6


@describe_schedule(
    name="v_half",
    family="controllable memory",
    chunks=2,
    bubble="(6p−1−3k)/2 chunk-passes, k = 2⌊(p+2)/2⌋, where F=I=W",
    peak="⌊(p+2)/2⌋",
    keeps_peak=True,
)
def v_half(
    *,
    ranks: int,
    microbatches: int,
    costs: Costs | None = None,
    memory_limit: float | str | None = None,
) -> Schedule:
    """V-Half: half of 1F1B's activations, and less idle time.

    ::

        lower case: the second chunk
        rank 0   F0 F1 F2 ·  ·  ·  ·  f0 i0 F3 f1 i1 w0 F4 w1 f2 I0 i2 W0 F5 w2 f3 I1 i3 W1 F6 w3 …
        rank 1   ·  F0 F1 ·  ·  ·  f0 F2 f1 i0 F3 w0 i1 w1 f2 I0 F4 W0 i2 w2 f3 I1 F5 W1 i3 w3 f4 …
        rank 2   ·  ·  F0 F1 ·  f0 ·  f1 F2 ·  i0 F3 w0 f2 I0 i1 W0 F4 w1 f3 I1 i2 W1 F5 w2 f4 I2 …
        rank 3   ·  ·  ·  F0 f0 F1 f1 ·  ·  F2 f2 i0 I0 w0 F3 W0 f3 i1 I1 w1 F4 W1 f4 i2 I2 w2 F5 …

    Where F=I=W the makespan is 6m+6p−1−3k chunk-passes, which no schedule that keeps k chunks on
    this placement can beat, with k = 2⌊(p+2)/2⌋ chunks at the peak. With ``costs`` and
    ``memory_limit`` (in the costs' unit; that peak if not given) several patterns are tried.
    Any shape. Qi et al., Pipeline Parallelism with Controllable Memory, arXiv 2405.15362.
    """
    return _build(
        "v_half",
        [_HALF_ODD if ranks % 2 else _HALF_EVEN],
        ranks=ranks,
        microbatches=microbatches,
        peak=(ranks + 2) // 2,
        costs=costs,
        memory_limit=memory_limit,
    )


@describe_schedule(
    name="v_min",
    family="controllable memory",
    chunks=2,
    bubble="(6p−1−3k)/2 chunk-passes, k = 2⌊(p+4)/3⌋, where F=I=W",
    peak="⌊(p+4)/3⌋",
    keeps_peak=True,
)
def v_min(
    *,
    ranks: int,
    microbatches: int,
    costs: Costs | None = None,
    memory_limit: float | str | None = None,
) -> Schedule:
    """V-Min: a third of 1F1B's activations, for about its idle time.

    ::

        lower case: the second chunk
        rank 0   F0 F1 ·  ·  ·  ·  ·  f0 i0 F2 w0 ·  ·  f1 i1 I0 w1 F3 W0 f2 i2 I1 w2 F4 W1 f3 i3 …
        rank 1   ·  F0 ·  ·  ·  ·  f0 F1 ·  i0 w0 ·  f1 F2 I0 i1 W0 w1 f2 F3 I1 i2 W1 w2 f3 F4 I2 …
        rank 2   ·  ·  F0 ·  ·  f0 ·  ·  F1 ·  i0 f1 w0 I0 F2 W0 i1 f2 w1 I1 F3 W1 i2 f3 w2 I2 F4 …
        rank 3   ·  ·  ·  F0 f0 ·  ·  ·  ·  F1 f1 i0 I0 w0 W0 F2 f2 i1 I1 w1 W1 F3 f3 i2 I2 w2 W2 …

    Where F=I=W the makespan is 6m+6p−1−3k chunk-passes, which no schedule that keeps k chunks on
    this placement can beat, with k = 2⌊(p+4)/3⌋ chunks at the peak. With ``costs`` and
    ``memory_limit`` (in the costs' unit; that peak if not given) several patterns are tried.
    Any shape. Qi et al., Pipeline Parallelism with Controllable Memory, arXiv 2405.15362.
    """
    return _build(
        "v_min",
        _MIN_BY_REMAINDER[ranks % 3 : ranks % 3 + 1],
        ranks=ranks,
        microbatches=microbatches,
        peak=(ranks + 4) // 3,
        costs=costs,
        memory_limit=memory_limit,
    )


@describe_schedule(
    name="1f1b_v",
    family="controllable memory",
    chunks=2,
    bubble="2.5(p−1) passes of F, where B=2F and p mod 3 = 1",
    peak="⌊2p/3⌋+1",
)
def one_f_one_b_v(*, ranks: int, microbatches: int) -> Schedule:
    """1F1B on the V placement: two thirds of its activations, without splitting the backward.

    ::

        lower case: the second chunk; a backward takes two slots, B = 2F
        rank 0   F0 F1 F2 F3 F4 ·  ·  f0 b0 -- f1 b1 -- f2 b2 -- ·  ·  ·  ·  ·  ·  f3 b3 -- B0 -- …
        rank 1   ·  F0 F1 F2 F3 ·  f0 ·  f1 ·  b0 -- f2 b1 -- F4 b2 -- ·  ·  ·  f3 B0 -- ·  b3 -- …
        rank 2   ·  ·  F0 F1 F2 f0 ·  f1 ·  f2 ·  ·  b0 -- F3 b1 -- F4 B0 -- f3 b2 -- ·  B1 -- f4 …
        rank 3   ·  ·  ·  F0 f0 F1 f1 F2 f2 ·  ·  ·  ·  ·  b0 -- B0 -- F3 f3 b1 -- B1 -- F4 f4 b2 …

    Where B=2F about 2.5(p−1) forwards longer than the work, with ⌊2p/3⌋+1 activations at the
    peak, equal on all ranks. Any shape. Qi et al., arXiv 2405.15362.
    """
    passes = _unit_passes(ranks, microbatches)
    passes = replace(passes, room=[2 * ranks // 3 + 1.0] * ranks)
    placement = Placement.vee(ranks)
    squeezed = squeeze_best(
        _fit_full_backwards(ranks),
        passes,
        placement,
        microbatches=microbatches,
        splits_backward=False,
    )
    assert squeezed is not None, "the pattern leaves room for what it began"
    return Schedule(
        placement, Topology.chain(2 * ranks), microbatches, squeezed.rows, name="1f1b_v"
    )


class _Hops:
    """A pattern by the slots between a pass and the same of the next stage: on the way down and up
    for forwards, on the way up and down again for backwards, and at the three turns."""

    def __init__(
        self,
        *,
        forward: tuple[int, int],
        backward: tuple[int, int],
        turns: tuple[int, int, int],
        reach: float,
        overtakes: bool,
    ) -> None:
        self.forward, self.backward, self.turns = forward, backward, turns
        self.reach, self.overtakes = reach, overtakes

    def over(self, ranks: int) -> Pattern:
        """The pattern for a number of ranks."""
        forward_turn, turn, backward_turn = self.turns
        hops = [self.forward[0]] * (ranks - 1) + [forward_turn] + [self.forward[1]] * (ranks - 1)
        forward = _add_up(0, hops)
        hops = [self.backward[0]] * (ranks - 1) + [backward_turn] + [self.backward[1]] * (ranks - 1)
        backward = _add_up(forward[-1] + turn, hops)[::-1]
        return Pattern(_PERIOD, forward, backward, self.reach, self.overtakes)


_HALF_ODD = _Hops(forward=(2, 1), backward=(2, 1), turns=(2, 1, 1), reach=0, overtakes=False)
_HALF_EVEN = _Hops(forward=(2, 1), backward=(2, 1), turns=(3, 4, 1), reach=2, overtakes=True)
#: With p mod 3 = 0 a first backward right after the last forward would take the slot of a forward;
#: with p mod 3 = 2 there is memory for a slower turn, which rank 0 needs to begin without a gap.
_MIN_BY_REMAINDER = [
    _Hops(forward=(1, 1), backward=(1, 1), turns=(1, 3, 1), reach=2, overtakes=True),
    _Hops(forward=(1, 1), backward=(1, 1), turns=(1, 1, 1), reach=0, overtakes=False),
    _Hops(forward=(1, 1), backward=(1, 1), turns=(1, 5, 1), reach=4, overtakes=True),
]


def _add_up(start: int, hops: Sequence[int]) -> list[int]:
    slots = [start]
    for hop in hops:
        slots.append(slots[-1] + hop)
    return slots


def _build(
    name: str,
    for_equal_passes: list[_Hops],
    *,
    ranks: int,
    microbatches: int,
    peak: int,
    costs: Costs | None,
    memory_limit: float | str | None,
) -> Schedule:
    placement = Placement.vee(ranks)
    passes = measure_passes(
        name, placement, microbatches=microbatches, costs=costs, memory_limit=memory_limit
    )
    per_microbatch = [
        sum(passes.activation[stage] for stage in placement.stages_on(rank))
        for rank in range(ranks)
    ]
    if memory_limit is None:
        passes = replace(passes, room=[peak * size for size in per_microbatch])
    else:
        least = [(ranks + 4) // 3 * size for size in per_microbatch]
        check_room(name, passes, least)
    shapes = list(for_equal_passes)
    if costs is not None or memory_limit is not None:
        shapes += [_HALF_ODD, _HALF_EVEN, *_MIN_BY_REMAINDER]
    patterns = [shape.over(ranks) for shape in dict.fromkeys(shapes)]
    if costs is not None or memory_limit is not None:
        patterns += [
            replace(pattern, reach=reach, overtakes=overtakes)
            for pattern in patterns
            for reach, overtakes in ((0, False), (2, True), (6, True))
        ]
    squeezed = squeeze_best(patterns, passes, placement, microbatches=microbatches)
    if squeezed is None:
        raise ScheduleError(
            f"{name} found no order within a memory_limit of {memory_limit} for {ranks} ranks; "
            f"raise the limit"
        )
    return Schedule(placement, Topology.chain(2 * ranks), microbatches, squeezed.rows, name=name)


def _unit_passes(ranks: int, microbatches: int) -> PassCosts:
    return measure_passes(
        "1f1b_v",
        Placement.vee(ranks),
        microbatches=microbatches,
        costs=None,
        memory_limit=None,
    )


def _fit_full_backwards(ranks: int) -> list[Pattern]:
    """Patterns of F's of one slot and B's of two: forwards go from rank to rank without a pause;
    each backward takes the first slots, modulo the period, that its rank has left, such that the
    two that stay free for the rank's other backward lie side by side."""
    num_stages = 2 * ranks
    forward = list(range(num_stages))
    taken = [{rank % _PERIOD, (num_stages - 1 - rank) % _PERIOD} for rank in range(ranks)]
    backward = [0] * num_stages
    time = num_stages
    for stage in reversed(range(num_stages)):
        rank = min(stage, num_stages - 1 - stage)
        while not _takes_a_place(taken[rank], time, is_last=stage < ranks):
            time += 1
        backward[stage] = time
        taken[rank] |= {time % _PERIOD, (time + 1) % _PERIOD}
        time += 2
    by_turn = Pattern(_PERIOD, forward, backward, reach=2 * ranks)
    # Or fill the memory first. Until the first backward reaches rank r, 1+3r/2 microbatches come
    # back up to it; the rest of its memory may be taken by those on their way down.
    chunks_at_peak = 2 * (2 * ranks // 3 + 1)
    upward = [min(chunks_at_peak // 2, 1 + 3 * rank // 2) for rank in range(ranks)]
    downward = [chunks_at_peak - chunks for chunks in upward]
    filled = replace(by_turn, eager=downward + upward[::-1], eager_later=chunks_at_peak - 1)
    return [filled, by_turn, replace(by_turn, reach=3 * ranks)]


def _takes_a_place(taken: set[int], time: int, *, is_last: bool) -> bool:
    slots = {time % _PERIOD, (time + 1) % _PERIOD}
    if slots & taken:
        return False
    free = set(range(_PERIOD)) - taken - slots
    return is_last or any((slot + 1) % _PERIOD in free for slot in free)
