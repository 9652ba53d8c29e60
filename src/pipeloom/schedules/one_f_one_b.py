"""One forward, one backward: no more activations alive than the pipeline is deep.

::

    1f1b, 4 ranks, 8 microbatches, F = 1, B = 2
    0 │0 1 2 3 · · · · · · 0 0 4 1 1 5 2 2 6 3 3 7 4 4 · 5 5 · 6 6 · 7 7
    1 │· 0 1 2 · · · · 0 0 3 1 1 4 2 2 5 3 3 6 4 4 7 5 5 · 6 6 · 7 7 · ·
    2 │· · 0 1 · · 0 0 2 1 1 3 2 2 4 3 3 5 4 4 6 5 5 7 6 6 · 7 7 · · · ·
    3 │· · · 0 0 0 1 1 1 2 2 2 3 3 3 4 4 4 5 5 5 6 6 6 7 7 7 · · · · · ·
"""

from __future__ import annotations

from collections.abc import Iterable

from pipeloom.ir.action import Action, Kind
from pipeloom.ir.schedule import Schedule
from pipeloom.schedules.entry import describe_schedule
from pipeloom.schedules.phases import alternate, make_looped, make_passes


@describe_schedule(
    name="1f1b", family="one forward, one backward", bubble="(p−1)(F+I+W)", peak="min(p−r, m)"
)
def one_f_one_b(*, ranks: int, microbatches: int) -> Schedule:
    """One forward, one backward in turn, after just enough forwards to reach the last rank.

    ::

        rank 0   F0 F1 F2 F3 ·  ·  ·  ·  ·  ·  B0 -- F4 B1 -- F5 B2 -- F6 B3 -- F7 B4 -- ·  B5 -- …
        rank 1   ·  F0 F1 F2 ·  ·  ·  ·  B0 -- F3 B1 -- F4 B2 -- F5 B3 -- F6 B4 -- F7 B5 -- ·  B6 …
        rank 2   ·  ·  F0 F1 ·  ·  B0 -- F2 B1 -- F3 B2 -- F4 B3 -- F5 B4 -- F6 B5 -- F7 B6 -- · …
        rank 3   ·  ·  ·  F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- F4 B4 -- F5 B5 -- F6 B6 -- F7 B7 -- …

    p−1−r forwards of warm-up on rank r. Bubble (p−1)(F+I+W), peak min(p−r, m) activations on
    rank r. Any shape. Narayanan et al., PipeDream-Flush, arXiv 2006.09503.
    """
    return _build("1f1b", ranks=ranks, microbatches=microbatches, warmup_per_hop=1)


@describe_schedule(
    name="eager_1f1b",
    family="one forward, one backward",
    bubble="(p−1)(F+I+W), latency hidden",
    peak="2(p−r)−1",
)
def eager_1f1b(*, ranks: int, microbatches: int) -> Schedule:
    """1F1B with twice the warm-up, so that messages travel while ranks compute.

    ::

        rank 0   F0 F1 F2 F3 F4 F5 F6 ·  ·  ·  B0 -- F7 B1 -- ·  B2 -- ·  B3 -- ·  B4 -- ·  B5 -- …
        rank 1   ·  F0 F1 F2 F3 F4 ·  ·  B0 -- F5 B1 -- F6 B2 -- F7 B3 -- ·  B4 -- ·  B5 -- ·  B6 …
        rank 2   ·  ·  F0 F1 F2 ·  B0 -- F3 B1 -- F4 B2 -- F5 B3 -- F6 B4 -- F7 B5 -- ·  B6 -- · …
        rank 3   ·  ·  ·  F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- F4 B4 -- F5 B5 -- F6 B6 -- F7 B7 -- …

    2(p−1−r) forwards of warm-up on rank r. Without latency as long as 1F1B, with it shorter; peak
    min(2(p−r)−1, m) activations on rank r. Any shape. Zhuang et al., arXiv 2211.05322.
    """
    return _build("eager_1f1b", ranks=ranks, microbatches=microbatches, warmup_per_hop=2)


def _build(name: str, *, ranks: int, microbatches: int, warmup_per_hop: int) -> Schedule:
    every = range(microbatches)

    def make_row(rank: int) -> Iterable[Action]:
        return alternate(
            make_passes(Kind.F, rank, every),
            make_passes(Kind.B, rank, every),
            warmup=warmup_per_hop * (ranks - 1 - rank),
        )

    return make_looped(name, ranks=ranks, microbatches=microbatches, make_row=make_row)
