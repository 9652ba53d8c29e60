"""Reduce a stage's gradients as soon as its last backward is done.

::

    sharded over data-parallel ranks        copies of one part of the model (bidirectional)

    before   1B2   1B3                      rank 0   0B1  2B1  ·    2B2
                                            rank 1   1B1  …    0… stage 2 is a copy of stage 0
    after    1B2   1B3   1REDUCE_GRAD       after    both copies reduce once both are done

A reduction in which copies take part is a collective of their ranks: each waits there for the
others.
"""

from __future__ import annotations

from collections.abc import Iterable

from pipeloom.errors import ScheduleError
from pipeloom.ir.action import Action, Kind
from pipeloom.ir.dependencies import Role
from pipeloom.ir.products import WEIGHT_GRADIENT
from pipeloom.ir.questions import role_of
from pipeloom.ir.schedule import Schedule
from pipeloom.passes.time_order import walk_in_time_order


def reduce_gradients(schedule: Schedule, *, stages: Iterable[int] | None = None) -> Schedule:
    """Add REDUCE_GRAD for the stages named, and for every copy of them.

    Without ``stages``: for the stages that the program shards, and all that have copies; none
    where forwards run alone. What has a reduction already keeps it, and so a second run changes
    nothing.

    In a compute-only schedule each reduction stands right after the last backward of all copies,
    at one instant of the ranks' common order (see :mod:`pipeloom.passes.time_order`): all ranks
    meet the reductions they share in the same order, and no one waits in a circle. In a program
    with communication, whose order may suit one communication model only, a reduction shared by
    several ranks stands at the end of each of them, where no message waits for it.

    >>> from pipeloom.ir.notation import parse_grid
    >>> print(reduce_gradients(parse_grid("0F0 0B0 0F1 0B1", name="tiny"), stages=[0]))
    # tiny · 1 ranks · 1 stages · 2 microbatches
    rank 0   0F0  0B0  0F1  0B1  0REDUCE_GRAD
    """
    groups = _find_groups(schedule, stages)
    if not groups or (stages is None and not schedule.has_backward):
        return schedule
    if not schedule.has_backward:
        raise ScheduleError(f"{schedule.name} is forward-only: there are no gradients to reduce")
    if schedule.has_communication:
        return _reduce_in_program(schedule, groups)
    return _reduce_in_time_order(schedule, groups)


def _find_groups(schedule: Schedule, stages: Iterable[int] | None) -> list[tuple[int, ...]]:
    """The stages to reduce, copies together, in an order that all ranks share."""
    topology = schedule.topology
    if stages is None:
        wanted = {*schedule.sharded_stages, *(s for group in topology.replicas for s in group)}
    else:
        wanted = set(stages)
    unknown = sorted(stage for stage in wanted if not 0 <= stage < topology.num_stages)
    if unknown:
        raise ScheduleError(
            f"reduce_gradients: there is no stage {', '.join(map(str, unknown))}; "
            f"the stages are 0..{topology.num_stages - 1}"
        )
    reduced = {action.stage for action in schedule.all_actions() if role_of(action) is Role.REDUCE}
    groups = dict.fromkeys(topology.copies_of(stage) for stage in sorted(wanted))
    return [group for group in groups if reduced.isdisjoint(group)]


def _reduction(stage: int) -> Action:
    return Action(Kind.REDUCE_GRAD, stage)


def _count_backwards(schedule: Schedule, groups: list[tuple[int, ...]]) -> dict[int, int]:
    return {
        stage: len(schedule.topology.microbatches_of(stage, schedule.num_microbatches))
        for group in groups
        for stage in group
    }


def _reduce_in_time_order(schedule: Schedule, groups: list[tuple[int, ...]]) -> Schedule:
    produces = schedule.dependencies.produces
    rank_of = schedule.placement.rank_of
    group_of = {stage: group for group in groups for stage in group}
    left = _count_backwards(schedule, groups)
    programs: list[list[Action]] = [[] for _ in schedule.actions]
    for instant in walk_in_time_order(schedule):
        completed: dict[tuple[int, ...], None] = {}
        for _, action, _ in instant.ended:
            for what, stage, _, _ in produces(action):
                if what == WEIGHT_GRADIENT and stage in left:
                    left[stage] -= 1
                    group = group_of[stage]
                    if not any(left[copy] for copy in group):
                        completed[group] = None
        for group in sorted(completed):
            for stage in group:
                programs[rank_of(stage)].append(_reduction(stage))
        for rank, action, _ in instant.started:
            programs[rank].append(action)
    return schedule.with_actions(programs)


def _reduce_in_program(schedule: Schedule, groups: list[tuple[int, ...]]) -> Schedule:
    produces = schedule.dependencies.produces
    single = {group[0] for group in groups if len(group) == 1}
    left = _count_backwards(schedule, groups)
    programs: list[list[Action]] = []
    for row in schedule.actions:
        program: list[Action] = []
        pending: list[Action] = []
        for action in row:
            # The sends that follow a backward need not wait for the reduction.
            if pending and role_of(action) is not Role.SEND:
                program += pending
                pending = []
            program.append(action)
            for what, stage, _, _ in produces(action):
                if what == WEIGHT_GRADIENT and stage in single:
                    left[stage] -= 1
                    if left[stage] == 0:
                        pending.append(_reduction(stage))
        programs.append(program + pending)
    for group in groups:
        if len(group) > 1:
            for stage in group:
                programs[schedule.placement.rank_of(stage)].append(_reduction(stage))
    return schedule.with_actions(programs)
