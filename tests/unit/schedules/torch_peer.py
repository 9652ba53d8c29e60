"""torch's own order of a schedule, from stand-in stages that have no process group."""

from __future__ import annotations

from typing import Any

#: Our names of the families that torch builds too → its classes.
TORCH_CLASSES = {
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "looped_bfs": "ScheduleLoopedBFS",
    "interleaved_zero_bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}
V_SHAPED = frozenset({"zbv", "dualpipev"})


def make_torch_schedule(
    name: str, *, ranks: int, microbatches: int, chunks: int, lowered: bool = True
) -> Any:
    """torch's schedule object, with its communication unless ``lowered`` is false; ``None`` if
    torch refuses the shape."""
    import torch
    from torch.distributed.pipelining import schedules
    from torch.distributed.pipelining.stage import _PipelineStageBase

    class StandInStage(_PipelineStageBase):
        def __init__(self, stage_index: int) -> None:
            self.submod = torch.nn.Identity()
            self.stage_index = stage_index
            self.num_stages = ranks * chunks
            self.group_size = ranks
            self.group_rank = 0
            self.group = None
            self.device = torch.device("cpu")
            self.has_backward = False

    StandInStage.__abstractmethods__ = frozenset()
    torch_class: Any = getattr(schedules, TORCH_CLASSES[name])
    if not lowered:
        skip = {"_prepare_schedule_with_comms": lambda self, *args, **kwargs: None}
        torch_class = type("OrderOnly", (torch_class,), skip)
    indices = [0, 2 * ranks - 1] if name in V_SHAPED else [chunk * ranks for chunk in range(chunks)]
    try:
        return torch_class(
            [StandInStage(index) for index in indices],
            microbatches,
            loss_fn=torch.nn.functional.mse_loss,
        )
    except ValueError:
        return None


def build_torch_order(
    name: str, *, ranks: int, microbatches: int, chunks: int
) -> list[list[str]] | None:
    """Every rank's computations as text; ``None`` if torch refuses the shape."""
    # The order is what is compared; lowering it would take most of the time.
    built = make_torch_schedule(
        name, ranks=ranks, microbatches=microbatches, chunks=chunks, lowered=False
    )
    if built is None:
        return None
    return [
        [str(action) for action in built.pipeline_order[rank] if action is not None]
        for rank in range(ranks)
    ]
