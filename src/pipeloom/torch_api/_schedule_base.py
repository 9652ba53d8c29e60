"""What all schedule classes share: how a step is called, and what becomes of its results."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from pipeloom.errors import StepFailed
from pipeloom.ir.action import Kind
from pipeloom.runtime.executor import Handler
from pipeloom.torch_api._actions import Order, _Action
from pipeloom.torch_api._engine import Engine, StepRequest
from pipeloom.torch_api._validation import _format_pipeline_order
from pipeloom.torch_api.microbatch import (
    TensorChunkSpec,
    _split_tensor,
    merge_chunks,
    split_args_kwargs_into_chunks,
)
from pipeloom.torch_api.stage import _PipelineStageBase

logger = logging.getLogger("pipeloom.torch_api")

LossFunction = Callable[..., Tensor]
_TARGET_CHUNK_SPEC = TensorChunkSpec(0)


@dataclass
class _PipelineContext:
    """What a function of :meth:`register_custom_function` is told besides its action."""

    schedule_ref: _PipelineSchedule
    arg_mbs: list[tuple[Any, ...]] | None = None
    kwarg_mbs: list[dict[str, Any]] | None = None
    target_mbs: list[Any] | None = None
    losses: list[Any] | None = None


class _CustomFunctionProtocol(Protocol):
    def __call__(self, action: _Action, ctx: _PipelineContext) -> None: ...


class _PipelineSchedule:
    """A schedule and the stages of this rank. See the single- and multi-stage classes."""

    def __init__(
        self,
        n_microbatches: int,
        loss_fn: LossFunction | None = None,
        args_chunk_spec: tuple[TensorChunkSpec, ...] | None = None,
        kwargs_chunk_spec: dict[str, TensorChunkSpec] | None = None,
        output_merge_spec: dict[str, Any] | tuple[Any] | None = None,
        scale_grads: bool = True,
    ) -> None:
        if n_microbatches < 1:
            raise ValueError(f"n_microbatches is {n_microbatches}; it must be at least 1")
        self._n_microbatches = n_microbatches
        self._loss_fn = loss_fn
        self.scale_grads = scale_grads
        self._args_chunk_spec = args_chunk_spec
        self._kwargs_chunk_spec = kwargs_chunk_spec
        self._output_merge_spec = output_merge_spec
        self._has_backward = loss_fn is not None
        self._backward_requires_autograd = True
        #: The losses of a step by microbatch, while it runs.
        self._internal_losses: list[Any] = []
        self._engine: Engine | None = None
        self._request: StepRequest | None = None

    # ── what subclasses say ──────────────────────────────────────────────────────────────────

    def _get_stages(self) -> list[_PipelineStageBase]:
        raise NotImplementedError

    def _get_program(self) -> Order:
        """What the ranks run: a compute-only order or a complete program."""
        raise NotImplementedError

    def _get_handlers(self, context: _PipelineContext) -> Mapping[Kind | str, Handler]:
        return {}

    # ── what users call ──────────────────────────────────────────────────────────────────────

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        arg_mbs: list[tuple[Any, ...]] | None = None,
        kwarg_mbs: list[dict[str, Any]] | None = None,
        target_mbs: list[Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run one step: with a loss function forward and backward, otherwise forward only.

        A whole batch (``args``, ``kwargs``, ``target``), cut here, or microbatches that are cut
        already (``arg_mbs``, ``kwarg_mbs``, ``target_mbs``). ``args`` matter on the rank of the
        first stage, ``target`` on that of the last, ``kwargs`` on all. ``losses`` is filled on the
        last stage's rank, one a microbatch, in their order; the merged output is returned there.
        """
        if self._has_backward and self._backward_requires_autograd and not torch.is_grad_enabled():
            raise RuntimeError(
                "step() requires gradients to be enabled for backward computation; "
                "it should not be used under torch.no_grad() context. "
                "Please call eval() instead."
            )
        cut = {"arg_mbs": arg_mbs, "kwarg_mbs": kwarg_mbs, "target_mbs": target_mbs}
        given = [name for name, value in cut.items() if value is not None]
        if given and (args or kwargs or target is not None):
            raise ValueError(
                f"{', '.join(given)} and a whole batch exclude each other: pass positional and "
                "keyword arguments and target, or arg_mbs, kwarg_mbs and target_mbs"
            )
        if not given:
            arg_mbs, kwarg_mbs = self._split_inputs(args, kwargs)
            target_mbs = self._split_target(target)
        stages = self._get_stages()
        self._step_microbatches(
            arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs, loss_kwargs=loss_kwargs
        )
        for stage in stages:
            if stage.is_last and return_outputs:
                return self._merge_outputs(stage.output_chunks)
        return None

    def eval(
        self, *args: Any, target: Any = None, losses: list[Any] | None = None, **kwargs: Any
    ) -> Any:
        """Run the forward passes alone; ``.grad`` is not touched."""
        has_backward = self._has_backward
        self._has_backward = False
        try:
            return self.step(*args, target=target, losses=losses, **kwargs)
        finally:
            self._has_backward = has_backward

    # ── a step ───────────────────────────────────────────────────────────────────────────────

    def _step_microbatches(
        self,
        arg_mbs: list[tuple[Any, ...]] | None = None,
        kwarg_mbs: list[dict[str, Any]] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """One step with microbatches that are cut already."""
        arg_mbs, kwarg_mbs = self._check_inputs(arg_mbs, kwarg_mbs, target_mbs, losses)
        stages = self._get_stages()
        for stage in stages:
            stage.has_backward = self._has_backward
            stage.clear_runtime_states()
        if self._engine is None:
            self._engine = Engine(stages, self._num_stages_in_all(), self._n_microbatches)
        order = self._get_program()
        has_loss = self._loss_fn is not None
        self._internal_losses.clear()

        def compute_loss(output: Any, target: Any) -> Any:
            return self._compute_loss(output, target, loss_kwargs)

        request = self._request = StepRequest(
            arg_mbs,
            kwarg_mbs,
            target_mbs,
            training=self._has_backward,
            keep_outputs=return_outputs,
            compute_loss=compute_loss if has_loss else None,
            wants_losses=losses is not None,
            averages=self.scale_grads,
        )
        context = _PipelineContext(self, arg_mbs, kwarg_mbs, target_mbs, losses)
        try:
            self._engine.run(
                order, request, name=type(self).__name__, handlers=self._get_handlers(context)
            )
        except StepFailed as error:
            self._log_failure(order, error)
            raise
        finally:
            self._request = None
        self._take_results(stages, request)
        self._update_losses(stages, losses)

    def _num_stages_in_all(self) -> int:
        return self._get_stages()[0].num_stages

    def _log_failure(self, order: Order, error: StepFailed) -> None:
        """The program, with the step at which it broke where that was on this rank."""
        rank = self._get_stages()[0].group_rank
        if error.rank != rank or not logger.isEnabledFor(logging.ERROR):
            return
        texts = [str(action) for action in order[rank]]
        step = texts.index(error.action) if error.action in texts else None
        grid = _format_pipeline_order(order, error_step_number=step)
        logger.error("%s failed at %s:\n%s", type(self).__name__, error.action, grid)

    def _take_results(self, stages: Sequence[_PipelineStageBase], request: StepRequest) -> None:
        known = request.losses.losses if request.losses is not None else {}
        if known:
            # Otherwise a handler computed them, and added them itself.
            self._internal_losses[:] = [known[microbatch] for microbatch in sorted(known)]
        for stage in stages:
            if stage.is_last and request.outputs is not None:
                outputs = request.outputs
                stage.output_chunks[:] = [outputs[microbatch] for microbatch in sorted(outputs)]

    # ── what programs read, call or override ─────────────────────────────────────────────────

    def _check_inputs(
        self,
        arg_mbs: list[tuple[Any, ...]] | None = None,
        kwarg_mbs: list[dict[str, Any]] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Any] | None = None,
    ) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
        """Lists of one entry per microbatch, with empty ones where nothing was given."""
        for name, given in (
            ("arg_mbs", arg_mbs),
            ("kwarg_mbs", kwarg_mbs),
            ("target_mbs", target_mbs),
        ):
            if given is None:
                continue
            if not isinstance(given, list):
                raise TypeError(f"{name} must be a list but got a {type(given)}")
            if len(given) != self._n_microbatches:
                raise ValueError(f"Expecting {self._n_microbatches} {name} but got {len(given)}")
        if losses is not None and not isinstance(losses, list):
            raise TypeError(f"losses must be a list but got a {type(losses)}")
        return (
            [()] * self._n_microbatches if arg_mbs is None else arg_mbs,
            [{}] * self._n_microbatches if kwarg_mbs is None else kwarg_mbs,
        )

    def _split_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
        """The arguments of every microbatch; empty ones where there are none."""
        if not args and not kwargs:
            return [()] * self._n_microbatches, [{}] * self._n_microbatches
        return split_args_kwargs_into_chunks(
            args, kwargs, self._n_microbatches, self._args_chunk_spec, self._kwargs_chunk_spec
        )

    def _split_target(self, target: Any) -> list[Any] | None:
        if target is None:
            return None
        if isinstance(target, Tensor):
            return list(_split_tensor(target, _TARGET_CHUNK_SPEC, self._n_microbatches))
        parts, _ = split_args_kwargs_into_chunks((target,), None, self._n_microbatches)
        return [part for (part,) in parts]

    def _merge_outputs(self, output_chunks: list[Any]) -> Any:
        """The output of the whole batch."""
        return merge_chunks(output_chunks, self._output_merge_spec)

    def _compute_loss(
        self, output: Any, target: Any, loss_kwargs: dict[str, Any] | None = None
    ) -> Any:
        """The loss of one microbatch."""
        assert self._loss_fn is not None
        return self._loss_fn(output, target, **(loss_kwargs or {}))

    def _maybe_compute_loss(
        self,
        stage: _PipelineStageBase,
        output: Any,
        target_mbs: list[Any] | None,
        mb_index: int,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Nothing is left to do: F of the last stage computes the loss."""

    def _maybe_get_loss(self, stage: _PipelineStageBase, mb_index: int) -> Any:
        """The loss of a microbatch on the last stage, once its F has run; elsewhere ``None``."""
        if not stage.is_last or self._loss_fn is None:
            return None
        running = self._request.losses if self._request is not None else None
        known = dict(enumerate(self._internal_losses)) if running is None else running.losses
        if mb_index not in known:
            raise RuntimeError(
                f"Loss for microbatch {mb_index} is not available. "
                f"Available losses for microbatches: {sorted(known)}"
            )
        return known[mb_index]

    def _update_losses(self, stages: Any, losses: list[Any] | None) -> None:
        """Hand the losses of a step to the list that its caller gave."""
        each = stages if isinstance(stages, list) else [stages]
        if losses is not None and any(stage.is_last for stage in each):
            if len(self._internal_losses) != self._n_microbatches:
                raise RuntimeError(
                    f"Expecting {self._n_microbatches} losses but got {len(self._internal_losses)}"
                )
            losses[:] = self._internal_losses
        self._internal_losses.clear()
