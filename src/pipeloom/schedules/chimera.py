"""Chimera: two pipelines in opposite directions whose passes interlock without collision.

::

    p = 4, one unit of 4 microbatches, F = B = 1; upper case: chain 0, lower case: chain 1
    slot     0  1  2  3  4  5  6  7  8  9
    rank 0   F0 ·  F1 f2 b2 f3 b3 B0 ·  B1
    rank 1   ·  F0 f2 F1 f3 b2 B0 b3 B1 ·
    rank 2   ·  f2 F0 f3 F1 B0 b2 B1 b3 ·
    rank 3   f2 ·  f3 F0 B0 F1 B1 b2 ·  b3
"""

from __future__ import annotations

from pipeloom.ir.action import Action, Kind
from pipeloom.ir.placement import Placement
from pipeloom.ir.schedule import Schedule
from pipeloom.ir.topology import Topology
from pipeloom.schedules.dualpipe import EVEN_MICROBATCHES, EVEN_RANKS
from pipeloom.schedules.entry import describe_schedule


@describe_schedule(
    name="chimera",
    family="bidirectional",
    constraints=(EVEN_RANKS, EVEN_MICROBATCHES),
    bubble="(p−2) passes where F=B",
    peak="p/2+1 .. p",
)
def chimera(*, ranks: int, microbatches: int) -> Schedule:
    """Two 1F1B pipelines in opposite directions, merged slot by slot.

    ::

        slot     0  1  2  3  4  5  6  7  8  9
        rank 0   F0 ·  F1 f2 b2 f3 b3 B0 ·  B1
        rank 1   ·  F0 f2 F1 f3 b2 B0 b3 B1 ·
        rank 2   ·  f2 F0 f3 F1 B0 b2 B1 b3 ·
        rank 3   f2 ·  f3 F0 B0 F1 B1 b2 ·  b3

    Chain 0 enters at rank 0 and takes the first half of the microbatches, chain 1 at the last rank
    with the rest. A unit holds p/2 microbatches of each; the j-th passes stage s of its chain
    forward in slot s+2j and backward in slot 2p−1−s+2j, which are slots of different parity on
    every rank as p is even. The next unit follows 2p slots later.

    Bubble p−2 passes where F=B, for microbatches divisible by p; between p/2+1 and p activations;
    every rank holds two stages, so that the parameters are there twice. Ranks and microbatches
    even. Li and Hoefler, arXiv 2107.06925.
    """
    half = microbatches // 2
    rows: list[list[tuple[int, Action]]] = [[] for _ in range(ranks)]
    for chain in range(2):
        for turn in range(half):
            unit, member = divmod(turn, ranks // 2)
            entry = 2 * ranks * unit + 2 * member
            microbatch = chain * half + turn
            for depth in range(ranks):
                rank = depth if chain == 0 else ranks - 1 - depth
                stage = chain * ranks + depth
                rows[rank].append((entry + depth, Action(Kind.F, stage, microbatch)))
                rows[rank].append(
                    (entry + 2 * ranks - 1 - depth, Action(Kind.B, stage, microbatch))
                )
    return Schedule(
        placement=Placement.mirrored(ranks),
        topology=Topology.bidirectional(ranks),
        num_microbatches=microbatches,
        actions=tuple(
            tuple(action for _, action in sorted(row, key=lambda item: item[0])) for row in rows
        ),
        name="chimera",
    )
