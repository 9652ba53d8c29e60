"""The names of ``torch.distributed.pipelining`` over pipeloom's engine, module for module.

::

    from torch.distributed.pipelining import PipelineStage, Schedule1F1B      before
    from pipeloom.torch_api import PipelineStage, Schedule1F1B                after
"""

from __future__ import annotations

from pipeloom.torch_api._alias import install_as_torch
from pipeloom.torch_api._IR import Pipe, SplitPoint, pipe_split, pipeline
from pipeloom.torch_api.schedules import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
    _ScheduleForwardOnly,
)
from pipeloom.torch_api.stage import PipelineStage, build_stage

__all__ = [
    "Pipe",
    "PipelineStage",
    "Schedule1F1B",
    "ScheduleDualPipeV",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleZBVZeroBubble",
    "SplitPoint",
    "_ScheduleForwardOnly",
    "build_stage",
    "install_as_torch",
    "pipe_split",
    "pipeline",
]
