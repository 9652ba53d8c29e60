"""The named schedules of several stages a rank.

Orders are the library's (:mod:`pipeloom.schedules`); here are torch's constructors, its rules for
shapes, and where it leaves cells idle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pipeloom
from pipeloom.errors import BackwardMethodError
from pipeloom.ir.dependencies import Dependencies
from pipeloom.ir.products import Product
from pipeloom.runtime.backward import check_compiled
from pipeloom.torch_api._actions import FORWARD, _Action, from_ir, to_ir
from pipeloom.torch_api._lowering import make_table
from pipeloom.torch_api._multi import _PipelineScheduleRuntime
from pipeloom.torch_api._schedule_base import LossFunction
from pipeloom.torch_api._utils import generate_stage_to_rank_mapping
from pipeloom.torch_api.microbatch import TensorChunkSpec
from pipeloom.torch_api.stage import _PipelineStageBase

Row = list["_Action | None"]


def _check_torch_compile_compatibility(
    stages: Sequence[_PipelineStageBase], schedule_name: str
) -> None:
    """Refuse stages that are compiled as a whole where the schedule splits their backward."""
    for stage in stages:
        if stage.dw_builder is not None or not hasattr(stage.submod, "named_modules"):
            continue
        try:
            check_compiled(stage.submod, "deferred")
        except BackwardMethodError as error:
            raise RuntimeError(
                f"The {schedule_name} schedule is not supported with stage modules that are "
                f"compiled as a whole with torch.compile: it splits the backward, and {error}. "
                "Compile the blocks inside the stage (block.compile()), or choose a schedule with "
                "full backwards, such as Interleaved1F1B"
            ) from None


class _NamedSchedule(_PipelineScheduleRuntime):
    """Builds its order when it is constructed, and completes it."""

    #: The name in the library, and how stages are dealt to ranks.
    _library_name: str
    _style = "loop"
    _splits_backward = False

    def __init__(
        self,
        stages: list[_PipelineStageBase],
        n_microbatches: int,
        loss_fn: LossFunction | None = None,
        args_chunk_spec: tuple[TensorChunkSpec, ...] | None = None,
        kwargs_chunk_spec: dict[str, TensorChunkSpec] | None = None,
        output_merge_spec: dict[str, Any] | tuple[Any] | None = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        defer_pp_recv: bool = False,
    ) -> None:
        if self._splits_backward:
            _check_torch_compile_compatibility(stages, type(self).__name__)
        super().__init__(
            stages=stages,
            n_microbatches=n_microbatches,
            loss_fn=loss_fn,
            args_chunk_spec=args_chunk_spec,
            kwargs_chunk_spec=kwargs_chunk_spec,
            output_merge_spec=output_merge_spec,
            scale_grads=scale_grads,
            backward_requires_autograd=backward_requires_autograd,
            defer_pp_recv=defer_pp_recv,
        )
        self.n_local_stages = len(stages)
        self.num_stages = self._num_stages
        self._check_shape()
        self._set_stage_mapping(
            generate_stage_to_rank_mapping(self.pp_group_size, self._num_stages, style=self._style)
        )
        self.pipeline_order = {
            rank: self._calculate_single_rank_operations(rank) for rank in range(self.pp_group_size)
        }
        self._finish_order()
        self._prepare_schedule_with_comms(self.pipeline_order)

    def _check_shape(self) -> None:
        """Raise ``ValueError`` for numbers that the schedule cannot do."""

    def _finish_order(self) -> None:
        """What concerns the rows of all ranks together."""

    def _calculate_single_rank_operations(self, rank: int) -> Row:
        """The row of one rank, idle cells included."""
        raise NotImplementedError

    def _build_rows(self, num_microbatches: int) -> list[list[_Action]]:
        schedule = pipeloom.build_schedule(
            self._library_name,
            ranks=self.pp_group_size,
            microbatches=num_microbatches,
            chunks=None if self._style == "v" else self.n_local_stages,
        )
        return [[from_ir(action) for action in row] for row in schedule.actions]

    def _count_warmup(self, rank: int, per_hop: int) -> int:
        """Forwards before the first backward: those of all chunks but the last, and more for each
        rank between this one and the last."""
        warmup = (self.n_local_stages - 1) * self.microbatches_per_round
        warmup += per_hop * (self.pp_group_size - 1 - rank)
        return min(warmup, self._n_microbatches * self.n_local_stages)

    @property
    def number_of_rounds(self) -> int:
        return max(1, self._n_microbatches // self.pp_group_size)

    @property
    def microbatches_per_round(self) -> int:
        return self._n_microbatches // self.number_of_rounds

    def _require_whole_rounds(self, name: str) -> None:
        if self._n_microbatches % self.number_of_rounds:
            raise ValueError(
                f"{name} requires the number of microbatches to be a multiple of the number of "
                f"rounds ({self.number_of_rounds}), but got {self._n_microbatches}."
            )

    def _require_two_stages(self, name: str) -> None:
        if self.n_local_stages != 2:
            raise ValueError(
                f"{name} requires exactly 2 stages per rank, but got {self.n_local_stages}."
            )


class ScheduleLoopedBFS(_NamedSchedule):
    """Breadth first: all microbatches through a stage before the rank's next stage begins."""

    _library_name = "looped_bfs"

    def __init__(
        self,
        stages: list[_PipelineStageBase],
        n_microbatches: int,
        loss_fn: LossFunction | None = None,
        output_merge_spec: dict[str, Any] | tuple[Any] | None = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        defer_pp_recv: bool = False,
    ) -> None:
        super().__init__(
            stages=stages,
            n_microbatches=n_microbatches,
            loss_fn=loss_fn,
            output_merge_spec=output_merge_spec,
            scale_grads=scale_grads,
            backward_requires_autograd=backward_requires_autograd,
            defer_pp_recv=defer_pp_recv,
        )

    def _calculate_single_rank_operations(self, rank: int) -> Row:
        row = self._build_rows(self._n_microbatches)[rank]
        forwards = self.n_local_stages * self._n_microbatches
        drain = 2 * (self.pp_group_size - 1 - rank)
        return [*_idle(rank), *row[:forwards], *_idle(drain), *row[forwards:]]


class ScheduleInterleaved1F1B(_NamedSchedule):
    """1F1B over several stages a rank; rounds of microbatches take turns on the stages."""

    _library_name = "interleaved_1f1b"

    def _check_shape(self) -> None:
        self._require_whole_rounds("Interleaved 1F1B")

    def _calculate_single_rank_operations(self, rank: int) -> Row:
        row = self._build_rows(self._n_microbatches)[rank]
        warmup = self._count_warmup(rank, per_hop=2)
        first_backward = self.n_local_stages * self.pp_group_size + 2 * (
            self.pp_group_size - 1 - rank
        )
        wait = first_backward - (warmup + rank) if warmup else 0
        drain = len(row) - warmup
        cooldown = [cell for action in row[drain:] for cell in (None, action)]
        return [*_idle(rank), *row[:warmup], *_idle(wait), *row[warmup:drain], *cooldown]


class ScheduleInterleavedZeroBubble(_NamedSchedule):
    """Interleaved 1F1B with split backward: weights fill what would be idle."""

    _library_name = "interleaved_zero_bubble"
    _splits_backward = True

    def _check_shape(self) -> None:
        self._require_whole_rounds("Zero bubble")

    def _calculate_single_rank_operations(self, rank: int) -> Row:
        row = self._build_rows(self._n_microbatches)[rank]
        warmup = self._count_warmup(rank, per_hop=1)
        wait = self.pp_group_size - rank - 1 if warmup else 0
        return [*_idle(rank), *row[:warmup], *_idle(wait), *row[warmup:]]

    def _finish_order(self) -> None:
        self.pipeline_order = self._add_bubbles_to_actions(self._num_stages)

    def _add_bubbles_to_actions(self, num_stages_global: int) -> dict[int, Row]:
        """Leave a rank idle until the forward it waits for has run, a step an action."""
        table = make_table(self._find_rank(), num_stages_global, self.pp_group_size - 1)
        left = {rank: list(reversed(row)) for rank, row in self.pipeline_order.items()}
        rows: dict[int, Row] = {rank: [] for rank in left}
        there: set[Product] = set()
        while any(left.values()):
            made: list[Product] = []
            for rank, cells in left.items():
                if not cells:
                    continue
                action = cells[-1]
                if action is not None and not _has_forward_input(table, action, there):
                    rows[rank].append(None)
                    continue
                rows[rank].append(cells.pop())
                if action is not None:
                    made += table.produces(to_ir(action))
            there.update(made)
        return rows


def _has_forward_input(table: Dependencies, action: _Action, there: set[Product]) -> bool:
    if action.computation_type is not FORWARD:
        return True
    microbatch = action.microbatch_index
    stages = table.topology.predecessors(action.stage_index)
    return all(
        product in there
        for stage in stages
        for product in table.produces(to_ir(_Action(stage, FORWARD, microbatch)))
    )


class ScheduleZBVZeroBubble(_NamedSchedule):
    """Zero bubble on a V: each rank holds a stage and its mirror, the backward is split."""

    _library_name = "zbv"
    _style = "v"
    _splits_backward = True

    def _check_shape(self) -> None:
        self._require_two_stages("ZBV")

    def _calculate_single_rank_operations(self, rank: int) -> Row:
        # Fewer microbatches run in the cells of as many as fill the pipeline.
        row = self._build_rows(max(2 * self.pp_group_size - 1, self._n_microbatches))[rank]
        return [*_idle(rank), *(self._keep(action) for action in row)]

    def _keep(self, action: _Action) -> _Action | None:
        assert action.microbatch_index is not None
        return action if action.microbatch_index < self._n_microbatches else None


class ScheduleDualPipeV(_NamedSchedule):
    """A forward and a backward overlap wherever possible, on a V."""

    _library_name = "dualpipev"
    _style = "v"
    _splits_backward = True

    def _check_shape(self) -> None:
        self._require_two_stages("DualPipeV")
        if self._n_microbatches < self._num_stages:
            raise ValueError(
                "DualPipeV requires at least as many microbatches as stages, but got "
                f"{self._n_microbatches} microbatches and {self._num_stages} stages."
            )

    def _calculate_single_rank_operations(self, rank: int) -> Row:
        return [*self._build_rows(self._n_microbatches)[rank]]


def _idle(cells: int) -> Row:
    return [None] * cells
