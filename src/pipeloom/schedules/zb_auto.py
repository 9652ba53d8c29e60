"""Zero bubble made to measure: one chunk per rank, any costs per stage, any memory limit.

::

    rank i    F × warm-up    then, microbatch by microbatch:   I  F  I  F  …  I  I  I
                                                              ↑  ↑
                                         a W goes here where the rank would wait for long enough,
                                         or where its memory is needed

A schedule is fixed by how far the forwards run ahead on each rank (its *lead*) and by the rule that
says when a W goes before a pass that has not arrived yet. Both are tried in some variants, each
played through in time; the best is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product

from pipeloom.ir.action import Action, Kind
from pipeloom.ir.placement import Placement
from pipeloom.ir.schedule import Schedule
from pipeloom.schedules.entry import describe_schedule
from pipeloom.schedules.pass_costs import Costs, PassCosts, check_room, measure_passes
from pipeloom.schedules.phases import make_looped

_TOLERANCE = 1e-9


@describe_schedule(
    name="zb_auto",
    aliases=("zero_bubble", "zb"),
    family="zero bubble",
    bubble="that of zb_h1 at limit p, near zero on each rank from 2p",
    peak="the memory limit, 2p unless given",
)
def zb_auto(
    *,
    ranks: int,
    microbatches: int,
    costs: Costs | None = None,
    memory_limit: float | str | None = None,
) -> Schedule:
    """Zero bubble for given costs per stage and a given memory limit.

    ::

        unit costs, limit 8: 4 ranks, no pause from first to last pass
        rank 0   F0 F1 F2 F3 F4 F5 F6 I0 F7 I1 W0 I2 W1 I3 W2 I4 W3 I5 W4 I6 W5 I7 W6 W7 ·  ·  ·
        rank 1   ·  F0 F1 F2 F3 F4 I0 F5 I1 F6 I2 F7 I3 W0 I4 W1 I5 W2 I6 W3 I7 W4 W5 W6 W7 ·  ·
        rank 2   ·  ·  F0 F1 F2 I0 F3 I1 F4 I2 F5 I3 F6 I4 F7 I5 W0 I6 W1 I7 W2 W3 W4 W5 W6 W7 ·
        rank 3   ·  ·  ·  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 F5 I5 F6 I6 F7 I7 W0 W1 W2 W3 W4 W5 W6 W7

    ``costs`` is a cost model or a mapping with its fields, per rank or per stage (default: F = I =
    W = 1, no latency). ``memory_limit`` is what a rank may hold, in the model's unit of memory: the
    activation of one microbatch unless it says otherwise. If not given, it is 2p of them.

    With equal costs and limit p this is ZB-H1 where that is best; with 2p it nearly always attains
    the lower bound of the makespan.
    Any shape. Qi et al., Zero Bubble, arXiv 2401.10241.
    """
    passes = measure_passes(
        "zb_auto",
        Placement.loop(ranks),
        microbatches=microbatches,
        costs=costs,
        memory_limit=memory_limit,
    )
    if memory_limit is None:
        passes = _with_default_room(passes)
    else:
        check_room("zb_auto", passes, passes.activation)
    rows = _find_best(passes, ranks=ranks, microbatches=microbatches).rows

    return make_looped(
        "zb_auto",
        ranks=ranks,
        microbatches=microbatches,
        make_row=lambda rank: (Action(kind, rank, microbatch) for kind, microbatch in rows[rank]),
    )


def _with_default_room(passes: PassCosts) -> PassCosts:
    """Room for 2p microbatches on every rank."""
    num_ranks = len(passes.forward)
    return replace(passes, room=[2 * num_ranks * activation for activation in passes.activation])


@dataclass(frozen=True)
class _Leads:
    """How far forwards run ahead of backwards on each rank: at first, and later on."""

    warmup: tuple[int, ...]
    steady: tuple[int, ...]


@dataclass(frozen=True)
class _Rule:
    """When a W goes before a pass that has not arrived yet."""

    #: The share of a W that must fit into the wait.
    fit: float = 1.0
    #: Before an F, before an I, before the I's after the last F: also where the wait would make
    #: this rank idle for longer than the idlest rank so far.
    before_forward: bool = False
    before_input: bool = False
    in_drain: bool = False
    #: Whether the time before a rank's first pass counts as idle.
    counts_start: bool = False


#: The rules that are best most often.
_COMMON_RULES = (
    _Rule(),
    _Rule(before_forward=True, before_input=True, in_drain=True),
    _Rule(fit=0.3),
)
_ALL_RULES = tuple(
    _Rule(fit, before_forward, before_input, in_drain, counts_start)
    for fit, before_forward, before_input, in_drain, counts_start in product(
        (1.0, 0.6, 0.3), (False, True), (False, True), (False, True), (False, True)
    )
    if (before_input or not in_drain) and (before_forward or before_input or not counts_start)
)


@dataclass(frozen=True)
class _Played:
    """A candidate played through."""

    makespan: float
    span: float
    rows: list[list[tuple[Kind, int]]]

    @property
    def badness(self) -> tuple[float, float]:
        """The makespan counts most; but a rank kept busy for much less is worth a little of it."""
        return (round(3 * self.makespan + self.span, 9), round(self.makespan, 9))


def _find_best(passes: PassCosts, *, ranks: int, microbatches: int) -> _Played:
    """Leads first, with the common rules; then all rules with the best leads; both on a shorter
    run where the run is long. The finalists run in full."""
    short = microbatches if ranks * microbatches <= 1024 else min(microbatches, 3 * ranks + 2)

    def rank_candidates(
        candidates: Iterable[tuple[_Leads, _Rule]], num_microbatches: int, keep: int
    ) -> list[tuple[_Leads, _Rule]]:
        scored = [
            (_play(passes, leads, rule, num_microbatches).badness, index, (leads, rule))
            for index, (leads, rule) in enumerate(candidates)
        ]
        return [candidate for _, _, candidate in sorted(scored, key=lambda s: s[:2])[:keep]]

    all_leads = list(dict.fromkeys(_propose_leads(passes, microbatches)))
    first = rank_candidates(product(all_leads, _COMMON_RULES), short, 8)
    best_leads = list(dict.fromkeys(leads for leads, _ in first))[:2]
    second = rank_candidates(product(best_leads, _ALL_RULES), short, 4)
    finalists = dict.fromkeys(first[:4] + second)
    return min(
        (_play(passes, leads, rule, microbatches) for leads, rule in finalists),
        key=lambda played: played.badness,
    )


def _propose_leads(passes: PassCosts, microbatches: int) -> Iterator[_Leads]:
    """Fixed leads per hop as in ZB-H1 and ZB-H2, and leads that fill the time until the first
    backward arrives; none larger than memory allows, none larger than that of the rank before."""
    num_ranks = len(passes.forward)
    most = [
        max(
            1,
            min(microbatches, int(min(room / size, microbatches) + _TOLERANCE))
            if size
            else microbatches,
        )
        for room, size in zip(passes.room, passes.activation, strict=True)
    ]

    def bounded(leads: Iterable[float]) -> tuple[int, ...]:
        result: list[int] = []
        for lead, limit in zip(leads, most, strict=True):
            # Forwards beyond the lead of the rank before would never arrive in time.
            ahead = result[-1] if result else microbatches
            result.append(max(1, min(int(lead + _TOLERANCE), limit, ahead)))
        return tuple(result)

    hops = range(num_ranks - 1, -1, -1)
    warmups = [
        bounded(base + slope * hop for hop in hops) for slope in (1, 2, 3) for base in (1, 2)
    ]
    waits = list(_waits_for_first_backward(passes))
    for rounding in (0.0, 0.25, 0.5, 0.75, 0.999, 1.5):
        fitting = [
            wait / forward + rounding if forward else microbatches
            for wait, forward in zip(waits, passes.forward, strict=True)
        ]
        warmups.append(bounded(fitting))
    for warmup in dict.fromkeys(warmups):
        yield _Leads(warmup, warmup)
        for slope, extra in ((1, 0), (2, 0), (2, 1)):
            steady = bounded(1 + extra + slope * hop for hop in hops)
            yield _Leads(warmup, tuple(map(min, warmup, steady)))


def _waits_for_first_backward(passes: PassCosts) -> list[float]:
    """Per rank: the time from when its first forward can start to when its first I can."""
    num_ranks = len(passes.forward)
    wait = 0.0
    waits = [0.0] * num_ranks
    for rank in range(num_ranks - 1, -1, -1):
        wait += passes.forward[rank]
        waits[rank] = wait
        if rank:
            wait += passes.input[rank] + passes.gradient_delay[rank] + passes.output_delay[rank - 1]
    return waits


def _play(passes: PassCosts, leads: _Leads, rule: _Rule, microbatches: int) -> _Played:
    """Play one candidate through in time.

    Passes are taken up in an order in which all that a pass waits for has been taken up before:
    the warm-up forwards, then for each microbatch its I's from the last rank to the first and,
    from the first rank to the last, the forwards that go after them.
    """
    num_ranks = len(passes.forward)
    F, I, W = passes.forward, passes.input, passes.weight
    clock = [0.0] * num_ranks
    started: list[float | None] = [None] * num_ranks
    idle = [0.0] * num_ranks
    most_idle = 0.0
    alive = [0.0] * num_ranks
    next_weight = [0] * num_ranks
    num_pending = [0] * num_ranks
    next_forward = [0] * num_ranks
    outputs: list[list[float]] = [[] for _ in range(num_ranks)]
    rows: list[list[tuple[Kind, int]]] = [[] for _ in range(num_ranks)]
    warmup = [min(lead, microbatches) for lead in leads.warmup]
    steady = leads.steady

    def run_weight(rank: int) -> None:
        rows[rank].append((Kind.W, next_weight[rank]))
        next_weight[rank] += 1
        num_pending[rank] -= 1
        clock[rank] += W[rank]
        alive[rank] -= passes.retained[rank]

    def run_weights_before(rank: int, arrival: float, size: float, against_idling: bool) -> None:
        room = passes.room[rank] * (1 + _TOLERANCE) - size
        while num_pending[rank] and alive[rank] > room:
            run_weight(rank)
        while num_pending[rank] and clock[rank] + rule.fit * W[rank] <= arrival + _TOLERANCE:
            run_weight(rank)
        wait = arrival - clock[rank]
        if (
            against_idling
            and num_pending[rank]
            and wait > _TOLERANCE
            and idle[rank] + wait > most_idle + _TOLERANCE
        ):
            run_weight(rank)

    def run(rank: int, kind: Kind, microbatch: int, arrival: float, duration: float) -> float:
        nonlocal most_idle
        if arrival > clock[rank]:
            if started[rank] is not None or rule.counts_start:
                idle[rank] += arrival - clock[rank]
                most_idle = max(most_idle, idle[rank])
            clock[rank] = arrival
        if started[rank] is None:
            started[rank] = clock[rank]
        clock[rank] += duration
        rows[rank].append((kind, microbatch))
        return clock[rank]

    def run_forward(rank: int) -> None:
        microbatch = next_forward[rank]
        next_forward[rank] += 1
        arrival = outputs[rank - 1][microbatch] + passes.output_delay[rank - 1] if rank else 0.0
        size = passes.activation[rank]
        if num_pending[rank]:
            run_weights_before(rank, arrival, size, rule.before_forward)
        alive[rank] += size
        outputs[rank].append(run(rank, Kind.F, microbatch, arrival, F[rank]))

    for microbatch in range(max(warmup)):
        for rank in range(num_ranks):
            if microbatch < warmup[rank]:
                run_forward(rank)
    for microbatch in range(microbatches):
        gradient = 0.0
        for rank in range(num_ranks - 1, -1, -1):
            arrival = outputs[rank][microbatch] if rank == num_ranks - 1 else gradient
            if num_pending[rank]:
                drains = microbatch + steady[rank] >= microbatches
                against_idling = rule.in_drain if drains else rule.before_input
                run_weights_before(rank, arrival, 0.0, against_idling)
            end = run(rank, Kind.I, microbatch, arrival, I[rank])
            gradient = end + passes.gradient_delay[rank]
            alive[rank] -= passes.activation[rank] - passes.retained[rank]
            num_pending[rank] += 1
        for rank in range(num_ranks):
            if next_forward[rank] <= microbatch + steady[rank] < microbatches:
                run_forward(rank)
    for rank in range(num_ranks):
        while num_pending[rank]:
            run_weight(rank)
    starts = [start or 0.0 for start in started]
    return _Played(
        makespan=max(clock),
        span=max(end - start for end, start in zip(clock, starts, strict=True)),
        rows=rows,
    )
