"""ZB-V: zero bubble on the V placement, where the last stage lies on the first rank."""

from __future__ import annotations

from collections.abc import Iterator

from pipeloom.ir.action import Action, Kind
from pipeloom.ir.schedule import Schedule
from pipeloom.schedules.entry import describe_schedule
from pipeloom.schedules.phases import make_vee


@describe_schedule(
    name="zbv",
    aliases=("ZBVZeroBubble", "zb_v"),
    family="zero bubble",
    chunks=2,
    bubble="(p−1)F/2, span 0, where F=I=W and m ≥ 2p",
    peak="p",
)
def zbv(*, ranks: int, microbatches: int) -> Schedule:
    """ZB-V: no bubble where passes are equal, at 1F1B's memory, the same on every rank.

    ::

        lower case: the second chunk
        rank 0   F0 F1 F2 F3 F4 F5 F6 f0 i0 w0 f1 i1 w1 f2 i2 w2 f3 i3 w3 F7 I0 W0 f4 i4 w4 I1 W1 …
        rank 1   ·  F0 F1 F2 F3 F4 f0 F5 f1 i0 w0 f2 i1 w1 f3 i2 w2 F6 I0 W0 f4 i3 w3 F7 I1 W1 f5 …
        rank 2   ·  ·  F0 F1 F2 f0 F3 f1 F4 f2 i0 w0 f3 i1 w1 F5 I0 W0 f4 i2 w2 F6 I1 W1 f5 i3 w3 …
        rank 3   ·  ·  ·  F0 f0 F1 f1 F2 f2 F3 f3 i0 w0 F4 I0 W0 f4 i1 w1 F5 I1 W1 f5 i2 w2 F6 I2 …

    Warm-up: 2(p−r)−1 F's of the first chunk, r times one F of the second and one of the first,
    p−r times F, I, W of the second. Then F I W of each chunk in turn; at the end the W's of r
    microbatches per chunk wait until no I is left to run.

    With F=I=W and m ≥ 2p each rank works without a pause, and the makespan is (p−1)F/2 longer than
    m(F+I+W). Peak p activations. Any number of microbatches. Qi et al., arXiv 2401.10241.
    """
    return make_vee(
        "zbv",
        ranks=ranks,
        microbatches=microbatches,
        make_row=lambda rank: _make_row(rank, ranks, microbatches),
    )


def _make_row(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    # A pipeline with fewer microbatches runs the order of the shortest full one and leaves out
    # what it does not have.
    full = max(2 * ranks - 1, microbatches)
    down, up = rank, 2 * ranks - 1 - rank
    done = {(kind, stage): 0 for kind in (Kind.F, Kind.I, Kind.W) for stage in (down, up)}

    def run(stage: int, *kinds: Kind) -> Iterator[Action]:
        for kind in kinds:
            microbatch = done[kind, stage]
            done[kind, stage] = microbatch + 1
            if microbatch < microbatches:
                yield Action(kind, stage, microbatch)

    # Warm-up.
    for _ in range(2 * (ranks - rank) - 1):
        yield from run(down, Kind.F)
    for _ in range(rank):
        yield from run(up, Kind.F)
        yield from run(down, Kind.F)
    for _ in range(ranks - rank):
        yield from run(up, Kind.F, Kind.I, Kind.W)
    # Steady state: three passes of the first chunk, three of the second.
    while done[Kind.F, up] < full:
        if done[Kind.F, down] < full:
            yield from run(down, Kind.F)
        yield from run(down, Kind.I, Kind.W)
        yield from run(up, Kind.F, Kind.I, Kind.W)
    # Drain: I's first, since the ranks before wait for them.
    for _ in range(rank):
        yield from run(down, Kind.I)
        yield from run(up, Kind.I)
    for _ in range(ranks - rank):
        yield from run(down, Kind.I, Kind.W)
    for stage in (up, down):
        while done[Kind.W, stage] < full:
            yield from run(stage, Kind.W)
