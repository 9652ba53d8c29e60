"""Schedules of several stages a rank, and the classes that programs derive their own from."""

from __future__ import annotations

import csv
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from os import PathLike
from typing import Any, Literal

from pipeloom.errors import ScheduleError
from pipeloom.ir.action import Kind
from pipeloom.ir.schedule import Schedule, make_schedule
from pipeloom.ir.topology import Topology
from pipeloom.passes.place_receives import place_receives
from pipeloom.runtime.executor import ActionContext, Handler
from pipeloom.torch_api._actions import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    OVERLAP_F_B,
    REDUCE_GRAD,
    RESHARD,
    UNSHARD,
    Order,
    _Action,
    _ComputationType,
    from_ir,
    rows_to_ir,
)
from pipeloom.torch_api._lowering import (
    _add_reduce_grad,
    _add_send_recv,
    _add_unshard_reshard,
    _defer_recv_ops,
    parts_of,
)
from pipeloom.torch_api._schedule_base import (
    LossFunction,
    _CustomFunctionProtocol,
    _PipelineContext,
    _PipelineSchedule,
)
from pipeloom.torch_api._simulation import _simulate_comms_compute
from pipeloom.torch_api._utils import generate_stage_to_rank_mapping
from pipeloom.torch_api._validation import _validate_schedule
from pipeloom.torch_api.microbatch import TensorChunkSpec
from pipeloom.torch_api.stage import _PipelineStageBase
from pipeloom.verify.verifier import verify

logger = logging.getLogger("pipeloom.torch_api")

Format = Literal["compute_only", "compute_comms"]
FileName = str | PathLike[str]


class PipelineScheduleMulti(_PipelineSchedule):
    """A schedule of several stages a rank.

    A subclass sets ``pipeline_order`` (rank → actions, ``None`` where it is idle) and calls
    ``self._validate_and_set_stage_mapping(self.pipeline_order)``; or the order is loaded with
    ``_load_csv``. ``scale_grads`` as for :class:`PipelineScheduleSingle`.
    """

    def __init__(
        self,
        stages: list[_PipelineStageBase],
        n_microbatches: int,
        loss_fn: LossFunction | None = None,
        args_chunk_spec: tuple[TensorChunkSpec, ...] | None = None,
        kwargs_chunk_spec: dict[str, TensorChunkSpec] | None = None,
        output_merge_spec: dict[str, Any] | tuple[Any] | None = None,
        use_full_backward: bool | None = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
    ) -> None:
        super().__init__(
            n_microbatches=n_microbatches,
            loss_fn=loss_fn,
            args_chunk_spec=args_chunk_spec,
            kwargs_chunk_spec=kwargs_chunk_spec,
            output_merge_spec=output_merge_spec,
            scale_grads=scale_grads,
        )
        self._stages = stages
        self._num_stages = stages[0].num_stages
        self.pp_group_size = stages[0].group_size
        self.rank = stages[0].group_rank
        self._backward_requires_autograd = backward_requires_autograd
        self.pipeline_order: dict[int, list[_Action | None]] = {}
        self._set_stage_mapping(
            generate_stage_to_rank_mapping(self.pp_group_size, self._num_stages)
        )
        if use_full_backward is not None:
            logger.warning(
                "Deprecation warning: 'use_full_backward' is no longer supported. "
                "Simply stop passing it, and everything should still work fine."
            )

    def _get_stages(self) -> list[_PipelineStageBase]:
        return self._stages

    def _get_program(self) -> Order:
        if not self.pipeline_order:
            raise ScheduleError(
                f"{type(self).__name__} has no order to run: set pipeline_order, or call _load_csv"
            )
        return self.pipeline_order

    def _should_compute_loss(self, stage: _PipelineStageBase) -> bool:
        return stage.is_last and self._loss_fn is not None

    def _initialize_stages(
        self, args: Any, kwargs: Any, target: Any = None, loss_kwargs: Any = None
    ) -> None:
        for stage in self._stages:
            stage._prepare_forward_infra(self._n_microbatches, args, kwargs)

    def _set_stage_mapping(self, stage_to_rank: dict[int, int]) -> None:
        self.stage_index_to_group_rank = stage_to_rank
        for stage in self._stages:
            stage.stage_index_to_group_rank = stage_to_rank

    def _validate_and_set_stage_mapping(self, actions: Order) -> None:
        """Check an order, and take from it which rank holds which stage."""
        self._set_stage_mapping(
            _validate_schedule(actions, self.pp_group_size, self._num_stages, self._n_microbatches)
        )

    def _dump_csv(self, filename: FileName) -> None:
        """Write the order: a row a rank, a cell an action."""
        _write_csv(filename, self.pipeline_order)

    def _load_csv(self, filename: FileName, format: Format = "compute_only") -> None:
        """Read an order from a file."""
        if format != "compute_only":
            raise AssertionError(f'format must be "compute_only", got {format}')
        self.pipeline_order = _read_csv(filename)
        self._validate_and_set_stage_mapping(self.pipeline_order)


def _write_csv(filename: FileName, order: Order) -> None:
    with open(filename, "w", newline="") as file:
        csv.writer(file).writerows(order.values())


def _read_csv(filename: FileName) -> dict[int, list[_Action | None]]:
    with open(filename, newline="") as file:
        return {
            rank: [_Action.from_str(cell) for cell in row]
            for rank, row in enumerate(csv.reader(file))
        }


#: What functions can be registered for.
_REPLACEABLE = (
    FORWARD,
    FULL_BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    OVERLAP_F_B,
    UNSHARD,
    RESHARD,
    REDUCE_GRAD,
)


class _PipelineScheduleRuntime(PipelineScheduleMulti):
    """Runs programs with communication: its own lowering of an order, or one that is given.

    A subclass sets ``pipeline_order`` and calls ``_prepare_schedule_with_comms``, or sets
    ``pipeline_order_with_comms`` itself; or either is loaded with ``_load_csv``.
    """

    def __init__(self, *args: Any, defer_pp_recv: bool = False, **kwargs: Any) -> None:
        self._defer_pp_recv = defer_pp_recv
        self.pipeline_order_with_comms: dict[int, list[_Action]] | None = None
        super().__init__(*args, **kwargs)
        self._comp_type_to_function_map: dict[_ComputationType, _CustomFunctionProtocol] = {}
        self._handlers: dict[Kind | str, Handler] = {}
        self._context: _PipelineContext | None = None
        #: For handlers: how many backwards of a stage have run in this step.
        self.backward_counter: Counter[int] = Counter()
        #: For handlers: what has been received for the action at hand, by stage and microbatch.
        self.fwd_recv_ops: dict[tuple[int, int], list[Any]] = {}
        self.bwd_recv_ops: dict[tuple[int, int], list[Any]] = {}
        self.unshard_ops: dict[int, list[Any]] = defaultdict(list)
        self.unsharded_stages: set[int] = set()

    # ── functions of the user's own ──────────────────────────────────────────────────────────

    def register_custom_function(
        self, computation_type: _ComputationType, custom_function: _CustomFunctionProtocol
    ) -> None:
        """Run a function in place of a kind of action.

        ``custom_function(action, ctx)`` does what the action means, with the stages of
        ``ctx.schedule_ref``: ``forward_one_chunk``, ``backward_one_chunk`` and the like. What the
        action waits for has been received before; what it makes is sent by the actions that follow.
        """
        if computation_type not in _REPLACEABLE:
            names = ", ".join(kind.name for kind in _REPLACEABLE)
            raise ValueError(
                f"Invalid computation type {computation_type}. Only {names} are supported."
            )
        if computation_type in self._comp_type_to_function_map:
            logger.warning(
                "Computation type %s is already registered. "
                "Overwriting the existing custom function.",
                computation_type,
            )
        self._comp_type_to_function_map[computation_type] = custom_function
        self._handlers[Kind(computation_type.value)] = self._adapt(custom_function)

    def _adapt(self, custom_function: _CustomFunctionProtocol) -> Handler:
        def handle(context: ActionContext) -> None:
            assert self._context is not None
            action = from_ir(context.action)
            self._show_received(action)
            custom_function(action, self._context)
            self._settle(action)
            self.fwd_recv_ops.clear()
            self.bwd_recv_ops.clear()

        return handle

    def _show_received(self, action: _Action) -> None:
        """Entries for what the action uses. It is there already: no work to wait for."""
        here = {stage.stage_index for stage in self._stages}
        for part in parts_of(action):
            stage, kind, microbatch, _ = part
            if microbatch is None:
                continue
            if kind is FORWARD and stage > 0 and stage - 1 not in here:
                self.fwd_recv_ops[stage, microbatch] = []
            if (
                kind in (FULL_BACKWARD, BACKWARD_INPUT)
                and stage < self._num_stages - 1
                and stage + 1 not in here
            ):
                self.bwd_recv_ops[stage, microbatch] = []

    def _settle(self, action: _Action) -> None:
        links = {stage.stage_index: stage._link for stage in self._stages}
        for part in parts_of(action):
            link = links[part.stage_index]
            if link is not None and part.microbatch_index is not None:
                link.settle(part.computation_type.value, part.microbatch_index)

    def _get_handlers(self, context: _PipelineContext) -> Mapping[Kind | str, Handler]:
        self._context = context
        self.backward_counter.clear()
        self.unshard_ops.clear()
        self.unsharded_stages.clear()
        return dict(self._handlers)

    def _assert_unsharded(self, stage: _PipelineStageBase) -> None:
        """For handlers: wait until the parameters of a stage are gathered."""
        for operation in self.unshard_ops.pop(stage.stage_index, ()):
            operation.wait()
            self.unsharded_stages.add(stage.stage_index)
        if stage._link is not None:
            stage._link.wait_unsharded()

    # ── programs ─────────────────────────────────────────────────────────────────────────────

    def _get_program(self) -> Order:
        if self.pipeline_order_with_comms is None:
            raise AssertionError(
                "Must call _prepare_schedule_with_comms() before calling _step_microbatches()"
            )
        return self.pipeline_order_with_comms

    def _find_rank(self) -> Callable[[int], int]:
        mapping = self.stage_index_to_group_rank
        return lambda stage: mapping[stage]

    def _prepare_schedule_with_comms(self, actions: Order, format: Format = "compute_only") -> None:
        """Make a complete program of an order, or take one that is complete."""
        if format not in ("compute_only", "compute_comms"):
            raise NotImplementedError(f"{format=} is not implemented")
        self._validate_and_set_stage_mapping(actions)
        if format == "compute_comms":
            self.pipeline_order_with_comms = {
                rank: _require_actions(rank, row) for rank, row in actions.items()
            }
            return
        for rank, row in actions.items():
            for position, action in enumerate(row):
                if action is not None and not action.is_compute_op:
                    raise ValueError(
                        f"Expected compute-only schedule but found communication action '{action}' "
                        f"at rank {rank}, position {position}. Communication actions (e.g. SEND_F, "
                        "RECV_F, etc.) should not be present when format='compute_only'."
                    )
        gathered = {rank: _add_unshard_reshard(row) for rank, row in actions.items()}
        reduced = {
            rank: _add_reduce_grad(row, self._n_microbatches) for rank, row in gathered.items()
        }
        program = _add_send_recv(reduced, self._find_rank(), self._num_stages)
        if self._defer_pp_recv:
            program = self._defer_receives(program)
        self.pipeline_order_with_comms = program

    def _defer_receives(self, program: dict[int, list[_Action]]) -> dict[int, list[_Action]]:
        """As torch does, unless a receive would then get what was sent for another."""
        deferred = _defer_recv_ops(program, self._find_rank())
        if verify(self._as_schedule(deferred)).ok:
            return deferred
        late = place_receives(self._as_schedule(program), "late")
        return {rank: [from_ir(action) for action in row] for rank, row in enumerate(late.actions)}

    def _as_schedule(self, program: Order) -> Schedule:
        return make_schedule(
            rows_to_ir(program),
            name=type(self).__name__,
            topology=Topology.chain(self._num_stages),
            num_microbatches=self._n_microbatches,
        )

    def _load_csv(self, filename: FileName, format: Format = "compute_only") -> None:
        """Read an order and complete it, or read a complete program."""
        if format == "compute_only":
            super()._load_csv(filename)
            self._prepare_schedule_with_comms(self.pipeline_order)
        elif format == "compute_comms":
            self._prepare_schedule_with_comms(_read_csv(filename), format=format)
        else:
            raise NotImplementedError(f"{format=} is not implemented")

    def _dump_csv(self, filename: FileName, format: Format = "compute_comms") -> None:
        """Write the order, or the program with communication."""
        order: Order | None = self.pipeline_order
        if format == "compute_comms":
            order = self.pipeline_order_with_comms
            if order is None:
                raise AssertionError(
                    "Must initialize compute_comms schedule before dump_csv: call "
                    "_prepare_schedule_with_comms or _load_csv"
                )
        if order is None:
            raise AssertionError("Compute only schedule must be available")
        _write_csv(filename, order)

    def _simulate(self) -> dict[int, list[_Action | None]]:
        """The program step by step; ``ValueError`` if it comes to a halt."""
        return _simulate_comms_compute(self._get_program(), self._find_rank(), self._num_stages)


def _require_actions(rank: int, row: Any) -> list[_Action]:
    for position, action in enumerate(row):
        if action is None:
            raise AssertionError(
                f"Expected action to be not None, got {type(action)} at rank {rank}, position "
                f"{position}: a program with communication has no idle cells"
            )
    return list(row)
