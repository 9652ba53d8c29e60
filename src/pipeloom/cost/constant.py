"""Costs that do not depend on the microbatch: the same for every stage, or a number per stage.

::

    UniformCosts(forward=1, input=1, weight=1)      rank level: with 2 chunks a stage costs ½
    StageCosts(forward=[1, 1, 1, 1.5], input=…)     stage level: taken as they are
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from pipeloom.cost.amounts import is_amount
from pipeloom.cost.model import STATIC_CATEGORIES, Overlap, ScheduleCosts
from pipeloom.cost.network import Link, Network
from pipeloom.errors import CostFileError
from pipeloom.ir.schedule import Schedule

PerStage: TypeAlias = float | Sequence[float]

#: Fields that are times or sizes: numbers from 0 up, shared out over the stages of a rank.
SHARED_FIELDS = (
    *("forward", "input", "weight", "full", "unshard", "reshard", "reduce_grad"),
    *("activation", *STATIC_CATEGORIES, "gathered"),
)
#: Fields that have a meaning where they are not given.
OPTIONAL_FIELDS = ("full", "gathered")
#: Fields with a number per stage that is not shared out.
STAGE_FIELDS = ("retained", "boundary")


@dataclass(frozen=True, kw_only=True)
class _CommonCosts:
    """What both kinds of constant costs have besides their times and activations."""

    #: Memory units per time unit, of every edge that ``network`` does not name.
    bandwidth: float = math.inf
    #: Links that differ by edge or by node; its ``link`` is made of ``latency`` and ``bandwidth``.
    network: Network | None = None
    #: Gathering, releasing and reducing the parameters of a stage.
    unshard: Any = 0.0
    reshard: Any = 0.0
    reduce_grad: Any = 0.0
    #: The size of what crosses a stage boundary, per microbatch.
    boundary: Any = 0.0
    weights: Any = 0.0
    gradients: Any = 0.0
    optimizer: Any = 0.0
    #: The whole parameters of a sharded stage, between UNSHARD and RESHARD, beside its shard, which
    #: is ``weights``; as large as that if not given.
    gathered: Any = None
    #: Per rank, 1 if not given: 2 computes twice as fast. A mapping may name some ranks only.
    speeds: Sequence[float] | Mapping[int, float] | None = None
    #: Such as "ms"; empty for plain units.
    time_unit: str = ""
    #: Such as "GiB"; empty for units of one microbatch's activation.
    memory_unit: str = ""


@dataclass(frozen=True)
class UniformCosts(_CommonCosts):
    """Costs of one microbatch on one rank, all its chunks together, as in the published tables.

    A stage costs the rank's cost × ranks ÷ stages of its chain (a chunk 1/chunks). ``full`` is
    ``input + weight`` unless given. ``retained`` is the share of ``activation`` that stays from I
    until W. ``extra_first`` and ``extra_last`` make the first and the last stage dearer (embedding,
    loss): in multiples of the rank's cost of each pass, not shared out over chunks.

    >>> UniformCosts(forward=1, input=1, weight=1, latency=0.1).full is None
    True
    """

    forward: float
    input: float
    weight: float
    full: float | None = None
    latency: float = 0.0
    activation: float = 1.0
    retained: float = 1.0
    overlap: Overlap = "sum"
    extra_first: float = 0.0
    extra_last: float = 0.0

    def __post_init__(self) -> None:
        problems = [
            f"{name} must be a number from 0 up, not {getattr(self, name)!r}"
            for name in (*SHARED_FIELDS, "boundary", "extra_first", "extra_last")
            if not (name in OPTIONAL_FIELDS and getattr(self, name) is None)
            and not is_amount(getattr(self, name))
        ]
        _raise_for("UniformCosts", problems + _find_common_problems(self))

    def bind(self, schedule: Schedule) -> ScheduleCosts:
        """The costs of a schedule's stages."""
        topology = schedule.topology
        stages = range(topology.num_stages)
        share = [
            schedule.num_ranks / len(topology.chains[topology.chain_of(stage)]) for stage in stages
        ]
        factor = list(share)
        for stage in topology.first_stages:
            factor[stage] += self.extra_first
        for stage in topology.last_stages:
            factor[stage] += self.extra_last
        full = self.input + self.weight if self.full is None else self.full
        activation = [self.activation * s for s in share]
        return ScheduleCosts(
            schedule=schedule,
            forward=[self.forward * f for f in factor],
            input=[self.input * f for f in factor],
            weight=[self.weight * f for f in factor],
            full=[full * f for f in factor],
            unshard=[self.unshard * s for s in share],
            reshard=[self.reshard * s for s in share],
            reduce_grad=[self.reduce_grad * s for s in share],
            activation=activation,
            retained=[self.retained * a for a in activation],
            boundary=[self.boundary] * len(stages),
            static=[(self.weights * s, self.gradients * s, self.optimizer * s) for s in share],
            gathered=[
                (self.weights if self.gathered is None else self.gathered) * s for s in share
            ],
            **_bind_common(self, schedule),
        )


@dataclass(frozen=True)
class StageCosts(_CommonCosts):
    """The same per stage: each field is a list with a number per stage, taken as it is, or one
    number for all stages.

    In a bidirectional schedule lists may have a number per part of the model: both copies of a
    part cost the same.

    >>> StageCosts(forward=[1, 2], input=1, weight=1).forward
    (1, 2)
    """

    forward: PerStage
    input: PerStage
    weight: PerStage
    full: PerStage | None = None
    latency: float = 0.0
    activation: PerStage = 1.0
    retained: PerStage = 1.0
    overlap: Overlap = "sum"

    def __post_init__(self) -> None:
        problems = []
        lengths: dict[str, int] = {}
        for name in (*SHARED_FIELDS, *STAGE_FIELDS):
            value = getattr(self, name)
            if name in OPTIONAL_FIELDS and value is None:
                continue
            if isinstance(value, Sequence) and not isinstance(value, str):
                value = tuple(value)
                object.__setattr__(self, name, value)
                lengths[name] = len(value)
                for stage, number in enumerate(value):
                    if not is_amount(number):
                        problems.append(
                            f"{name}[{stage}] must be a number from 0 up, not {number!r}"
                        )
            elif not is_amount(value):
                problems.append(
                    f"{name} must be a number from 0 up or a list of them, not {value!r}"
                )
        if len(set(lengths.values())) > 1:
            said = ", ".join(f"{name} has {length}" for name, length in lengths.items())
            problems.append(f"every list needs one number per stage, but {said}")
        _raise_for("StageCosts", problems + _find_common_problems(self))

    @property
    def num_stages(self) -> int | None:
        """How many stages the lists are for; ``None`` if there is no list."""
        for name in (*SHARED_FIELDS, *STAGE_FIELDS):
            value = getattr(self, name)
            if isinstance(value, tuple):
                return len(value)
        return None

    def bind(self, schedule: Schedule) -> ScheduleCosts:
        """The costs of a schedule's stages."""
        topology = schedule.topology
        stages = range(topology.num_stages)
        part_of = list(stages)
        if self.num_stages not in (None, len(stages)):
            num_parts = len(topology.chains[0])
            if not topology.replicas or self.num_stages != num_parts:
                per_part = f" or {num_parts} (one per part)" if topology.replicas else ""
                raise CostFileError(
                    f"these costs are for {self.num_stages} stages, but schedule "
                    f"{schedule.name!r} has {len(stages)}; "
                    f"give lists of {len(stages)} numbers{per_part}, or single numbers"
                )
            for chain in topology.chains:
                for part, stage in enumerate(chain):
                    part_of[stage] = part

        def numbers(name: str) -> list[float]:
            value = getattr(self, name)
            return [value[part] if isinstance(value, tuple) else value for part in part_of]

        input_, weight, activation = numbers("input"), numbers("weight"), numbers("activation")
        return ScheduleCosts(
            schedule=schedule,
            forward=numbers("forward"),
            input=input_,
            weight=weight,
            full=[i + w for i, w in zip(input_, weight, strict=True)]
            if self.full is None
            else numbers("full"),
            unshard=numbers("unshard"),
            reshard=numbers("reshard"),
            reduce_grad=numbers("reduce_grad"),
            activation=activation,
            retained=[a * r for a, r in zip(activation, numbers("retained"), strict=True)],
            boundary=numbers("boundary"),
            static=list(zip(*map(numbers, STATIC_CATEGORIES), strict=True)),
            gathered=numbers("weights" if self.gathered is None else "gathered"),
            **_bind_common(self, schedule),
        )


def _bind_common(costs: UniformCosts | StageCosts, schedule: Schedule) -> dict[str, Any]:
    network = costs.network or Network()
    if costs.network is None or costs.latency or costs.bandwidth != math.inf:
        network = replace(network, link=Link(costs.latency, costs.bandwidth))
    return {
        "network": network,
        "overlap": costs.overlap,
        "speeds": expand_speeds(costs.speeds, schedule.num_ranks),
        "time_unit": costs.time_unit,
        "memory_unit": costs.memory_unit,
    }


def expand_speeds(
    speeds: Sequence[float] | Mapping[int, float] | None, num_ranks: int
) -> tuple[float, ...]:
    """A speed for every rank; 1 where nothing is said.

    >>> expand_speeds({1: 0.5}, 3)
    (1.0, 0.5, 1.0)
    """
    if speeds is None:
        return (1.0,) * num_ranks
    if isinstance(speeds, Mapping):
        unknown = [rank for rank in speeds if rank not in range(num_ranks)]
        if unknown:
            raise CostFileError(f"speeds names ranks {unknown}, the ranks are 0..{num_ranks - 1}")
        return tuple(speeds.get(rank, 1.0) for rank in range(num_ranks))
    if len(speeds) != num_ranks:
        raise CostFileError(
            f"speeds has {len(speeds)} numbers, but the schedule has {num_ranks} ranks"
        )
    return tuple(speeds)


def _find_common_problems(costs: UniformCosts | StageCosts) -> list[str]:
    problems = Link(costs.latency, costs.bandwidth).find_problems()
    if costs.network is not None:
        problems += [f"network: {problem}" for problem in costs.network.find_problems()]
        if costs.network.link != Link() and (costs.latency or costs.bandwidth != math.inf):
            problems.append("latency and bandwidth are given twice: here and as network.link")
    retained = costs.retained if isinstance(costs.retained, tuple) else (costs.retained,)
    if not all(is_amount(share) and share <= 1 for share in retained):
        problems.append(
            "retained is the share of activation that stays from I until W, "
            f"from 0 to 1, not {costs.retained!r}"
        )
    overlap = costs.overlap
    if overlap not in ("sum", "max") and not is_amount(overlap, above=True):
        problems.append(f"overlap must be 'sum', 'max' or a factor above 0, not {overlap!r}")
    speeds = costs.speeds.values() if isinstance(costs.speeds, Mapping) else costs.speeds or ()
    if not all(is_amount(speed, above=True) for speed in speeds):
        problems.append(f"speeds must be numbers above 0, not {costs.speeds!r}")
    return problems


def _raise_for(name: str, problems: list[str]) -> None:
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise CostFileError(f"{name} cannot be used:\n{lines}")
