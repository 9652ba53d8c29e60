"""Fill the pipeline, then drain it: all forwards, then all backwards.

::

    gpipe, 4 ranks, 4 microbatches, F = 1, B = 2
    0 │0 1 2 3 · · · · · · · · · 0 0 1 1 2 2 3 3
    1 │· 0 1 2 3 · · · · · · 0 0 1 1 2 2 3 3 · ·
    2 │· · 0 1 2 3 · · · 0 0 1 1 2 2 3 3 · · · ·
    3 │· · · 0 1 2 3 0 0 1 1 2 2 3 3 · · · · · ·
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from pipeloom.errors import ScheduleError
from pipeloom.ir.action import Action, Kind
from pipeloom.ir.schedule import Schedule
from pipeloom.schedules.entry import describe_schedule
from pipeloom.schedules.phases import make_looped, make_passes


@describe_schedule(
    name="forward_only",
    aliases=("inference", "_ScheduleForwardOnly"),
    family="fill and drain",
    bubble="(p−1)F/v",
    peak="1",
)
def forward_only(*, ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Forwards alone, for inference and evaluation.

    ::

        0 │0 1 2 3 · · ·
        1 │· 0 1 2 3 · ·
        2 │· · 0 1 2 3 ·
        3 │· · · 0 1 2 3

    With several chunks per rank, microbatches go in groups of as many as there are ranks, so that
    a group comes back to rank 0 just when rank 0 has sent the last of it.

    Bubble (p−1)F/v for microbatches divisible by the number of ranks. Any shape.
    """

    def make_row(rank: int) -> Iterable[Action]:
        groups = [
            range(start, min(start + ranks, microbatches))
            for start in range(0, microbatches, ranks)
        ]
        return [
            Action(Kind.F, chunk * ranks + rank, microbatch)
            for group in groups
            for chunk in range(chunks)
            for microbatch in group
        ]

    return make_looped(
        "forward_only", ranks=ranks, microbatches=microbatches, chunks=chunks, make_row=make_row
    )


@describe_schedule(
    name="gpipe", family="fill and drain", bubble="(p−1)(F+I+W)", peak="m on every rank"
)
def gpipe(*, ranks: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards: simple, and as hungry as it can be.

    ::

        0 │0 1 2 3 · · · · · · · · · 0 0 1 1 2 2 3 3
        1 │· 0 1 2 3 · · · · · · 0 0 1 1 2 2 3 3 · ·
        2 │· · 0 1 2 3 · · · 0 0 1 1 2 2 3 3 · · · ·
        3 │· · · 0 1 2 3 0 0 1 1 2 2 3 3 · · · · · ·

    Bubble (p−1)(F+I+W), peak m activations. Any shape. Huang et al., GPipe, arXiv 1811.06965.
    """

    def make_row(rank: int) -> Iterable[Action]:
        every = range(microbatches)
        return chain(make_passes(Kind.F, rank, every), make_passes(Kind.B, rank, every))

    return make_looped("gpipe", ranks=ranks, microbatches=microbatches, make_row=make_row)


def forward_only_like(schedule: Schedule, num_microbatches: int | None = None) -> Schedule:
    """The forwards alone of any schedule's stages: same placement, same topology.

    What evaluation runs. A microbatch enters whenever a rank has had time for all its stages, and
    each rank takes the passes by the time at which they could start, so that every pass comes
    after those it waits for, whatever the placement.

    >>> from pipeloom.schedules.zbv import zbv
    >>> print(forward_only_like(zbv(ranks=2, microbatches=4), 3))
    # forward_only · 2 ranks · 4 stages · 3 microbatches
    rank 0   0F0  0F1  3F0  0F2  3F1  3F2
    rank 1   1F0  2F0  1F1  2F1  1F2  2F2
    """
    topology, placement = schedule.topology, schedule.placement
    microbatches = schedule.num_microbatches if num_microbatches is None else num_microbatches
    if type(microbatches) is not int or microbatches < 1:
        raise ScheduleError(
            "a forward-only schedule needs microbatches to be a whole number, 1 or more, not "
            f"{microbatches!r}"
        )
    # A pass of stage depth d for the i-th microbatch of its chain enters at its chain's rhythm:
    # as many passes of a rank fall on each microbatch as stages of the chain lie on it.
    rhythm = max(1, max(len(placement.stages_on(r)) for r in range(placement.num_ranks)))
    rows: list[list[tuple[int, int, Action]]] = [[] for _ in range(placement.num_ranks)]
    for stages in topology.chains:
        for depth, stage in enumerate(stages):
            for turn, microbatch in enumerate(topology.microbatches_of(stage, microbatches)):
                start = turn * rhythm + depth
                rows[placement.rank_of(stage)].append(
                    (start, -depth, Action(Kind.F, stage, microbatch))
                )
    return Schedule(
        placement=placement,
        topology=topology,
        num_microbatches=microbatches,
        actions=tuple(tuple(action for _, _, action in sorted(row)) for row in rows),
        name="forward_only",
    )
