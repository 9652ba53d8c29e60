"""The parts of a pipeline that live in this process: stages, their backward, their partners."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import nn

from pipeloom.errors import BackwardMethodError, ScheduleError
from pipeloom.ir.products import PENDING_WEIGHTS
from pipeloom.ir.schedule import Schedule
from pipeloom.ir.topology import Topology
from pipeloom.runtime.backward import choose_method
from pipeloom.runtime.backward.cuda_graphs import CapturedStage
from pipeloom.runtime.backward.hook_count import HookCount
from pipeloom.runtime.data_parallel import DataParallelStage, recognise
from pipeloom.runtime.executor import RankParts
from pipeloom.runtime.gradients import CopyExchange
from pipeloom.runtime.options import Options
from pipeloom.runtime.stage import StageRunner

__all__ = ["make_parts"]


def make_parts(
    modules: Mapping[int, nn.Module],
    schedule: Schedule,
    options: Options,
    local_ranks: Sequence[int],
) -> RankParts:
    """Everything the executors of this process work with."""
    sides = {stage: recognise(module) for stage, module in modules.items()}
    data_parallel = {stage: side for stage, side in sides.items() if side is not None}
    exchanges = _make_exchanges(modules, schedule, local_ranks)
    _require_own_gradients(options, {*data_parallel, *exchanges})
    return RankParts(
        _make_runners(modules, schedule, options, data_parallel), data_parallel, exchanges
    )


def _make_runners(
    modules: Mapping[int, nn.Module],
    schedule: Schedule,
    options: Options,
    data_parallel: Mapping[int, DataParallelStage],
) -> dict[int, StageRunner]:
    split_stages = {
        product[1]
        for action in schedule.all_actions()
        for product in schedule.dependencies.produces(action)
        if product[0] == PENDING_WEIGHTS
    }
    topology = schedule.topology
    hooks = HookCount()
    runners = {}
    for stage, module in modules.items():
        side = data_parallel.get(stage)
        called = module if side is None else side.module
        runners[stage] = StageRunner(
            stage,
            called,
            predecessors=_order_predecessors(topology, stage),
            successors=topology.successors(stage),
            backward=choose_method(
                called,
                method=_method_of(stage, options, stage in split_stages),
                weight_backward=options.weight_backward.get(stage),
                stage=stage,
                hooks=hooks,
                **options.backward_options,
            ),
        )
    ranks = schedule.placement.ranks
    for stage, runner in runners.items():
        for successor in topology.successors(stage):
            if ranks[successor] == ranks[stage]:
                runner.connect(runners[successor])
    return runners


def _order_predecessors(topology: Topology, stage: int) -> list[int]:
    """The one before in the chain comes first, then the skip connections in ascending order."""
    chain = topology.chains[topology.chain_of(stage)]
    before = chain[: chain.index(stage)]
    return sorted(topology.predecessors(stage), key=lambda other: (other != before[-1], other))


def _method_of(stage: int, options: Options, is_split: bool) -> str:
    """A stage that only ever runs B has nothing to split, unless it brings its own W."""
    backward = options.backward
    chosen = backward if isinstance(backward, str) else backward.get(stage, "auto")
    if chosen == "auto" and not is_split and stage not in options.weight_backward:
        return "whole"
    return chosen


def _make_exchanges(
    modules: Mapping[int, nn.Module], schedule: Schedule, local_ranks: Sequence[int]
) -> dict[int, CopyExchange]:
    """One exchange per rank and group of copies, unless the copies are one module anyway."""
    exchanges: dict[int, CopyExchange] = {}
    ranks = schedule.placement.ranks
    for group in schedule.topology.replicas:
        if len({id(modules.get(stage)) for stage in group}) == 1 and group[0] in modules:
            continue
        for rank in local_ranks:
            local = [stage for stage in group if stage in modules and ranks[stage] == rank]
            unique = {id(modules[stage]): modules[stage] for stage in local}
            if unique:
                exchange = CopyExchange(tuple(unique.values()))
                exchanges.update(dict.fromkeys(local, exchange))
    _require_own_parameters(modules, exchanges)
    return exchanges


def _require_own_gradients(options: Options, reduced: Collection[int]) -> None:
    """Where gradients are reduced, those from before the step are set aside; a captured stage adds
    to the memory that they have."""
    captured = [
        stage
        for stage, builder in options.weight_backward.items()
        if isinstance(getattr(builder, "__self__", None), CapturedStage) and stage in reduced
    ]
    if captured:
        raise BackwardMethodError(
            f"stages {', '.join(map(str, sorted(captured)))} were captured as CUDA graphs, and "
            "their gradients are reduced with those of other ranks, which captured stages do not "
            "allow yet; leave out the capture, or the data parallelism or copies of these stages"
        )


def _require_own_parameters(modules: Mapping[int, nn.Module], exchanged: Collection[int]) -> None:
    """A gradient that is summed over copies must be that of one stage: a parameter that two
    modules share would be summed with both, and counted twice."""
    owners: dict[nn.Parameter, int] = {}
    problems = []
    for stage, module in modules.items():
        for name, parameter in module.named_parameters():
            other = owners.setdefault(parameter, stage)
            if modules[other] is not module and {stage, other} & set(exchanged):
                problems.append(f"{name} of stage {stage} is also in stage {other}")
    if problems:
        raise ScheduleError(
            "stages that have copies elsewhere cannot share parameters with other stages: "
            f"{'; '.join(problems)}. Give every stage parameters of its own, or use a schedule in "
            "one direction"
        )
