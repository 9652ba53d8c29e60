"""Looking at schedules: their actions by rank, spaced by time, and as a picture.

::

    ops = get_schedule_ops("ZBVZeroBubble", 4, 8, add_spacing=True)
    visualize_schedule(ops, "zbv.png")              # or .svg, .html
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
from torch import nn

from pipeloom.cost.constant import StageCosts
from pipeloom.ir.dependencies import RULES
from pipeloom.ir.schedule import Schedule, make_schedule
from pipeloom.ir.timeline import Span, Timeline
from pipeloom.simulate.analysis import analyse
from pipeloom.simulate.engine import simulate
from pipeloom.torch_api._actions import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    OVERLAP_F_B,
    _Action,
    _ComputationType,
    from_ir,
    rows_to_ir,
    to_ir,
)
from pipeloom.torch_api._multi import PipelineScheduleMulti, _PipelineScheduleRuntime
from pipeloom.torch_api._schedule_base import _PipelineSchedule
from pipeloom.torch_api._single import PipelineScheduleSingle
from pipeloom.torch_api.schedules import get_schedule_class
from pipeloom.torch_api.stage import _PipelineStageBase

__all__ = ["OpKey", "add_schedule_op_spacing", "get_schedule_ops", "visualize_schedule"]

Rows = list[list["_Action | None"]]


class OpKey(NamedTuple):
    """What names a computation."""

    stage_index: int
    computation_type: _ComputationType
    microbatch_index: int


class _ComputationTypeVisual:
    """How wide a computation is drawn, and what it is called."""

    def __init__(self, color: str, text: str = "", width: int = 1) -> None:
        self.color = color
        self.width = width
        self.text = text


action_type_to_color_mapping = {
    FORWARD: _ComputationTypeVisual("blue", "Forward"),
    BACKWARD_INPUT: _ComputationTypeVisual("teal", "Backward Input"),
    BACKWARD_WEIGHT: _ComputationTypeVisual("green", "Backward Weight"),
    FULL_BACKWARD: _ComputationTypeVisual("orange", "Full Backward", 2),
    OVERLAP_F_B: _ComputationTypeVisual("purple", "Overlap F+B", 3),
}


class _StandInStage(_PipelineStageBase):
    """A stage to construct schedules with, without a process group."""

    def __init__(self, stage_index: int, num_stages: int, group_size: int) -> None:
        self.submod = nn.Identity()
        self.stage_index = stage_index
        self.num_stages = num_stages
        self.group_size = group_size
        self.group_rank = 0
        self.group = None
        self.device = torch.device("cpu")


def get_schedule_ops(
    schedule: str | type[_PipelineSchedule],
    pp_degree: int,
    num_microbatches: int,
    num_stages_per_rank: int | None = None,
    add_spacing: bool = False,
    with_comms: bool = False,
    defer_pp_recv: bool = False,
) -> Rows:
    """The actions of every rank.

    ``add_spacing`` puts an idle cell wherever a rank waits for a step, ``with_comms`` shows the
    complete program.

    >>> get_schedule_ops("1F1B", 2, 2, add_spacing=True)
    [[0F0, 0F1, None, None, 0B0, None, 0B1], [None, 1F0, 1B0, 1F1, 1B1]]
    """
    if add_spacing and with_comms:
        raise ValueError("Cannot add spacing and view comms at the same time")
    if isinstance(schedule, str):
        schedule_class = get_schedule_class(schedule)
    elif issubclass(schedule, _PipelineSchedule):
        schedule_class = schedule
    else:
        raise ValueError(f"Invalid schedule: {schedule}")
    order = _construct(schedule_class, pp_degree, num_microbatches, num_stages_per_rank)
    if with_comms:
        order = _complete(order, pp_degree, num_microbatches, defer_pp_recv)
    rows = [list(order[rank]) for rank in range(pp_degree)]
    return add_schedule_op_spacing(rows) if add_spacing else rows


def _construct(
    schedule_class: type[_PipelineSchedule],
    ranks: int,
    microbatches: int,
    stages_per_rank: int | None,
) -> dict[int, list[_Action | None]]:
    single = issubclass(schedule_class, PipelineScheduleSingle)
    if not single and not issubclass(schedule_class, PipelineScheduleMulti):
        raise ValueError(f"Invalid schedule: {schedule_class}")
    per_rank = stages_per_rank or (1 if single else 2)
    if single and per_rank != 1:
        raise AssertionError(f"Expected num_stages_per_rank to be 1, got {per_rank}")
    if not single and per_rank < 2:
        raise AssertionError(f"Expected num_stages_per_rank >= 2, got {per_rank}")
    stages = [_StandInStage(chunk * ranks, per_rank * ranks, ranks) for chunk in range(per_rank)]
    made = schedule_class(stages[0] if single else stages, microbatches)  # type: ignore[arg-type]
    order: dict[int, list[_Action | None]] | None = getattr(made, "pipeline_order", None)
    if not order:
        raise AssertionError(f"{schedule_class.__name__} has no pipeline_order to show")
    return order


def _complete(
    order: dict[int, list[_Action | None]], ranks: int, microbatches: int, defer: bool
) -> dict[int, list[_Action | None]]:
    compute = {
        rank: [action for action in row if action is None or action.is_compute_op]
        for rank, row in order.items()
    }
    num_stages = make_schedule(rows_to_ir(compute)).num_stages
    stages: list[_PipelineStageBase] = [_StandInStage(0, num_stages, ranks)]
    runtime = _PipelineScheduleRuntime(stages, microbatches, defer_pp_recv=defer)
    runtime._prepare_schedule_with_comms(compute)
    program = runtime.pipeline_order_with_comms
    assert program is not None
    return {rank: list(row) for rank, row in program.items()}


def add_schedule_op_spacing(schedule: Sequence[Sequence[_Action | None]]) -> Rows:
    """An idle cell for every step that a rank waits; F, I and W take one step, B two, overlaps
    three. What is not computed takes no time and is left out."""
    rows = {
        rank: [action for action in row if action is not None and action.is_compute_op]
        for rank, row in enumerate(schedule)
    }
    if not any(rows.values()):
        return [[] for _ in rows]
    timeline = simulate(make_schedule(rows_to_ir(rows)), _costs())
    spaced: Rows = [[] for _ in rows]
    until = dict.fromkeys(rows, 0.0)
    for span in sorted(timeline.spans, key=lambda span: span.start):
        if span.lane == "compute":
            row = spaced[span.rank]
            row += [None] * round(span.start - until[span.rank])
            row.append(from_ir(span.action))
            until[span.rank] = span.end
    return spaced


def _costs() -> StageCosts:
    widths = {kind: float(visual.width) for kind, visual in action_type_to_color_mapping.items()}
    return StageCosts(
        forward=widths[FORWARD],
        input=widths[BACKWARD_INPUT],
        weight=widths[BACKWARD_WEIGHT],
        full=widths[FULL_BACKWARD],
    )


def visualize_schedule(
    schedule: Sequence[Sequence[_Action | None]], filename: str | None = None
) -> None:
    """Draw the cells, as they are, into a file (``.png``, ``.svg``, ``.html``) or a window."""
    timeline = _draw(schedule)
    if filename is not None:
        timeline.save(filename)
        return
    import matplotlib.image
    import matplotlib.pyplot as plt

    with TemporaryDirectory() as directory:
        path = timeline.save(Path(directory) / "schedule.png")
        plt.imshow(matplotlib.image.imread(path))
    plt.axis("off")
    plt.show()


def _draw(schedule: Sequence[Sequence[_Action | None]]) -> Timeline:
    rows = rows_to_ir(dict(enumerate(schedule)))
    made: Schedule = make_schedule(rows, name="schedule")
    spans = []
    for rank, row in enumerate(schedule):
        time = 0.0
        for action in row:
            if action is None:
                time += 1
                continue
            visual = action_type_to_color_mapping.get(action.computation_type)
            end = time + (visual.width if visual else 1)
            simple = to_ir(action)
            spans.append(Span(rank, RULES[simple.kind].lane, time, end, simple))
            time = end
    return analyse(made, spans)
