"""Several chunks per rank, dealt in a loop: stage s lies on rank s mod p.

::

    interleaved_1f1b, 4 ranks, 2 chunks, 4 microbatches; lower case: the second chunk
    rank 0   F0 F1 F2 F3  f0 f1 f2 f3  . . .        b0 b1 b2 b3  B0 B1 B2 B3
    rank 3   F0 F1 F2 F3  f0 b0 f1 b1 f2 b2 f3 b3   B0 B1 B2 B3
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from pipeloom.ir.action import Action, Kind
from pipeloom.ir.schedule import Schedule
from pipeloom.schedules.entry import Constraint, Shape, describe_schedule
from pipeloom.schedules.phases import (
    alternate,
    alternate_with_weights,
    deal_passes,
    make_looped,
    make_passes,
    split_into_groups,
)


def size_of_rounds(ranks: int, microbatches: int) -> int:
    """Microbatches of a round where the rounds are equal and no shorter than the pipeline."""
    return microbatches // max(1, microbatches // ranks)


def _has_equal_rounds(shape: Shape) -> bool:
    if shape.options.get("group_size") is not None:
        return True
    return shape.microbatches % max(1, shape.microbatches // shape.ranks) == 0


def _has_legal_group(shape: Shape) -> bool:
    size = shape.options.get("group_size")
    return size is None or (isinstance(size, int) and size >= min(shape.ranks, shape.microbatches))


EQUAL_ROUNDS = Constraint(
    "microbatches divisible by the number of rounds, microbatches // ranks", _has_equal_rounds
)
GROUP_NOT_SHORTER_THAN_PIPELINE = Constraint(
    "a group_size of at least the number of ranks", _has_legal_group, part="options"
)


@describe_schedule(
    name="interleaved_1f1b",
    family="interleaved",
    constraints=(EQUAL_ROUNDS, GROUP_NOT_SHORTER_THAN_PIPELINE),
    bubble="(p−1)(F+I+W)/v",
    peak="p+(p−1)/v",
)
def interleaved_1f1b(
    *, ranks: int, microbatches: int, chunks: int = 2, group_size: int | None = None
) -> Schedule:
    """1F1B over several chunks per rank: the bubble shrinks by the number of chunks.

    ::

        rank 0   F0 F1 F2 F3  f0 f1 f2 f3  F4 F5 F6 b0  F7 b1  f4 b2 …     warm-up 4 + 6
        rank 1   F0 F1 F2 F3  f0 f1 f2 f3  F4 b0  F5 b1  F6 b2 …           warm-up 4 + 4
        rank 2   F0 F1 F2 F3  f0 f1 f2 b0  f3 b1  F4 b2 …                  warm-up 4 + 2
        rank 3   F0 F1 F2 F3  f0 b0  f1 b1  f2 b2 …                        warm-up 4 + 0

    Microbatches go in groups of g = p (or the next size that makes equal rounds); warm-up
    (v−1)g+2(p−1−r). A larger ``group_size`` takes more memory and hides latency; where it does not
    divide the microbatches the last group is shorter, which costs time; one that is shorter than
    the pipeline would make ranks wait for each other and joins the first group instead.

    Bubble (p−1)(F+I+W)/v, peak p+(p−1)/v activations. Microbatches divisible by the number of
    rounds, microbatches // ranks, unless a group size is given. Narayanan et al., arXiv 2104.04473.
    """
    size = size_of_rounds(ranks, microbatches) if group_size is None else group_size
    groups = split_into_groups(microbatches, size, least=ranks)

    def make_row(rank: int) -> Iterable[Action]:
        stages = range(rank, ranks * chunks, ranks)
        return alternate(
            deal_passes(Kind.F, stages, groups),
            deal_passes(Kind.B, reversed(stages), groups),
            warmup=(chunks - 1) * len(groups[0]) + 2 * (ranks - 1 - rank),
        )

    return make_looped(
        "interleaved_1f1b", ranks=ranks, microbatches=microbatches, chunks=chunks, make_row=make_row
    )


@describe_schedule(
    name="looped_bfs", family="interleaved", bubble="(p−1)(F+I+W)/v", peak="m on every rank"
)
def looped_bfs(*, ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """Breadth first: all microbatches through one chunk, then the next; backwards in reverse.

    ::

        rank 0   F0 F1 F2 F3  f0 f1 f2 f3   b3 b2 b1 b0  B3 B2 B1 B0
        rank 1   F0 F1 F2 F3  f0 f1 f2 f3   b3 b2 b1 b0  B3 B2 B1 B0
        …

    Each stage's parameters are gathered once forward and once backward, which suits sharded data
    parallelism. Bubble (p−1)(F+I+W)/v, peak m activations. Any shape.
    Lamy-Poirier, arXiv 2211.05953.
    """

    def make_row(rank: int) -> Iterable[Action]:
        stages = range(rank, ranks * chunks, ranks)
        forwards = [make_passes(Kind.F, s, range(microbatches)) for s in stages]
        backwards = [make_passes(Kind.B, s, reversed(range(microbatches))) for s in stages[::-1]]
        return chain.from_iterable(forwards + backwards)

    return make_looped(
        "looped_bfs", ranks=ranks, microbatches=microbatches, chunks=chunks, make_row=make_row
    )


@describe_schedule(
    name="grouped_interleaved",
    aliases=("gis",),
    family="interleaved",
    bubble="(p−1)(F+I)/v",
    peak="p",
)
def grouped_interleaved(*, ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """Interleaved with split backward: groups of p microbatches, each W right after its I.

    ::

        rank 0   F0 F1 F2 F3  f0 f1 f2  f3 iw0  F4 iw1  F5 iw2 …     warm-up 4 + 3
        rank 1   F0 F1 F2 F3  f0 f1     f2 iw0  f3 iw1  F4 iw2 …     warm-up 4 + 2
        rank 2   F0 F1 F2 F3  f0        f1 iw0  f2 iw1  f3 iw2 …     warm-up 4 + 1
        rank 3   F0 F1 F2 F3            f0 iw0  f1 iw1  f2 iw2 …     warm-up 4

    The gradient of the inputs leaves before the weights are done, which halves the warm-up of
    interleaved 1F1B. Bubble (p−1)(F+I)/v, peak p activations on every rank, both for microbatches
    divisible by p; a shorter last group costs time. Any shape. Qi et al., arXiv 2405.15362.
    """
    groups = split_into_groups(microbatches, ranks)

    def make_row(rank: int) -> Iterable[Action]:
        stages = range(rank, ranks * chunks, ranks)
        return alternate_with_weights(
            deal_passes(Kind.F, stages, groups),
            deal_passes(Kind.I, reversed(stages), groups),
            warmup=(chunks - 1) * len(groups[0]) + ranks - 1 - rank,
            lag=0,
        )

    return make_looped(
        "grouped_interleaved",
        ranks=ranks,
        microbatches=microbatches,
        chunks=chunks,
        make_row=make_row,
    )
