"""What both pipelines share: the stages of this process, their programs, and the step.

::

    step ─► split the batch ─► every local rank runs its program ─► losses to all ─► StepResult
                                        │ an exception
                                        └► told to the other ranks, kept, raised again ever after
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from types import MappingProxyType
from typing import Any, Literal, NoReturn

import torch
from torch import nn

from pipeloom.errors import ScheduleError, StepError
from pipeloom.ir.schedule import Schedule
from pipeloom.runtime.backward import Choice
from pipeloom.runtime.bindings import Bindings
from pipeloom.runtime.driver import drive, make_failure
from pipeloom.runtime.executor import Executor
from pipeloom.runtime.gradients import finish_arguments
from pipeloom.runtime.hooks import ActionEvent, Hooks, RemovableHook
from pipeloom.runtime.loss import StepLoss
from pipeloom.runtime.messages import Promises
from pipeloom.runtime.microbatches import Batch, split_batch
from pipeloom.runtime.options import Options
from pipeloom.runtime.parts import make_parts
from pipeloom.runtime.programs import Programs
from pipeloom.runtime.recorder import RankRecorder, Recording, make_timeline
from pipeloom.runtime.result import Results, StepResult
from pipeloom.runtime.stage import StepInputs
from pipeloom.runtime.transport.protocol import Transport

__all__ = ["PipelineCore"]

logger = logging.getLogger("pipeloom.runtime")


class PipelineCore:
    """The part of a pipeline that lives in this process."""

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        programs: Programs,
        transport: Transport,
        options: Options,
    ) -> None:
        self._transport = transport
        self._programs = programs
        self._options = options
        self._hooks = Hooks()
        self._recordings: list[Recording] = []
        self._failure: StepError | None = None
        self._num_steps = 0
        self._num_trained = 0
        self._is_closed = False
        #: Held while a step runs.
        self._turn = threading.Lock()
        #: The stages of this process. They are bound once: put what they hold into other words
        #: in place (``module.compile()``), or make another pipeline.
        self.modules: Mapping[int, nn.Module] = MappingProxyType(dict(modules))
        parameters = (p for module in self.modules.values() for p in module.parameters())
        self._device = next((p.device for p in parameters), torch.device("cpu"))
        self._topology = programs.source.topology
        self._parts = make_parts(self.modules, programs.source, options, transport.local_ranks)
        self._runners = self._parts.runners
        self._promises = {rank: Promises(options.shapes) for rank in transport.local_ranks}
        self._recorders = {rank: RankRecorder(self._device) for rank in transport.local_ranks}
        self._results = Results(transport, options, self._topology, self._device)
        #: Programs with the executors that they are bound to.
        self._bound = Bindings(transport, self._hooks, self._promises, self._recorders)

    # ── what users call ──────────────────────────────────────────────────────────────────────

    @property
    def schedule(self) -> Schedule:
        """The schedule that was asked for."""
        return self._programs.source

    @property
    def program(self) -> Schedule:
        """The complete program of a training step: what the ranks run."""
        return self._programs.training()

    @property
    def backward_choices(self) -> Mapping[int, Choice]:
        """How the backward of each stage here is split, and why; complete after the first step."""
        return {
            stage: runner.backward.choice
            for stage, runner in self._runners.items()
            if runner.backward is not None and runner.backward.choice is not None
        }

    def step(
        self,
        *args: Any,
        target: Any = None,
        loss_kwargs: Mapping[str, Any] | None = None,
        stage_kwargs: Mapping[int, Mapping[str, Any]] | None = None,
        microbatches: int | None = None,
        return_output: bool = False,
        **kwargs: Any,
    ) -> StepResult:
        """Run one training step: afterwards every ``.grad`` has grown by the gradient of the loss.

        ``args`` go to the first stage and matter where it is, ``target`` where the last stage is;
        ``kwargs`` go to every stage, ``stage_kwargs[stage]`` to one. ``loss_kwargs`` are handed to
        ``loss_fn`` as they are. ``microbatches`` is another number of them, for this step, where
        the schedule was given by name. ``return_output`` keeps and merges the last stage's outputs.
        A module's own keyword of one of these names goes through ``stage_kwargs``.
        """
        if not torch.is_grad_enabled():
            raise StepError(
                "step computes gradients, but was called where gradients are switched off "
                "(torch.no_grad or inference_mode); call eval for a forward pass without them"
            )
        if self._options.loss_fn is None:
            raise StepError("step needs a loss; give loss_fn=… to the pipeline, or call eval")
        program = self._programs.training(microbatches)
        if not program.has_backward:
            raise StepError(
                f"the schedule {program.name!r} has no backward, so a step would train nothing; "
                "call eval, or give a schedule for training"
            )
        return self._run(program, args, kwargs, target, loss_kwargs, stage_kwargs, return_output)

    def eval(
        self,
        *args: Any,
        target: Any = None,
        loss_kwargs: Mapping[str, Any] | None = None,
        stage_kwargs: Mapping[int, Mapping[str, Any]] | None = None,
        microbatches: int | None = None,
        return_output: bool = True,
        **kwargs: Any,
    ) -> StepResult:
        """Run the forward passes alone, without gradients; ``.grad`` is not touched.

        Takes what ``step`` takes; with a ``target`` and a ``loss_fn`` it also gives the loss. Any
        number of microbatches will do. Whether modules are in ``train()`` or ``eval()`` mode is
        left as it is.
        """
        program = self._programs.forward_only(microbatches)
        with torch.no_grad():
            return self._run(
                program, args, kwargs, target, loss_kwargs, stage_kwargs, return_output
            )

    def on(
        self,
        pattern: str,
        function: Callable[[ActionEvent], object],
        *,
        when: Literal["before", "after"] = "after",
    ) -> RemovableHook:
        """Run a function before or after the actions whose text matches the pattern.

        ``pipe.on("3F0", fn)``, ``pipe.on("*I*", fn, when="before")``; ``.remove()`` on what is
        returned ends it. On a pipeline of several processes only the actions of this rank count.
        """
        return self._hooks.add(pattern, function, when)

    def record(self) -> Recording:
        """Measure the steps from now on, until ``stop()`` or the end of a ``with`` statement.

        With several processes, every rank must record the same steps.
        """
        recording = Recording(self._recordings.remove)
        self._recordings.append(recording)
        return recording

    def close(self) -> None:
        """Let go of connections and threads; the pipeline cannot run any more."""
        self._is_closed = True
        self._transport.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled, as it is bound to its stages "
            "and connections; copy or save the stages, and make another pipeline of them"
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} stages {sorted(self.modules)} of {self.schedule!r}>"

    # ── a step ───────────────────────────────────────────────────────────────────────────────

    def _run(self, program: Schedule, *given: Any) -> StepResult:
        """Run a program, unless that is impossible or one runs already."""
        if self._failure is not None:
            raise copy(self._failure)
        if self._is_closed:
            raise StepError("the pipeline was closed and cannot run any more; make another one")
        if not self._turn.acquire(blocking=False):
            raise StepError(
                "a step of this pipeline is running already; step and eval can be called neither "
                "from several threads at once nor by its stages, hooks or handlers"
            )
        try:
            return self._run_alone(program, *given)
        finally:
            self._turn.release()

    def _run_alone(
        self,
        program: Schedule,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        target: Any,
        loss_kwargs: Mapping[str, Any] | None,
        stage_kwargs: Mapping[int, Mapping[str, Any]] | None,
        return_output: bool,
    ) -> StepResult:
        start = time.perf_counter()
        training = program.has_backward
        executors = self._bound.find(
            program, self._parts, self._options, is_recorded=bool(self._recordings)
        )
        losses: dict[int, StepLoss] = {}
        try:
            batches = self._split(program, args, kwargs, target, stage_kwargs or {})
            losses = self._make_losses(batches, loss_kwargs, training=training, target=target)
            self._promise(program, batches)
        except Exception as error:
            # Nothing has run. Where no other rank is on its way, all is as it was before.
            if len(self._transport.local_ranks) == self._transport.num_ranks:
                raise
            self._fail(make_failure(error, executors[0], is_running=False), error)
        try:
            self._begin(program, executors, batches, losses, return_output)
            drive(executors)
            if training:
                for runner in self._runners.values():
                    finish_arguments(runner.argument_gradients)
            result = self._finish(program, losses, return_output)
            self._transport.end_step()
        except StepError as error:
            self._fail(error, error.__cause__)
        except BaseException as error:
            self._fail(make_failure(error, executors[0], is_running=False), error)
        finally:
            for runner in self._runners.values():
                runner.end_step()
        if self._recordings:
            self._add_recorded(program)
        self._report(program, time.perf_counter() - start)
        return result

    def _report(self, program: Schedule, seconds: float) -> None:
        """Tell those who listen to the logger; on a device, how long the host was busy."""
        logger.debug(
            "step %d: %s with %d microbatches took %.1f ms",
            self._num_steps,
            program.name,
            program.num_microbatches,
            1e3 * seconds,
        )
        if program.has_backward:
            self._num_trained += 1
            for stage, choice in self.backward_choices.items() if self._num_trained == 1 else ():
                logger.info("stage %d: backward %s: %s", stage, choice.method, choice.reason)

    def _split(
        self,
        program: Schedule,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        target: Any,
        stage_kwargs: Mapping[int, Mapping[str, Any]],
    ) -> dict[int, Batch]:
        """The batch of every local stage; only those with arguments of their own split anew."""
        unknown = sorted(set(stage_kwargs) - set(range(self._topology.num_stages)))
        if unknown:
            raise ScheduleError(
                f"stage_kwargs names the stages {unknown}, but the stages are "
                f"0..{self._topology.num_stages - 1}"
            )
        own = set(self.modules)
        arguments = args if own & set(self._topology.first_stages) else ()
        own_target = target if own & set(self._topology.last_stages) else None

        def split(keywords: Mapping[str, Any]) -> Batch:
            return split_batch(
                program.num_microbatches,
                arguments=arguments,
                keywords=keywords,
                target=own_target,
                rules=self._options.split,
            )

        shared = split(kwargs)
        return {
            stage: split({**kwargs, **stage_kwargs[stage]}) if stage in stage_kwargs else shared
            for stage in self.modules
        }

    def _make_losses(
        self,
        batches: Mapping[int, Batch],
        loss_kwargs: Mapping[str, Any] | None,
        *,
        training: bool,
        target: Any,
    ) -> dict[int, StepLoss]:
        loss_fn = self._options.loss_fn
        if loss_fn is None or not (training or target is not None):
            return {}
        return {
            stage: StepLoss(
                loss_fn,
                targets=batches[stage].targets,
                loss_weight=self._options.loss_weight,
                loss_kwargs=loss_kwargs,
                require_finite=self._options.require_finite_loss,
            )
            for stage in self._topology.last_stages
            if stage in self.modules
        }

    def _promise(self, program: Schedule, batches: Mapping[int, Batch]) -> None:
        """What this step's headers will say of the batch."""
        size = next((batch.size for batch in batches.values() if batch.size is not None), None)
        first = [stage for stage in self._topology.first_stages if stage in batches]
        forms = batches[first[0]].forms if first else None
        for promises in self._promises.values():
            promises.begin_step(
                program, size, forms, training=program.has_backward, knows_forms=bool(first)
            )

    def _begin(
        self,
        program: Schedule,
        executors: Sequence[Executor],
        batches: Mapping[int, Batch],
        losses: Mapping[int, StepLoss],
        return_output: bool,
    ) -> None:
        training = program.has_backward
        for stage, runner in self._runners.items():
            batch = batches[stage]
            runner.begin_step(
                StepInputs(
                    batch.arguments,
                    batch.keywords,
                    training and batch.needs_grad(is_first=not runner.predecessors),
                    losses.get(stage),
                    return_output,
                    training,
                )
            )
        # Gradients from before are set aside by the exchange between copies first: it comes last.
        if training:
            for exchange in set(self._parts.exchanges.values()):
                exchange.begin_step()
        for side in self._parts.data_parallel.values():
            side.begin_step(training=training)
        if self._recordings:
            for executor in executors:
                self._recorders[executor.rank].begin_step()
        self._num_steps += 1
        self._transport.begin_step(self._num_steps)

    def _fail(self, error: StepError, cause: BaseException | None) -> NoReturn:
        """Tell the other ranks, remember the error without what its traceback holds, raise it."""
        logger.info("step %d failed: %s", self._num_steps, error)
        self._failure = copy(error).with_traceback(None)
        for side in self._parts.data_parallel.values():
            side.restore()
        for exchange in set(self._parts.exchanges.values()):
            exchange.restore()
        agreed = self._transport.fail(self._failure)
        if agreed is not self._failure and str(agreed) != str(error):
            # Another rank failed first; its error is the one that all ranks raise.
            self._failure, error = agreed, copy(agreed)
        if isinstance(cause, BaseException) and not isinstance(cause, Exception):
            raise cause
        raise error from cause

    def _finish(
        self, program: Schedule, losses: Mapping[int, StepLoss], return_output: bool
    ) -> StepResult:
        """Share the losses, merge the outputs."""
        outputs = {m: o for runner in self._runners.values() for m, o in runner.outputs.items()}
        return self._results.make(program, losses, outputs if return_output else {})

    def _add_recorded(self, program: Schedule) -> None:
        own = [self._recorders[rank].take_rows() for rank in self._transport.local_ranks]
        rows = self._transport.gather_objects(own)
        timeline = make_timeline(program, rows, self._transport.clock_offsets())
        for recording in self._recordings:
            recording.add(timeline)
