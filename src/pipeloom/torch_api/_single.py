"""Schedules of one stage a rank."""

from __future__ import annotations

from typing import Any

import pipeloom
from pipeloom.errors import ScheduleError
from pipeloom.torch_api._actions import FORWARD, Order, _Action, rows_from_ir
from pipeloom.torch_api._lowering import _add_reduce_grad
from pipeloom.torch_api._schedule_base import LossFunction, _PipelineSchedule
from pipeloom.torch_api.microbatch import TensorChunkSpec
from pipeloom.torch_api.stage import _PipelineStageBase


class PipelineScheduleSingle(_PipelineSchedule):
    """A schedule of one stage a rank.

    A subclass says its order in ``_get_pipeline_order``: rank → actions, compute-only or with
    communication. ``loss_fn`` averages over its microbatch (``scale_grads=True``: the step's loss
    is the mean over microbatches) or sums (``False``).
    """

    def __init__(
        self,
        stage: _PipelineStageBase,
        n_microbatches: int,
        loss_fn: LossFunction | None = None,
        args_chunk_spec: tuple[TensorChunkSpec, ...] | None = None,
        kwargs_chunk_spec: dict[str, TensorChunkSpec] | None = None,
        output_merge_spec: dict[str, Any] | tuple[Any] | None = None,
        scale_grads: bool = True,
    ) -> None:
        super().__init__(
            n_microbatches=n_microbatches,
            loss_fn=loss_fn,
            args_chunk_spec=args_chunk_spec,
            kwargs_chunk_spec=kwargs_chunk_spec,
            output_merge_spec=output_merge_spec,
            scale_grads=scale_grads,
        )
        self._stage = stage
        self._num_stages = stage.num_stages
        self.pipeline_order: dict[int, list[_Action | None]] | None = self._get_pipeline_order()

    def _get_stages(self) -> list[_PipelineStageBase]:
        return [self._stage]

    def _initialize_stage(
        self, args: Any, kwargs: Any, target: Any = None, loss_kwargs: Any = None
    ) -> None:
        self._stage._prepare_forward_infra(self._n_microbatches, args, kwargs)

    def _get_pipeline_order(self) -> dict[int, list[_Action | None]] | None:
        """The order of all ranks; ``None`` if the subclass sets ``pipeline_order`` later."""
        return None

    def _get_program(self) -> Order:
        if self.pipeline_order is None:
            raise ScheduleError(
                f"{type(self).__name__} has no order to run: return one from _get_pipeline_order, "
                "or set pipeline_order"
            )
        return self.pipeline_order

    def _build_order(self, name: str) -> dict[int, list[_Action | None]]:
        schedule = pipeloom.build_schedule(
            name, ranks=self._num_stages, microbatches=self._n_microbatches
        )
        order = rows_from_ir(schedule.actions)
        return {rank: _add_reduce_grad(row, self._n_microbatches) for rank, row in order.items()}


class _ScheduleForwardOnly(PipelineScheduleSingle):
    """Forward passes alone, without a loss."""

    def _step_microbatches(
        self,
        arg_mbs: list[tuple[Any, ...]] | None = None,
        kwarg_mbs: list[dict[str, Any]] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> None:
        if target_mbs is not None or losses is not None:
            raise RuntimeError("Forward-only schedule does not support loss computation")
        has_backward, self._has_backward = self._has_backward, False
        try:
            super()._step_microbatches(arg_mbs, kwarg_mbs, None, None, return_outputs)
        finally:
            self._has_backward = has_backward

    def _get_pipeline_order(self) -> dict[int, list[_Action | None]]:
        every = range(self._n_microbatches)
        return {
            rank: [_Action(rank, FORWARD, microbatch) for microbatch in every]
            for rank in range(self._num_stages)
        }


class ScheduleGPipe(PipelineScheduleSingle):
    """All forwards, then all backwards."""

    def _get_pipeline_order(self) -> dict[int, list[_Action | None]]:
        return self._build_order("gpipe")


class Schedule1F1B(PipelineScheduleSingle):
    """One forward, one backward in turns; at most as many microbatches in flight as stages."""

    def __init__(
        self,
        stage: _PipelineStageBase,
        n_microbatches: int,
        loss_fn: LossFunction | None = None,
        args_chunk_spec: tuple[TensorChunkSpec, ...] | None = None,
        kwargs_chunk_spec: dict[str, TensorChunkSpec] | None = None,
        output_merge_spec: dict[str, Any] | tuple[Any] | None = None,
        scale_grads: bool = True,
    ) -> None:
        if n_microbatches < stage.num_stages:
            raise ValueError(
                f"Number of microbatches ({n_microbatches}) must be greater than or equal to the "
                f"number of stages ({stage.num_stages})."
            )
        super().__init__(
            stage=stage,
            n_microbatches=n_microbatches,
            loss_fn=loss_fn,
            args_chunk_spec=args_chunk_spec,
            kwargs_chunk_spec=kwargs_chunk_spec,
            output_merge_spec=output_merge_spec,
            scale_grads=scale_grads,
        )

    def _get_pipeline_order(self) -> dict[int, list[_Action | None]]:
        return self._build_order("1f1b")
