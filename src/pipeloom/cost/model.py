"""What a cost model is, and its numbers at the shape of one schedule.

::

    CostModel ──bind(schedule)──▶ ScheduleCosts
    "a rank needs 1 for F"        duration_of(2F0) = 0.5       (two chunks on each rank)
                                  size_of(activation 2F0) = 0.5
                                  transfer_of(message) = (occupancy, latency)
                                  static_memory[rank] = {"weights": …, …}

Simulator, verifier and planner see :class:`ScheduleCosts` only. A new kind of action needs a row
in :data:`_FIELD_OF_KIND` (its duration), a new kind of memory one in ``size_of``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol, TypeAlias

from pipeloom.cost.network import Link, Network
from pipeloom.ir.action import Action, Kind
from pipeloom.ir.products import (
    ACTIVATION,
    GATHERED,
    RECEIVED_GRADIENT,
    RECEIVED_OUTPUT,
    RETAINED,
    SENT_GRADIENT,
    SENT_OUTPUT,
    Product,
)
from pipeloom.ir.schedule import Schedule

#: The duration of two actions that overlap: the sum of the parts, their maximum, or a factor of
#: their sum.
Overlap: TypeAlias = Literal["sum", "max"] | float

#: What a stage holds all the time.
STATIC_CATEGORIES = ("weights", "gradients", "optimizer")


class CostModel(Protocol):
    """Anything that can say what a schedule's actions cost."""

    @property
    def time_unit(self) -> str: ...
    @property
    def memory_unit(self) -> str: ...

    def bind(self, schedule: Schedule) -> ScheduleCosts:
        """The numbers at the shape of a schedule."""
        ...


@dataclass(frozen=True)
class ScheduleCosts:
    """The costs of one schedule: every sequence has an entry per stage."""

    schedule: Schedule
    forward: Sequence[float]
    input: Sequence[float]
    weight: Sequence[float]
    full: Sequence[float]
    unshard: Sequence[float]
    reshard: Sequence[float]
    reduce_grad: Sequence[float]
    #: What F leaves for the backward.
    activation: Sequence[float]
    #: The part of it that stays from I until W.
    retained: Sequence[float]
    #: The size of the stage's output, which is also that of the gradient that comes back.
    boundary: Sequence[float]
    #: Per stage, in the order of ``STATIC_CATEGORIES``.
    static: Sequence[tuple[float, float, float]]
    #: What the parameters of a sharded stage take while they are gathered, beside its shard.
    gathered: Sequence[float]
    network: Network
    overlap: Overlap
    #: Per rank: 2 computes twice as fast.
    speeds: Sequence[float]
    time_unit: str = ""
    memory_unit: str = ""

    # ── time ─────────────────────────────────────────────────────────────────────────────────

    @cached_property
    def durations(self) -> dict[Kind, tuple[float, ...]]:
        """By kind and stage, on the rank that holds the stage; messages are not in it."""
        ranks = self.schedule.placement.ranks
        speed_of_stage = [1.0 if rank is None else self.speeds[rank] for rank in ranks]
        return {
            kind: tuple(
                cost / speed if is_computed else cost
                for cost, speed in zip(getattr(self, name), speed_of_stage, strict=True)
            )
            for kind, (name, is_computed) in _FIELD_OF_KIND.items()
        }

    def duration_of(self, action: Action) -> float:
        """How long an action takes that is no message."""
        kind, stage, _, parts, _ = action
        if not parts:
            return self.durations[kind][stage]  # type: ignore[index]
        times = [self.duration_of(part) for part in parts]
        if self.overlap == "sum":
            return sum(times)
        if self.overlap == "max":
            return max(times)
        return self.overlap * sum(times)

    @cached_property
    def backward(self) -> tuple[float, ...]:
        """Per stage: the whole backward of one microbatch, done the cheaper way."""
        times = self.durations
        return tuple(
            min(full, input_ + weight)
            for full, input_, weight in zip(
                times[Kind.B], times[Kind.I], times[Kind.W], strict=True
            )
        )

    def transfer_of(self, message: Product) -> tuple[float, float]:
        """(time for which a message occupies its edge, latency after that)."""
        sender, receiver = self.schedule.dependencies.ranks_of_message(message)
        link = self._link(sender, receiver)
        return self.size_of(message) / link.bandwidth, link.latency

    def latency_between(self, sender: int, receiver: int) -> float:
        """The latency between two ranks; none within a rank."""
        return 0.0 if sender == receiver else self._link(sender, receiver).latency

    def _link(self, sender: int, receiver: int) -> Link:
        return self.network.link_between(sender, receiver)

    # ── memory ───────────────────────────────────────────────────────────────────────────────

    def size_of(self, product: Product) -> float:
        """What a product takes while it lives, or, for a message, while it travels."""
        what, stage, _, other = product
        if what == ACTIVATION:
            return self.activation[stage]
        if what == RETAINED:
            return self.retained[stage]
        if what == GATHERED:
            return self.gathered[stage]
        if what in (SENT_OUTPUT, RECEIVED_GRADIENT):
            return self.boundary[stage]
        if what in (RECEIVED_OUTPUT, SENT_GRADIENT):
            assert other is not None
            return self.boundary[other]
        return 0.0

    @cached_property
    def static_memory(self) -> tuple[Mapping[str, float], ...]:
        """Per rank: what its stages hold all the time, by category."""
        placement = self.schedule.placement
        return tuple(
            {
                category: sum(self.static[stage][index] for stage in placement.stages_on(rank))
                for index, category in enumerate(STATIC_CATEGORIES)
            }
            for rank in range(placement.num_ranks)
        )


#: Which field has an action's duration, and whether a rank's compute speed matters to it.
_FIELD_OF_KIND: dict[Kind, tuple[str, bool]] = {
    Kind.F: ("forward", True),
    Kind.B: ("full", True),
    Kind.I: ("input", True),
    Kind.W: ("weight", True),
    Kind.UNSHARD: ("unshard", False),
    Kind.RESHARD: ("reshard", False),
    Kind.REDUCE_GRAD: ("reduce_grad", False),
}
