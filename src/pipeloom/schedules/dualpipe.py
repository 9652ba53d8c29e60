"""DualPipe and its V: microbatches from both ends, a forward and a backward at the same time.

::

    dualpipe    chain 0: 0 → 1 → 2 → 3      dualpipev    down: 0 → 1 → 2 → 3
                chain 1: 7 ← 6 ← 5 ← 4                     up: 7 ← 6 ← 5 ← 4   (after 3)
    rank                 0   1   2   3      rank              0   1   2   3

In both, a rank holds a *near* stage, which microbatches reach early, and a *far* one, and runs
forwards of the one overlapped with backwards of the other. A DualPipe over p ranks is two halves
that mirror each other; each half, and a DualPipeV, runs the same eight steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from pipeloom.ir.action import Action, Kind, fuse
from pipeloom.ir.placement import Placement
from pipeloom.ir.schedule import Schedule
from pipeloom.ir.topology import Topology
from pipeloom.schedules.entry import Constraint, describe_schedule
from pipeloom.schedules.phases import make_vee

TWICE_THE_RANKS = Constraint(
    "at least 2·ranks microbatches", lambda shape: shape.microbatches >= 2 * shape.ranks
)
EVEN_MICROBATCHES = Constraint(
    "an even number of microbatches", lambda shape: shape.microbatches % 2 == 0
)
EVEN_RANKS = Constraint("an even number of ranks", lambda shape: shape.ranks % 2 == 0, part="ranks")


@describe_schedule(
    name="dualpipev",
    aliases=("cut_in_half",),
    family="dualpipe",
    constraints=(TWICE_THE_RANKS,),
    chunks=2,
    bubble="(p−1)(F&B+B−3W)/2, where F=I=W",
    peak="p+½",
)
def dualpipev(*, ranks: int, microbatches: int) -> Schedule:
    """DualPipeV: one half of DualPipe, folded into a V, with overlapped forwards and backwards.

    ::

        lower case: the second chunk; (…) overlapped
        rank 0   F0 F1 F2 F3 F4 F5  F6 f0   i0w0f1 i1w1f2 i2w2f3  (F7 b3)(f4 B0)  b4(f5 B1) …
        rank 1   F0 F1 F2 F3        F4 f0 F5 f1    i0w0f2 i1w1f3  (F6 b2)(f4 B0)  …
        rank 2   F0 F1              F2 f0 F3 f1 F4 f2     i0w0f3  (F5 b1)(f4 B0)  …
        rank 3                      F0 f0 F1 f1 F2 f2 F3 f3        F4 b0 (f4 B0)  …

    Warm-up 2(p−1−r) F's of the first chunk. Bubble (p−1)(F&B+B−3W) chunk-times where F=I=W, F&B
    being the time of an overlapped pair; peak p+½ activations. At least 2p microbatches.
    DeepSeek-AI, arXiv 2412.19437; Qi et al., "cut-in-half".
    """
    every = range(microbatches)
    return make_vee(
        "dualpipev",
        ranks=ranks,
        microbatches=microbatches,
        make_row=lambda rank: _Steps(rank, every, 2 * ranks - 1 - rank, every).run(rank, ranks),
    )


@describe_schedule(
    name="dualpipe",
    family="dualpipe",
    constraints=(EVEN_RANKS, EVEN_MICROBATCHES, TWICE_THE_RANKS),
    bubble="(p/2−1)(F&B+B−3W), where F=I=W",
    peak="p+1",
)
def dualpipe(*, ranks: int, microbatches: int) -> Schedule:
    """DualPipe: two chains in opposite directions, forwards of one over backwards of the other.

    ::

        4 ranks, 8 microbatches: 0..3 enter at rank 0 (upper case), 4..7 at rank 3 (lower case)
        rank 0   F0 F1  F2 f4   i4w4f5  (F3 b5)(f6 B0)  b6(f7 B1)  b7 I2  W2 I3  W3
        rank 1          F0 f4 F1 f5     F2 b4 (f6 B0)(F3 b5)(f7 B1)  b6 B2 i7 I3  w7 W3
        rank 2          f4 F0 f5 F1     f6 B0 (F2 b4)(f7 B1)(F3 b5)  B2 b6 I3 i7  W3 w7
        rank 3   f4 f5  f6 F0   I0W0F1  (f7 B1)(F2 b4)  B2(F3 b5)  B3 i6  w6 i7  w7

    Every rank holds two stages, so that the parameters are there twice. Bubble
    (p/2−1)(F&B+B−3W) where F=I=W, F&B being the time of an overlapped pair; peak p+1 activations.
    Ranks and microbatches even, at least 2p microbatches. DeepSeek-AI, arXiv 2412.19437.
    """
    half = microbatches // 2

    def make_row(rank: int) -> tuple[Action, ...]:
        ends = [(rank, range(half)), (2 * ranks - 1 - rank, range(half, microbatches))]
        if rank >= ranks // 2:
            ends.reverse()
        (near, near_microbatches), (far, far_microbatches) = ends
        steps = _Steps(near, near_microbatches, far, far_microbatches)
        return steps.run(min(rank, ranks - 1 - rank), ranks // 2)

    return Schedule(
        placement=Placement.mirrored(ranks),
        topology=Topology.bidirectional(ranks),
        num_microbatches=microbatches,
        actions=tuple([make_row(rank) for rank in range(ranks)]),
        name="dualpipe",
    )


class _Steps:
    """The eight steps of one rank; each stage's passes go through its microbatches in order."""

    def __init__(
        self, near: int, near_microbatches: range, far: int, far_microbatches: range
    ) -> None:
        self.near, self.far = near, far
        self.num_microbatches = len(near_microbatches)
        self.forwards = {near: iter(near_microbatches), far: iter(far_microbatches)}
        self.backwards = {near: iter(near_microbatches), far: iter(far_microbatches)}
        self.pending_weights: deque[Action] = deque()
        self.row: list[Action] = []

    def forward(self, stage: int) -> Action:
        return Action(Kind.F, stage, next(self.forwards[stage]))

    def backward(self, stage: int, *, split: bool = False) -> Action:
        microbatch = next(self.backwards[stage])
        if split:
            self.pending_weights.append(Action(Kind.W, stage, microbatch))
        return Action(Kind.I if split else Kind.B, stage, microbatch)

    def weight(self) -> list[Action]:
        return [self.pending_weights.popleft()] if self.pending_weights else []

    def run(self, position: int, length: int) -> tuple[Action, ...]:
        """``position`` counts from the outer end of a half, or of the V, to its turn."""
        near, far, row = self.near, self.far, self.row
        inner = length - 1 - position
        # 1  fill with near forwards
        row += [self.forward(near) for _ in range(2 * inner)]
        # 2  near and far forwards in turn
        for _ in range(position + 1):
            row += [self.forward(near), self.forward(far)]
        # 3  far I W F: the first backwards, split, where nothing can overlap with them yet
        for _ in range(inner):
            row += [self.backward(far, split=True), *self.weight(), self.forward(far)]
        # 4  the long middle: near forward over far backward, far forward over near backward
        for turn in range(self.num_microbatches - 2 * length + position + 1):
            if turn == 0 and inner == 0:
                # The innermost rank waits for nobody here; apart, the backward may begin earlier.
                row += [self.forward(near), self.backward(far)]
            else:
                row.append(fuse(self.forward(near), self.backward(far)))
            row.append(fuse(self.forward(far), self.backward(near)))
        # 5  no near forward is left
        for _ in range(inner):
            row += [self.backward(far), fuse(self.forward(far), self.backward(near))]
        # 6  no forward is left; the second half of these backwards is split
        row += self._drain(position)
        # 7  weights between the near backwards that the next rank waits for
        for _ in range(inner):
            row += [*self.weight(), self.backward(near, split=True)]
        # 8  the weights that are left
        for _ in range(position + 1):
            row += self.weight()
        return tuple(row)

    def _drain(self, position: int) -> Iterator[Action]:
        # The pairs are far, near, far, near, …; from the middle of this list on they are split.
        for index in range(2 * (position + 1)):
            yield self.backward(self.near if index % 2 else self.far, split=index > position)
