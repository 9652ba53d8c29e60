"""Every schedule class and function of ``torch.distributed.pipelining.schedules``, by its name."""

from __future__ import annotations

from pipeloom.torch_api._actions import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    OVERLAP_F_B,
    RECV_B,
    RECV_F,
    REDUCE_GRAD,
    RESHARD,
    SEND_B,
    SEND_F,
    UNSHARD,
    B,
    F,
    I,
    W,
    _Action,
    _ComputationType,
    _get_profiler_function_name,
)
from pipeloom.torch_api._lowering import (
    _add_reduce_grad,
    _add_send_recv,
    _add_unshard_reshard,
    _defer_recv_ops,
    _merge_bw,
    _requires_reduce_grad,
)
from pipeloom.torch_api._multi import PipelineScheduleMulti, _PipelineScheduleRuntime
from pipeloom.torch_api._named import (
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
    _check_torch_compile_compatibility,
)
from pipeloom.torch_api._point_to_point import _batch_p2p, _sorted_batch_p2p, _wait_batch_p2p
from pipeloom.torch_api._rank_orders import _get_1f1b_rank_ops, _get_warmup_ops
from pipeloom.torch_api._schedule_base import (
    _CustomFunctionProtocol,
    _PipelineContext,
    _PipelineSchedule,
)
from pipeloom.torch_api._simulation import _dump_chrometrace, _simulate_comms_compute
from pipeloom.torch_api._single import (
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleGPipe,
    _ScheduleForwardOnly,
)
from pipeloom.torch_api._validation import _format_pipeline_order, _validate_schedule
from pipeloom.torch_api.microbatch import (
    TensorChunkSpec,
    merge_chunks,
    split_args_kwargs_into_chunks,
)
from pipeloom.torch_api.stage import PipelineStage, _PipelineStageBase

__all__ = [
    "get_schedule_class",
    "PipelineScheduleSingle",
    "PipelineScheduleMulti",
    "Schedule1F1B",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleLoopedBFS",
    "ScheduleInterleavedZeroBubble",
    "ScheduleZBVZeroBubble",
    "ScheduleDualPipeV",
    # Not exported by torch's module either, but imported from it by name.
    "B",
    "BACKWARD_INPUT",
    "BACKWARD_WEIGHT",
    "F",
    "FORWARD",
    "FULL_BACKWARD",
    "I",
    "OVERLAP_F_B",
    "PipelineStage",
    "RECV_B",
    "RECV_F",
    "REDUCE_GRAD",
    "RESHARD",
    "SEND_B",
    "SEND_F",
    "TensorChunkSpec",
    "UNSHARD",
    "W",
    "_Action",
    "_ComputationType",
    "_CustomFunctionProtocol",
    "_PipelineContext",
    "_PipelineSchedule",
    "_PipelineScheduleRuntime",
    "_PipelineStageBase",
    "_ScheduleForwardOnly",
    "_add_reduce_grad",
    "_add_send_recv",
    "_add_unshard_reshard",
    "_batch_p2p",
    "_check_torch_compile_compatibility",
    "_defer_recv_ops",
    "_dump_chrometrace",
    "_format_pipeline_order",
    "_get_1f1b_rank_ops",
    "_get_profiler_function_name",
    "_get_warmup_ops",
    "_merge_bw",
    "_requires_reduce_grad",
    "_simulate_comms_compute",
    "_sorted_batch_p2p",
    "_validate_schedule",
    "_wait_batch_p2p",
    "merge_chunks",
    "split_args_kwargs_into_chunks",
]

_CLASSES: dict[str, type[_PipelineSchedule]] = {
    "1F1B": Schedule1F1B,
    "Interleaved1F1B": ScheduleInterleaved1F1B,
    "GPipe": ScheduleGPipe,
    "LoopedBFS": ScheduleLoopedBFS,
    "InterleavedZeroBubble": ScheduleInterleavedZeroBubble,
    "PipelineScheduleSingle": PipelineScheduleSingle,
    "PipelineScheduleMulti": PipelineScheduleMulti,
    "ZBVZeroBubble": ScheduleZBVZeroBubble,
    "DualPipeV": ScheduleDualPipeV,
}


def get_schedule_class(schedule_name: str) -> type[_PipelineSchedule]:
    """The class of a name, whatever its case.

    >>> get_schedule_class("interleaved1f1b").__name__
    'ScheduleInterleaved1F1B'
    """
    for name, schedule_class in _CLASSES.items():
        if name.lower() == schedule_name.lower():
            return schedule_class
    raise ValueError(
        f"Unknown schedule name '{schedule_name}'. The valid options are {list(_CLASSES)}"
    )
