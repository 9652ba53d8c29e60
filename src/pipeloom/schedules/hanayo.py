"""Hanayo: microbatches go down the ranks and up again, in one wave or several.

::

    2 waves over 4 ranks       0           7 8          15
                                 1       6     9      14
                                   2   5        10  13
                                     3 4          11 12
"""

from __future__ import annotations

from dataclasses import replace

from pipeloom.ir.placement import Placement
from pipeloom.ir.schedule import Schedule
from pipeloom.ir.topology import Topology
from pipeloom.schedules.entry import Constraint, Shape, describe_schedule
from pipeloom.schedules.pass_costs import measure_passes
from pipeloom.schedules.pattern import Pattern, squeeze_best


def _has_whole_waves(shape: Shape) -> bool:
    return shape.chunks % 2 == 0


def _has_legal_waves(shape: Shape) -> bool:
    waves = shape.options.get("waves")
    return waves is None or (
        isinstance(waves, int) and waves >= 1 and shape.chunks in (2, 2 * waves)
    )


@describe_schedule(
    name="hanayo",
    family="wave",
    constraints=(
        Constraint(
            "two chunks per wave, that is an even number of chunks", _has_whole_waves, "chunks"
        ),
        Constraint("1 or more waves, half as many as chunks", _has_legal_waves, "options"),
    ),
    bubble="about (p−1)(F+I+W)/2w for m = p",
    peak="p",
)
def hanayo(*, ranks: int, microbatches: int, chunks: int = 2, waves: int | None = None) -> Schedule:
    """Waves: a zigzag placement whose turns need no message, run greedily.

    ::

        4 ranks, 1 wave, B = 2F; lower case: the second chunk, a backward takes two slots
        rank 0   F0 F1 F2 F3 ·  ·  ·  f0 b0 -- f1 b1 -- f2 b2 -- f3 b3 -- ·  ·  ·  ·  B0 -- ·  B1 …
        rank 1   ·  F0 F1 F2 F3 ·  f0 ·  f1 ·  b0 -- f2 b1 -- f3 b2 -- ·  b3 -- B0 -- ·  B1 -- · …
        rank 2   ·  ·  F0 F1 F2 f0 F3 f1 ·  f2 ·  f3 b0 -- ·  b1 -- ·  B0 -- b2 -- B1 -- b3 -- B2 …
        rank 3   ·  ·  ·  F0 f0 F1 f1 F2 f2 F3 f3 ·  ·  ·  b0 -- B0 -- b1 -- B1 -- b2 -- B2 -- b3 …

    Say ``waves`` or ``chunks``, which are twice the waves. The order is found by playing a few
    simple preferences through with B = 2F, within p activations on every rank; the shortest is
    kept. For p = m = 4 it takes 18, 15.25 and 13.625 forwards with 1, 2 and 4 waves, where 1F1B
    takes 21. Chunks must be even. Liu et al., Hanayo, arXiv 2308.15762.
    """
    if waves is not None:
        chunks = 2 * waves
    placement = Placement.zigzag(ranks, chunks)
    passes = measure_passes(
        "hanayo", placement, microbatches=microbatches, costs=None, memory_limit=None
    )
    squeezed = squeeze_best(
        _preferences(ranks * chunks, chunks),
        replace(passes, room=[float(ranks)] * ranks),
        placement,
        microbatches=microbatches,
        splits_backward=False,
    )
    assert squeezed is not None, "backwards before anything else always free memory"
    return Schedule(
        placement, Topology.chain(ranks * chunks), microbatches, squeezed.rows, name="hanayo"
    )


def _preferences(num_stages: int, chunks: int) -> list[Pattern]:
    """By age, with backwards counted as so many hops long and microbatches so far apart; and
    backwards first, deep forwards before shallow ones."""
    stages = range(num_stages)
    by_age = [
        Pattern(
            period=period * chunks,
            forward=stages,
            backward=[num_stages + hop * (num_stages - 1 - stage) for stage in stages],
            reach=reach,
            overtakes=True,
        )
        for period, hop, reach in (
            (1, 1, 3 * chunks),
            (1, 1, 0),
            (3, 3, float("inf")),
            (3, 2, float("inf")),
        )
    ]
    by_depth = Pattern(
        period=0,
        forward=[-stage for stage in stages],
        backward=[stage - 3 * num_stages for stage in stages],
        reach=float("inf"),
        overtakes=True,
    )
    return [*by_age, by_depth]
