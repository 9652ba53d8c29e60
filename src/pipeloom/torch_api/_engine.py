"""From a schedule object to pipeloom's engine: one transport, and one core for each program.

::

    schedule.step ─► Engine.run(order, microbatches, …) ─► EngineCore ─► executor
                        │ first step: connect the ranks         │
                        └ order changed: another core           └ handlers, losses, outputs
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from pipeloom.errors import ScheduleError, StepFailed
from pipeloom.ir.action import Kind
from pipeloom.ir.schedule import Schedule, make_schedule
from pipeloom.ir.topology import Topology
from pipeloom.runtime.core import PipelineCore
from pipeloom.runtime.executor import Handler
from pipeloom.runtime.loss import StepLoss
from pipeloom.runtime.microbatches import Batch, batch_of_microbatches
from pipeloom.runtime.options import Options
from pipeloom.runtime.parts import make_parts
from pipeloom.runtime.programs import Programs
from pipeloom.runtime.result import StepResult
from pipeloom.runtime.transport.protocol import Transport
from pipeloom.torch_api._actions import Order, _get_profiler_function_name, rows_to_ir
from pipeloom.torch_api._link import StageLink
from pipeloom.torch_api._utils import MetadataStepFailed

__all__ = ["Engine", "StepRequest"]

#: As long as torch waits on gloo: nothing may move, a first compilation may take its time.
TIMEOUT = 1800.0

#: So many orders keep their programs, the ones seen last.
MOST_ORDERS = 16


@dataclass
class StepRequest:
    """What one step was called with, and what became of it."""

    arg_mbs: Sequence[tuple[Any, ...]]
    kwarg_mbs: Sequence[dict[str, Any]]
    target_mbs: Sequence[Any] | None
    training: bool
    keep_outputs: bool
    #: ``loss(output, target)`` on the last stage, and whether losses are averaged.
    compute_loss: Callable[[Any, Any], Any] | None
    wants_losses: bool
    averages: bool
    losses: StepLoss | None = None
    #: By microbatch, on the last stage's rank.
    outputs: Mapping[int, Any] | None = None


class _SummedLoss(StepLoss):
    """Losses that add up to the step's loss instead of being averaged."""

    def __init__(self, loss_fn: Callable[..., Any], *, targets: Sequence[Any]) -> None:
        super().__init__(loss_fn, targets=targets)
        self.total_weight = 1


class EngineCore(PipelineCore):
    """The engine for one order, driven with microbatches that are cut already."""

    def __init__(
        self, stages: Sequence[Any], programs: Programs, transport: Transport, options: Options
    ) -> None:
        self.stages = {stage.stage_index: stage for stage in stages}
        modules = {index: stage.submod for index, stage in self.stages.items()}
        super().__init__(modules, programs, transport, options)
        self.links: dict[int, StageLink] = {}
        self._request: StepRequest | None = None
        self._link()

    def _link(self) -> None:
        self.links = {
            index: StageLink(stage, self._runners[index], self._parts.data_parallel.get(index))
            for index, stage in self.stages.items()
        }

    def follow_stages(self) -> None:
        """Take modules that were reassigned, and this core's links."""
        modules = {index: stage.submod for index, stage in self.stages.items()}
        if any(modules[index] is not self.modules[index] for index in modules):
            self.modules = modules
            self._parts = make_parts(
                modules, self._programs.source, self._options, self._transport.local_ranks
            )
            self._runners = self._parts.runners
            self._bound.clear()
            self._link()
        for index, stage in self.stages.items():
            stage._link = self.links[index]

    def set_handlers(self, handlers: Mapping[Kind | str, Handler]) -> None:
        """Replace what kinds of action do."""
        if handlers != self._options.handlers:
            self._options = replace(self._options, handlers=dict(handlers))
            self._bound.clear()

    def run(self, request: StepRequest) -> None:
        """One step; results are left in the request."""
        programs = self._programs
        program = programs.training() if request.training else programs.forward_only()
        self._request = request
        grad_mode: AbstractContextManager[object] = (
            nullcontext() if request.training else torch.no_grad()
        )
        for link in self.links.values():
            link.begin_step(program.num_microbatches, scales_losses=request.averages)
        try:
            with grad_mode:
                self._run(program, (), {}, None, None, None, request.keep_outputs)
        finally:
            self._request = None
            for link in self.links.values():
                link.end_step()

    # ── where this differs from a batch that the engine cuts ─────────────────────────────────

    def _split(self, program: Schedule, *_: Any) -> dict[int, Batch]:
        request = self._request
        assert request is not None
        if self._topology.last_stages[0] in self.modules:
            _require_target(request)
        targets = request.target_mbs or [None] * program.num_microbatches
        batch = batch_of_microbatches(request.arg_mbs, request.kwarg_mbs, targets)
        return dict.fromkeys(self.modules, batch)

    def _make_losses(self, batches: Mapping[int, Batch], *_: Any, **__: Any) -> dict[int, StepLoss]:
        request = self._request
        last = self._topology.last_stages[0]
        assert request is not None
        if last not in self.modules or request.compute_loss is None:
            return {}
        if not request.training and request.target_mbs is None:
            return {}
        kind = StepLoss if request.averages else _SummedLoss
        request.losses = kind(request.compute_loss, targets=batches[last].targets)
        return {last: request.losses}

    def _finish(
        self, program: Schedule, losses: Mapping[int, StepLoss], return_output: bool
    ) -> StepResult:
        assert self._request is not None
        last = self._topology.last_stages[0]
        if last in self._runners:
            self._request.outputs = dict(self._runners[last].outputs)
        return StepResult(None, None)


def _require_target(request: StepRequest) -> None:
    if request.compute_loss is None or request.target_mbs is not None:
        return
    if request.training or request.wants_losses:
        raise TypeError(
            "the loss needs a target: pass target=… (or target_mbs=[…]) to step on the rank of the "
            "last stage"
        )


class Engine:
    """What one schedule object runs on, made when its first step begins, by all ranks together."""

    def __init__(self, stages: Sequence[Any], num_stages: int, num_microbatches: int) -> None:
        self._stages = stages
        self._num_stages = num_stages
        self._num_microbatches = num_microbatches
        self._transport: Transport | None = None
        #: The orders seen, each with its core: an order given again runs on what it ran on.
        self._cores: list[tuple[Order, EngineCore]] = []

    def run(
        self,
        order: Order,
        request: StepRequest,
        *,
        name: str,
        handlers: Mapping[Kind | str, Handler],
    ) -> None:
        """Run one step of an order."""
        core = self._find_core(order, name)
        core.set_handlers(handlers)
        core.follow_stages()
        try:
            core.run(request)
        except StepFailed as error:
            raise _translate(error) from error.__cause__

    def _find_core(self, order: Order, name: str) -> EngineCore:
        for known, core in self._cores:
            if known == order:
                return core
        core = self._make_core(order, name)
        self._cores.append(({rank: list(row) for rank, row in order.items()}, core))
        del self._cores[:-MOST_ORDERS]
        return core

    def _make_core(self, order: Order, name: str) -> EngineCore:
        schedule = make_schedule(
            rows_to_ir(order),
            name=name,
            topology=Topology.chain(self._num_stages),
            num_microbatches=self._num_microbatches,
        )
        if self._transport is None:
            self._transport = self._open_transport(schedule)
        programs = Programs(
            schedule,
            num_stages=self._num_stages,
            ranks=self._transport.num_ranks,
            microbatches=self._num_microbatches,
            options={},
            sends=self._transport.sends,
            channel=self._transport.channel,
            # Where a module turns out not to be sharded, gathering it does nothing.
            sharded=range(self._num_stages),
        )
        return EngineCore(self._stages, programs, self._transport, self._make_options())

    def _open_transport(self, schedule: Schedule) -> Transport:
        from pipeloom.runtime.transport.torch_distributed import TorchTransport

        transport = TorchTransport(
            self._stages[0].group,
            device=torch.device(self._stages[0].device),
            timeout=TIMEOUT,
            connect_timeout=TIMEOUT,
        )
        here = sorted(stage.stage_index for stage in self._stages)
        everywhere = transport.gather_objects([here])
        placed = [sorted(schedule.placement.stages_on(r)) for r in range(schedule.num_ranks)]
        if everywhere != placed:
            transport.close()
            raise ScheduleError(
                f"the ranks were given the stages {everywhere}, but {schedule.name} places "
                f"{placed}; give every rank the stages that the schedule places there"
            )
        return transport

    def _make_options(self) -> Options:
        return Options(
            share_loss=False,
            weight_backward={
                stage.stage_index: stage.dw_builder for stage in self._stages if stage.dw_builder
            },
            profiler_name=_profiler_name,
        )


def _profiler_name(action: Any) -> str:
    from pipeloom.torch_api._actions import from_ir

    return _get_profiler_function_name(from_ir(action))


def _translate(error: StepFailed) -> StepFailed:
    """The same on every rank; a shape nobody promised is what torch calls a metadata error."""
    if not re.search(r"failed .*: (ShapeError|Pipelining\w+Error): ", str(error)):
        return error
    translated = MetadataStepFailed(str(error))
    translated.__dict__.update(error.__dict__)
    return translated
