"""The handcrafted zero-bubble schedules of one chunk per rank: W's fill what 1F1B waits.

::

    zb_h1, 4 ranks, 8 microbatches, F = I = W = 1; lower case: W
    0 │F0 F1 F2 F3 ·· ·· ·· I0 w0 F4 I1 w1 F5 I2 w2 F6 …
    1 │·· F0 F1 F2 ·· ·· I0 F3 I1 w0 F4 I2 w1 F5 I3 w2 …
    2 │·· ·· F0 F1 ·· I0 F2 I1 F3 I2 w0 F4 I3 w1 F5 I4 …
    3 │·· ·· ·· F0 I0 F1 I1 F2 I2 F3 I3 w0 F4 I4 w1 F5 …
"""

from __future__ import annotations

from collections.abc import Iterable

from pipeloom.ir.action import Action, Kind
from pipeloom.ir.schedule import Schedule
from pipeloom.schedules.entry import Constraint, describe_schedule
from pipeloom.schedules.phases import alternate_with_weights, make_looped, make_passes

FILLS_TWICE_THE_PIPELINE = Constraint(
    "at least 2·ranks − 1 microbatches", lambda shape: shape.microbatches >= 2 * shape.ranks - 1
)


@describe_schedule(
    name="zb_h1", family="zero bubble", bubble="(p−1)·max(F, I, F+I−W)", peak="min(p, m)"
)
def zb_h1(*, ranks: int, microbatches: int) -> Schedule:
    """ZB-H1: a third of 1F1B's bubble at 1F1B's memory.

    ::

        rank 0   F0 F1 F2 F3 ·  ·  ·  I0 W0 F4 I1 W1 F5 I2 W2 F6 I3 W3 F7 I4 W4 I5 W5 I6 W6 I7 W7
        rank 1   ·  F0 F1 F2 ·  ·  I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 F6 I4 W3 F7 I5 W4 I6 W5 I7 W6 W7
        rank 2   ·  ·  F0 F1 ·  I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 F6 I5 W3 F7 I6 W4 I7 W5 W6 W7
        rank 3   ·  ·  ·  F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 F6 I6 W3 F7 I7 W4 W5 W6 W7

    Warm-up as 1F1B; rank r begins its W's after r backward steps, which keeps min(p, m) activations
    alive on every rank. Bubble (p−1)·max(F, I, F+I−W). Any shape.
    Qi et al., Zero Bubble, arXiv 2401.10241.
    """
    return _build("zb_h1", ranks=ranks, microbatches=microbatches, pace=1)


@describe_schedule(
    name="zb_h2",
    family="zero bubble",
    constraints=(FILLS_TWICE_THE_PIPELINE,),
    bubble="(p−1)·max(F, F+I−2W, I−F); of the span (p−1)·max(0, F+I−2W, I−F)",
    peak="2p−1",
)
def zb_h2(*, ranks: int, microbatches: int) -> Schedule:
    """ZB-H2: no bubble at all where passes are equal, at twice 1F1B's memory.

    ::

        rank 0   F0 F1 F2 F3 F4 F5 F6 I0 W0 F7 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5 I6 W6 I7 W7 ·  ·  ·
        rank 1   ·  F0 F1 F2 F3 F4 I0 F5 I1 F6 I2 W0 F7 I3 W1 I4 W2 I5 W3 I6 W4 I7 W5 W6 W7 ·  ·
        rank 2   ·  ·  F0 F1 F2 I0 F3 I1 F4 I2 F5 I3 F6 I4 W0 F7 I5 W1 I6 W2 I7 W3 W4 W5 W6 W7 ·
        rank 3   ·  ·  ·  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 F5 I5 F6 I6 W0 F7 I7 W1 W2 W3 W4 W5 W6 W7

    Warm-up 2(p−1−r), and rank r begins its W's after 2r backward steps: 2p−1 activations on every
    rank. Each rank works without a pause from its first to its last pass, but the ranks begin and
    end one after another, so what is added to m(F+I+W) is (p−1)·max(F, F+I−2W, I−F) from the start
    of the first to the end of the last, and (p−1)·max(0, F+I−2W, I−F) on any one rank.
    At least 2p−1 microbatches. Qi et al., Zero Bubble, arXiv 2401.10241.
    """
    return _build("zb_h2", ranks=ranks, microbatches=microbatches, pace=2)


def _build(name: str, *, ranks: int, microbatches: int, pace: int) -> Schedule:
    every = range(microbatches)

    def make_row(rank: int) -> Iterable[Action]:
        return alternate_with_weights(
            make_passes(Kind.F, rank, every),
            make_passes(Kind.I, rank, every),
            warmup=pace * (ranks - 1 - rank),
            lag=pace * rank,
        )

    return make_looped(name, ranks=ranks, microbatches=microbatches, make_row=make_row)
