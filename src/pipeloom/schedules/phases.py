"""What the families are made of: passes of one stage, and warm-up, steady state, drain.

::

    warm-up       steady state             drain
    F0 F1 F2      F3 B0  F4 B1  F5 B2      B3 B4 B5        alternate(F, B, warmup=3)
    F0 F1 F2      F3 I0  F4 I1 W0 …        I4 W3 …         … with W one step behind I
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain

from pipeloom.ir.action import Action, Kind
from pipeloom.ir.placement import Placement
from pipeloom.ir.schedule import Schedule
from pipeloom.ir.topology import Topology


def make_passes(kind: Kind, stage: int, microbatches: Iterable[int]) -> list[Action]:
    """One kind of pass of one stage, over several microbatches.

    >>> make_passes(Kind.F, 2, range(3))
    [2F0, 2F1, 2F2]
    """
    return [Action(kind, stage, microbatch) for microbatch in microbatches]


def split_into_groups(microbatches: int, size: int, *, least: int = 1) -> list[range]:
    """Groups of a size; the last is shorter where it must be, but one of fewer than ``least``
    microbatches joins the first group.

    >>> split_into_groups(10, 4), split_into_groups(10, 4, least=3)
    ([range(0, 4), range(4, 8), range(8, 10)], [range(0, 6), range(6, 10)])
    """
    rest = microbatches % size
    start = size + rest if 0 < rest < least and microbatches > size else min(size, microbatches)
    return [
        range(start),
        *(range(at, min(at + size, microbatches)) for at in range(start, microbatches, size)),
    ]


def deal_passes(kind: Kind, stages: Iterable[int], groups: Iterable[range]) -> list[Action]:
    """One kind of pass in groups: each group goes through all stages before the next begins.

    >>> deal_passes(Kind.F, (0, 4), [range(0, 2), range(2, 4)])
    [0F0, 0F1, 4F0, 4F1, 0F2, 0F3, 4F2, 4F3]
    """
    stages = tuple(stages)
    return [
        Action(kind, stage, microbatch)
        for group in groups
        for stage in stages
        for microbatch in group
    ]


def alternate(
    forwards: Sequence[Action], backwards: Sequence[Action], *, warmup: int
) -> tuple[Action, ...]:
    """Some forwards, then one forward and one backward in turn, then the backwards that are left.

    >>> alternate(make_passes(Kind.F, 0, range(3)), make_passes(Kind.B, 0, range(3)), warmup=1)
    (0F0, 0F1, 0B0, 0F2, 0B1, 0B2)
    """
    warmup = min(warmup, len(forwards))
    steady = zip(forwards[warmup:], backwards, strict=False)
    return (
        *forwards[:warmup],
        *chain.from_iterable(steady),
        *backwards[len(forwards) - warmup :],
    )


def alternate_with_weights(
    forwards: Sequence[Action], inputs: Sequence[Action], *, warmup: int, lag: int
) -> tuple[Action, ...]:
    """As :func:`alternate` with split backward: each W comes ``lag`` backward steps after its I.

    >>> F, I = make_passes(Kind.F, 0, range(3)), make_passes(Kind.I, 0, range(3))
    >>> alternate_with_weights(F, I, warmup=1, lag=1)
    (0F0, 0F1, 0I0, 0F2, 0I1, 0W0, 0I2, 0W1, 0W2)
    """
    warmup = min(warmup, len(forwards))
    weights = [Action(Kind.W, action.stage, action.microbatch) for action in inputs]
    row = list(forwards[:warmup])
    for step, action in enumerate(inputs):
        row += forwards[warmup + step : warmup + step + 1]
        row.append(action)
        if step >= lag:
            row.append(weights[step - lag])
    row += weights[max(0, len(inputs) - lag) :]
    return tuple(row)


def make_looped(
    name: str,
    *,
    ranks: int,
    microbatches: int,
    chunks: int = 1,
    make_row: Callable[[int], Iterable[Action]],
) -> Schedule:
    """A chain whose stage s lies on rank s mod ranks, from what each rank runs."""
    return Schedule(
        placement=Placement.loop(ranks, chunks),
        topology=Topology.chain(ranks * chunks),
        num_microbatches=microbatches,
        actions=tuple([tuple(make_row(rank)) for rank in range(ranks)]),
        name=name,
    )


def make_vee(
    name: str, *, ranks: int, microbatches: int, make_row: Callable[[int], Iterable[Action]]
) -> Schedule:
    """A chain that goes down the ranks and up again, from what each rank runs."""
    return Schedule(
        placement=Placement.vee(ranks),
        topology=Topology.chain(2 * ranks),
        num_microbatches=microbatches,
        actions=tuple([tuple(make_row(rank)) for rank in range(ranks)]),
        name=name,
    )
