"""What the passes of a shape cost, for the schedules that are made to measure.

A schedule that is driven by costs takes ``costs``: a cost model, or a mapping with its fields, such
as ``{"forward": 1, "input": 1, "weight": [1, 1, 1, 2], "latency": 0.1}``. And it takes
``memory_limit``: a number in the model's unit of memory, or text with a unit such as ``"40GiB"``.
Where the model does not say otherwise, the unit is the activation of one microbatch on one rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from pipeloom.cost.constant import StageCosts, UniformCosts
from pipeloom.cost.model import CostModel, ScheduleCosts
from pipeloom.cost.units import parse_memory
from pipeloom.errors import CostFileError, ScheduleError
from pipeloom.ir.action import Kind
from pipeloom.ir.placement import Placement
from pipeloom.ir.products import (
    SENT_GRADIENT,
    SENT_OUTPUT,
    Product,
)
from pipeloom.ir.schedule import Schedule
from pipeloom.ir.topology import Topology

Costs: TypeAlias = CostModel | Mapping[str, Any]

#: Every pass takes one unit and an activation stays whole until its W.
UNIT_COSTS = UniformCosts(forward=1, input=1, weight=1)


@dataclass(frozen=True)
class PassCosts:
    """Numbers per stage of one chain; times of messages per stage they leave."""

    forward: Sequence[float]
    input: Sequence[float]
    weight: Sequence[float]
    #: From a stage to the next, and from a stage back to the one before.
    output_delay: Sequence[float]
    gradient_delay: Sequence[float]
    #: What F leaves until I, and what of it stays until W.
    activation: Sequence[float]
    retained: Sequence[float]
    #: Per rank: what activations may take.
    room: Sequence[float]
    #: What the rank may hold in all.
    limit: float


def measure_passes(
    name: str,
    placement: Placement,
    *,
    microbatches: int,
    costs: Costs | None,
    memory_limit: float | str | None,
) -> PassCosts:
    """Bind costs to a chain over a placement, and see how much room the limit leaves."""
    topology = Topology.chain(placement.num_stages)
    shape = Schedule(placement, topology, microbatches, ((),) * placement.num_ranks, name=name)
    bound = _as_model(costs).bind(shape)
    stages = range(placement.num_stages)
    activation, retained = list(bound.activation), list(bound.retained)
    for stage in stages[1:]:
        # The input that was received stays as long as what F made of it.
        if placement.ranks[stage] != placement.ranks[stage - 1]:
            activation[stage] += bound.boundary[stage - 1]
            retained[stage] += bound.boundary[stage - 1]
    limit = float("inf") if memory_limit is None else parse_memory(memory_limit, bound.memory_unit)
    return PassCosts(
        forward=bound.durations[Kind.F],
        input=bound.durations[Kind.I],
        weight=bound.durations[Kind.W],
        output_delay=[
            _delay(bound, (SENT_OUTPUT, s, 0, s + 1)) if s + 1 in stages else 0.0 for s in stages
        ],
        gradient_delay=[_delay(bound, (SENT_GRADIENT, s, 0, s - 1)) if s else 0.0 for s in stages],
        activation=activation,
        retained=retained,
        room=[limit - sum(held.values()) for held in bound.static_memory],
        limit=limit,
    )


def check_room(name: str, passes: PassCosts, least: Sequence[float]) -> None:
    """Refuse a limit under which not even the least can run; every rank concerned is named."""
    short = [
        f"rank {rank} needs {passes.limit - room + need:g}"
        for rank, (room, need) in enumerate(zip(passes.room, least, strict=True))
        if room < need * (1 - 1e-9)
    ]
    if short:
        raise ScheduleError(
            f"{name} cannot run with a memory_limit of {passes.limit:g}: {', '.join(short)}; "
            f"raise the limit, or give a rank less by using more ranks or smaller microbatches"
        )


def _as_model(costs: Costs | None) -> CostModel:
    if costs is None:
        return UNIT_COSTS
    if not isinstance(costs, Mapping):
        if not hasattr(costs, "bind"):
            raise CostFileError(
                f"costs must be a cost model or a mapping with its fields, not {costs!r}; for "
                'example {"forward": 1, "input": 1, "weight": 1}'
            )
        return costs
    per_stage = any(isinstance(value, (list, tuple)) for value in costs.values())
    try:
        return StageCosts(**costs) if per_stage else UniformCosts(**costs)
    except TypeError as error:
        raise CostFileError(f"costs {dict(costs)!r} are no cost model: {error}") from error


def _delay(bound: ScheduleCosts, message: Product) -> float:
    sender, receiver = bound.schedule.dependencies.ranks_of_message(message)
    return 0.0 if sender == receiver else sum(bound.transfer_of(message))
