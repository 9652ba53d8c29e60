"""The two pipelines that users hold: every rank in this process, or one rank per process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from pipeloom.errors import ScheduleError
from pipeloom.ir.schedule import Schedule
from pipeloom.ir.topology import Topology
from pipeloom.runtime.core import PipelineCore
from pipeloom.runtime.data_parallel import recognise
from pipeloom.runtime.options import Options
from pipeloom.runtime.programs import Programs, infer_ranks
from pipeloom.runtime.transport.local import LocalTransport
from pipeloom.runtime.transport.protocol import Transport

__all__ = ["LocalPipeline", "Pipeline"]

Stages = Sequence[nn.Module] | Mapping[int, nn.Module]


class LocalPipeline(PipelineCore):
    """Every rank of a pipeline in this process, one thread, in an order that never changes.

    For debugging, notebooks, tests: breakpoints work, no launcher is needed.

    >>> import torch
    >>> stages = [torch.nn.Linear(4, 4) for _ in range(4)]
    >>> pipe = LocalPipeline(
    ...     stages, schedule="1f1b", microbatches=8, loss_fn=torch.nn.functional.mse_loss
    ... )
    >>> result = pipe.step(torch.zeros(16, 4), target=torch.ones(16, 4))
    >>> result.loss.shape, len(result.losses), stages[0].weight.grad is not None
    (torch.Size([]), 8, True)

    ``stages``
        The modules in order. A plain tuple or list that one returns becomes the positional
        arguments of the next. For a schedule in two directions: both copies of every part, or only
        one of each, which then serves both directions.
    ``schedule``
        A name of the library, a ``.csv`` or ``.json`` file, or a Schedule. Names need
        ``microbatches``; ``ranks`` is needed where the stages could be dealt in several ways, and
        ``schedule_options`` go to the schedule's function.
    ``skip_connections``
        Forward edges besides the chain, ``[(from stage, to stage), …]``.
    ``loss_fn``, ``loss_weight``, ``require_finite_loss``, ``share_loss``
        ``loss_fn(output, target, **loss_kwargs)`` is a mean; with ``loss_weight(target)`` a sum
        that is divided by the weight of all microbatches. A NaN or infinite loss can be made an
        error, which waits for the device. ``share_loss=False`` keeps the loss where it arises.
    ``split``, ``merge``
        How arguments are cut into microbatches and outputs put together:
        :mod:`pipeloom.runtime.microbatches`.
    ``shapes``
        When the form of what crosses a boundary may change: from step to step (``"per_step"``),
        never (``"fixed"``), between microbatches (``"per_microbatch"``).
    ``backward``, ``weight_backward``, ``backward_options``
        How stages split their backward: :func:`pipeloom.runtime.backward.choose_method`; by stage
        where it is a mapping.
    ``handlers``
        Functions that replace what a kind of action does:
        :class:`pipeloom.runtime.executor.ActionContext`.
    """

    def __init__(
        self,
        stages: Stages,
        schedule: str | Path | Schedule,
        *,
        microbatches: int | None = None,
        ranks: int | None = None,
        schedule_options: Mapping[str, Any] | None = None,
        skip_connections: Sequence[tuple[int, int]] = (),
        **options: Any,
    ) -> None:
        given = dict(stages) if isinstance(stages, Mapping) else dict(enumerate(stages))
        if not given:
            raise ScheduleError("a pipeline needs at least one stage")
        _require_modules(given)
        transport = LocalTransport(infer_ranks(schedule, num_stages=len(given), ranks=ranks))
        programs = Programs(
            schedule,
            num_stages=len(given),
            ranks=transport.num_ranks,
            microbatches=microbatches,
            options=schedule_options or {},
            sends=transport.sends,
            channel=transport.channel,
            skip_connections=skip_connections,
            sharded=_find_sharded(given),
        )
        modules = _serve_copies(given, programs.source.topology)
        placement = programs.source.placement
        _require_stages(
            {
                rank: [
                    s for s in modules if s >= len(placement.ranks) or placement.ranks[s] == rank
                ]
                for rank in range(placement.num_ranks)
            },
            programs.source,
        )
        super().__init__(modules, programs, transport, Options(**options))


class Pipeline(PipelineCore):
    """One rank of a pipeline over torch.distributed; every process makes its own.

    ::

        torchrun --nproc-per-node 4 train.py

        pipe = pipeloom.Pipeline({rank: stage}, schedule="1f1b", microbatches=8, loss_fn=loss_fn)
        result = pipe.step(batch, target=target)        # result.loss on every rank

    ``stages`` maps the numbers of this rank's stages to their modules. ``group`` is a process
    group or a one-dimensional DeviceMesh (``None``: all processes), ``timeout`` in seconds is how
    long nothing may move in a step, ``connect_timeout`` how long ranks wait for each other before
    the first one. Everything else is as for :class:`LocalPipeline`. Positional arguments
    of ``step`` matter on ranks that hold a first stage, ``target`` on those that hold a last one.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        schedule: str | Path | Schedule,
        *,
        microbatches: int | None = None,
        group: Any = None,
        timeout: float = 300.0,
        connect_timeout: float = 120.0,
        transport: Transport | None = None,
        schedule_options: Mapping[str, Any] | None = None,
        skip_connections: Sequence[tuple[int, int]] = (),
        **options: Any,
    ) -> None:
        _require_modules(stages)
        chosen = Options(**options)
        own = transport
        if own is None:
            own = _open_transport(group, stages, timeout=timeout, connect_timeout=connect_timeout)
        everywhere: list[tuple[list[int], set[int]]] = own.gather_objects(
            [(sorted(stages), _find_sharded(stages))] * len(own.local_ranks)
        )
        num_stages = len({stage for there, _ in everywhere for stage in there})
        programs = Programs(
            schedule,
            num_stages=num_stages,
            ranks=own.num_ranks,
            microbatches=microbatches,
            options=schedule_options or {},
            sends=own.sends,
            channel=own.channel,
            skip_connections=skip_connections,
            sharded=set().union(*(sharded for _, sharded in everywhere)),
        )
        # On every rank for all of them, so that all raise and none waits for the others.
        _require_stages(dict(enumerate(there for there, _ in everywhere)), programs.source)
        super().__init__(stages, programs, own, chosen)


def _require_modules(stages: Mapping[int, object]) -> None:
    """Raise for what looks like a stage and is none: a function, a part's name."""
    wrong = [
        f"stage {stage} is a {type(one).__name__}"
        for stage, one in stages.items()
        if not isinstance(one, nn.Module)
    ]
    if wrong:
        raise ScheduleError(f"stages are torch.nn.Module objects, but {', '.join(wrong)}")


def _open_transport(group: Any, stages: Mapping[int, nn.Module], **timeouts: Any) -> Transport:
    from pipeloom.runtime.transport.torch_distributed import TorchTransport

    return TorchTransport(group, modules=stages.values(), **timeouts)


def _serve_copies(modules: dict[int, nn.Module], topology: Topology) -> dict[int, nn.Module]:
    """Modules for every copy, where one was given for each part of the model."""
    first = topology.chains[0]
    if not topology.replicas or set(modules) != set(first):
        return modules
    return {
        stage: modules[first[position]]
        for chain in topology.chains
        for position, stage in enumerate(chain)
    }


def _require_stages(given: Mapping[int, Sequence[int]], schedule: Schedule) -> None:
    """Raise unless every rank was given the stages that the schedule places there."""
    problems = []
    for rank, stages in given.items():
        placed = set(schedule.placement.stages_on(rank))
        missing, surplus = sorted(placed - set(stages)), sorted(set(stages) - placed)
        if missing:
            problems.append(f"rank {rank} lacks {missing}")
        if surplus:
            problems.append(f"rank {rank} has {surplus} too many")
    if problems:
        placed_at = "; ".join(
            f"rank {rank} holds {list(schedule.placement.stages_on(rank))}"
            for rank in range(schedule.num_ranks)
        )
        raise ScheduleError(
            f"the stages given are not those of {schedule.name}, which has {schedule.num_stages} "
            f"on {schedule.num_ranks} ranks ({placed_at}): {'; '.join(problems)}"
        )


def _find_sharded(modules: Mapping[int, nn.Module]) -> set[int]:
    sides = {stage: recognise(module) for stage, module in modules.items()}
    return {stage for stage, side in sides.items() if side is not None and side.is_sharded}
