"""torch's own construction of a schedule, the peer that the planning benchmark measures against.

A user of torch builds a schedule by handing its stages to the schedule's class, on every rank; the
constructor then works out the order of all ranks and adds the communication. The stages below are
the least that the constructor reads, so no process group and no model are needed, and the time is
that of the schedule alone.

    python benchmarks/_torch_peer.py ScheduleLoopedBFS --ranks 64 --microbatches 512 --chunks 4
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

V_SHAPED = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
"""Classes whose rank r holds stages r and 2·ranks − 1 − r."""


@dataclass(frozen=True, kw_only=True)
class Construction:
    """What building one schedule took, in a process of its own."""

    seconds: float
    cpu_seconds: float
    """Of the one thread that does it: what it takes however busy the machine is."""
    peak_bytes: int
    """Highest resident size of the process, torch itself included."""
    bytes_before: int
    """The same before the schedule was built: interpreter and torch."""
    num_compute_actions: int
    num_actions: int
    """Communication included."""


def build_torch_schedule(
    schedule_class: str, *, num_ranks: int, num_microbatches: int, chunks: int
) -> Any:
    """torch's schedule object as rank 0 would build it."""
    import torch
    from torch.distributed.pipelining import schedules
    from torch.distributed.pipelining.stage import _PipelineStageBase

    class StandInStage(_PipelineStageBase):
        """Only what a schedule's constructor reads."""

        def __init__(self, stage_index: int) -> None:
            self.submod = torch.nn.Identity()
            self.stage_index = stage_index
            self.num_stages = num_ranks * chunks
            self.group_size = num_ranks
            self.group_rank = 0
            self.group = None
            self.device = torch.device("cpu")
            self.has_backward = False

    StandInStage.__abstractmethods__ = frozenset()
    if schedule_class in V_SHAPED:
        if chunks != 2:
            raise ValueError(f"{schedule_class} takes exactly 2 chunks, not {chunks}")
        indices = [0, 2 * num_ranks - 1]
    else:
        indices = [chunk * num_ranks for chunk in range(chunks)]
    stages: list[Any] = [StandInStage(index) for index in indices]
    return getattr(schedules, schedule_class)(
        stages, num_microbatches, loss_fn=torch.nn.functional.mse_loss
    )


def construct(
    schedule_class: str, *, num_ranks: int, num_microbatches: int, chunks: int
) -> Construction:
    """Build the schedule in this process and time it; the import of torch is not counted."""
    import torch.distributed.pipelining  # noqa: F401

    before = _peak_bytes()
    gc.collect()
    start, cpu_start = time.perf_counter(), time.process_time()
    schedule = build_torch_schedule(
        schedule_class, num_ranks=num_ranks, num_microbatches=num_microbatches, chunks=chunks
    )
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    return Construction(
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        peak_bytes=_peak_bytes(),
        bytes_before=before,
        num_compute_actions=sum(
            action is not None for order in schedule.pipeline_order.values() for action in order
        ),
        num_actions=sum(map(len, schedule.pipeline_order_with_comms.values())),
    )


def construct_apart(
    schedule_class: str,
    *,
    num_ranks: int,
    num_microbatches: int,
    chunks: int,
) -> Construction:
    """One construction in a fresh process, so that its memory is its own."""
    command = [
        *(sys.executable, str(Path(__file__).resolve()), schedule_class),
        *("--ranks", str(num_ranks)),
        *("--microbatches", str(num_microbatches)),
        *("--chunks", str(chunks)),
    ]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Construction(**json.loads(result.stdout))


def construct_interleaved(num_ranks: int, num_microbatches: int, chunks: int) -> Construction:
    """What torch takes for its interleaved 1F1B of this shape, in a process of its own."""
    return construct_apart(
        "ScheduleInterleaved1F1B",
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        chunks=chunks,
    )


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """Build one schedule and print what it took as JSON."""
    parser = argparse.ArgumentParser(description="Time torch's construction of a schedule.")
    parser.add_argument("schedule_class")
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--microbatches", type=int, required=True)
    parser.add_argument("--chunks", type=int, required=True)
    wanted = parser.parse_args()
    construction = construct(
        wanted.schedule_class,
        num_ranks=wanted.ranks,
        num_microbatches=wanted.microbatches,
        chunks=wanted.chunks,
    )
    print(json.dumps(asdict(construction)))


if __name__ == "__main__":
    main()
