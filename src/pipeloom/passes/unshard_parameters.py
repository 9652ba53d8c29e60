"""Gather the parameters of sharded stages shortly before they are used, and release them after.

::

    before   0F0                  2F0             0F1  …        one rank, stages 0 2 4
    after    0UNSHARD 2UNSHARD    0F0   2F0  0RESHARD 4UNSHARD  4F0  2RESHARD 0UNSHARD …
             └ look-ahead of 2: at no time more than two stages are gathered
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pipeloom.cost.model import CostModel
from pipeloom.errors import ScheduleError
from pipeloom.ir.action import Action, Kind
from pipeloom.ir.dependencies import Role
from pipeloom.ir.questions import role_of, simple_actions
from pipeloom.ir.schedule import Schedule
from pipeloom.passes.reduce_gradients import reduce_gradients

DEFAULT_LOOKAHEAD = 3


def unshard_parameters(
    schedule: Schedule,
    *,
    stages: Iterable[int] | None = None,
    lookahead: int | None = None,
    memory: float | None = None,
    costs: CostModel | None = None,
) -> Schedule:
    """Gather and release the parameters of all stages, or of the stages named.

    After each computation the stages that the rank needs next are gathered: the next
    ``lookahead`` different ones (3 unless said otherwise), the one in use included; or as many as
    fit into ``memory``, by what ``costs`` say each takes when gathered; or both. What is not
    among them is released first, so the bound holds at every moment.

    A sharded stage must reduce its gradients, so stages that do not yet get their REDUCE_GRAD as
    well, as :func:`~pipeloom.passes.reduce_gradients.reduce_gradients` places it.

    >>> from pipeloom.ir.notation import parse_grid
    >>> schedule = parse_grid("0F0 1F0 1B0 0B0", name="tiny")
    >>> print(unshard_parameters(schedule, lookahead=1))
    # tiny · 1 ranks · 2 stages · 1 microbatches
    rank 0   0UNSHARD  0F0  0RESHARD  1UNSHARD  1F0  1B0  1RESHARD  0UNSHARD  1REDUCE_GRAD  0B0  \
0RESHARD  0REDUCE_GRAD
    """
    wanted = _choose_stages(schedule, stages)
    bound = _make_bound(schedule, lookahead, memory, costs)
    if schedule.has_backward:
        schedule = reduce_gradients(schedule, stages=wanted)
    return schedule.with_actions(
        _Gathering(row, rank, wanted, bound).rewrite() for rank, row in enumerate(schedule.actions)
    )


class _Bound(NamedTuple):
    """How much may be gathered on a rank at a time."""

    num_stages: float
    memory: float
    sizes: Sequence[float]
    unit: str


def _choose_stages(schedule: Schedule, stages: Iterable[int] | None) -> frozenset[int]:
    known = range(schedule.num_stages)
    wanted = frozenset(known if stages is None else stages)
    unknown = sorted(stage for stage in wanted if stage not in known)
    if unknown:
        raise ScheduleError(
            f"unshard_parameters: there is no stage {', '.join(map(str, unknown))}; "
            f"the stages are 0..{len(known) - 1}"
        )
    already = sorted(schedule.sharded_stages & wanted)
    if already:
        raise ScheduleError(
            f"unshard_parameters: the program gathers stage {', '.join(map(str, already))} "
            "already; name other stages, or begin with a program that does not"
        )
    return wanted


def _make_bound(
    schedule: Schedule, lookahead: int | None, memory: float | None, costs: CostModel | None
) -> _Bound:
    if lookahead is not None and lookahead < 1:
        raise ScheduleError(
            f"lookahead is {lookahead}, but the stage in use must be gathered: 1 or more"
        )
    if (memory is None) != (costs is None):
        raise ScheduleError(
            "a limit in memory needs both: memory=… and costs=… with each stage's weights"
        )
    if memory is None or costs is None:
        number = DEFAULT_LOOKAHEAD if lookahead is None else lookahead
        return _Bound(number, float("inf"), (0.0,) * schedule.num_stages, "")
    bound_costs = costs.bind(schedule)
    number_or_any = float("inf") if lookahead is None else lookahead
    return _Bound(number_or_any, memory, bound_costs.gathered, bound_costs.memory_unit)


class _Gathering:
    """One rank's program on its way from left to right.

    ``upcoming`` is sorted by next use: (position, place among the action's parts, stage).
    """

    def __init__(
        self, row: Sequence[Action], rank: int, wanted: frozenset[int], bound: _Bound
    ) -> None:
        self.row = row
        self.rank = rank
        self.bound = bound
        self.program: list[Action] = []
        #: In the order in which they were gathered.
        self.gathered: dict[int, None] = {}
        #: Per position: the sharded stages its computation uses.
        self.used: list[tuple[int, ...]] = [_stages_used(action, wanted) for action in row]
        later: dict[int, list[tuple[int, int]]] = {}
        for position in range(len(row) - 1, -1, -1):
            for place, stage in enumerate(self.used[position]):
                later.setdefault(stage, []).append((position, place))
        #: Per stage: its uses to come, the next one last.
        self.later = later
        self.upcoming = sorted((*uses.pop(), stage) for stage, uses in later.items())

    def rewrite(self) -> list[Action]:
        self._gather_next()
        for action, used in zip(self.row, self.used, strict=True):
            self.program.append(action)
            if used:
                del self.upcoming[: len(used)]
                for stage in used:
                    if self.later[stage]:
                        insort(self.upcoming, (*self.later[stage].pop(), stage))
                self._gather_next()
        return self.program

    def _gather_next(self) -> None:
        next_stages = self._stages_to_hold()
        for stage in [stage for stage in self.gathered if stage not in next_stages]:
            del self.gathered[stage]
            self.program.append(Action(Kind.RESHARD, stage))
        for stage in next_stages:
            if stage not in self.gathered:
                self.gathered[stage] = None
                self.program.append(Action(Kind.UNSHARD, stage))

    def _stages_to_hold(self) -> list[int]:
        """The stages used next, as many as the bound allows."""
        hold: list[int] = []
        room = self.bound.memory
        for position, _, stage in self.upcoming:
            room -= self.bound.sizes[stage]
            if room < 0 or len(hold) == self.bound.num_stages:
                if position == self.upcoming[0][0]:
                    self._refuse(position)
                break
            hold.append(stage)
        return hold

    def _refuse(self, position: int) -> None:
        action, used = self.row[position], self.used[position]
        if len(used) > self.bound.num_stages:
            need, knob = f"{len(used)} stages", f"lookahead={len(used)}"
        else:
            total = sum(self.bound.sizes[stage] for stage in used)
            need, knob = f"{total:g} {self.bound.unit}".strip(), f"memory={total:g}"
        raise ScheduleError(
            f"unshard_parameters: {action} on rank {self.rank} needs {need} gathered at once; "
            f"allow at least {knob}"
        )


def _stages_used(action: Action, wanted: frozenset[int]) -> tuple[int, ...]:
    """The sharded stages that an action computes with, each once."""
    if role_of(action) not in (Role.COMPUTE, Role.FUSED):
        return ()
    stages = dict.fromkeys(part.stage for part in simple_actions(action))
    return tuple(stage for stage in stages if stage in wanted and stage is not None)
