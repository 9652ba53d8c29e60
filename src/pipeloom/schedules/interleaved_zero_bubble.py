"""ZB1P over several chunks per rank: interleaved, split backward, W where it fills the bubble."""

from __future__ import annotations

from collections.abc import Iterable

from pipeloom.ir.action import Action, Kind
from pipeloom.ir.schedule import Schedule
from pipeloom.schedules.entry import describe_schedule
from pipeloom.schedules.interleaved import EQUAL_ROUNDS, size_of_rounds
from pipeloom.schedules.phases import (
    alternate_with_weights,
    deal_passes,
    make_looped,
    split_into_groups,
)


@describe_schedule(
    name="interleaved_zero_bubble",
    aliases=("zb1p",),
    family="zero bubble",
    constraints=(EQUAL_ROUNDS,),
    bubble="(p−1)·max(F, I, F+I−W)/v",
    peak="min(p, m)",
)
def interleaved_zero_bubble(*, ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """ZB1P: interleaved with split backward, where rank r begins its W's r steps late.

    ::

        rank 0   F0 F1 F2 F3  f0 f1 f2   f3 i0 w0  F4 i1 w1 …
        rank 1   F0 F1 F2 F3  f0 f1      f2 i0     f3 i1 w0  F4 i2 w1 …
        rank 2   F0 F1 F2 F3  f0         f1 i0     f2 i1     f3 i2 w0 …
        rank 3   F0 F1 F2 F3             f0 i0     f1 i1     f2 i2     f3 i3 w0 …

    The W's that are left fill the end, where 1F1B waits. Bubble (p−1)·max(F, I, F+I−W)/v, peak
    min(p, m) activations. Microbatches divisible by the number of rounds, microbatches // ranks.
    Qi et al., Zero Bubble, arXiv 2401.10241.
    """
    size = size_of_rounds(ranks, microbatches)
    groups = split_into_groups(microbatches, size)

    def make_row(rank: int) -> Iterable[Action]:
        stages = range(rank, ranks * chunks, ranks)
        return alternate_with_weights(
            deal_passes(Kind.F, stages, groups),
            deal_passes(Kind.I, reversed(stages), groups),
            warmup=(chunks - 1) * size + ranks - 1 - rank,
            lag=rank,
        )

    return make_looped(
        "interleaved_zero_bubble",
        ranks=ranks,
        microbatches=microbatches,
        chunks=chunks,
        make_row=make_row,
    )
