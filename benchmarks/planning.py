"""Planning at scale, beside torch's own construction of the same schedule in the same run.

    python benchmarks/planning.py [--ranks 64 --microbatches 512 --chunks 4] [--repeats 3]

The schedule is interleaved 1F1B: 262,144 computations at the default shape, about 790,000 actions
with communication. torch's construction (its order and its communication) and ours run in turn,
each in a process of its own, after a full collection of garbage and with the collector on; the
medians of the repeats count. All of it is work of one thread, so the targets are held against
its CPU time, which a busy machine changes little; the time on the clock stands beside it.

Targets at the default shape: build and lower (placement, topology and hash included) in a fifth of
torch's time; proof of the lowered program under (blocking, all) in torch's time; simulation in 1.5
times of it; 1.5 GiB of memory at most for planning.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    from pipeloom import Schedule

GIB = 1024**3
Made = TypeVar("Made")


class Row(NamedTuple):
    """One line of the table: a task of ours, and how long it may take beside torch."""

    name: str
    label: str
    target: float


ROWS = (
    Row("build_and_lower", "build + lower", 0.2),
    Row("verify", "verify (blocking, all)", 1.0),
    Row("simulate", "simulate", 1.5),
)
MEMORY_TARGET = 1.5 * GIB
#: Ranks, microbatches and chunks of the targets: a small schedule takes both next to no time.
TARGET_SHAPE = (64, 512, 4)


@dataclass(frozen=True)
class Run:
    """What one process of ours took, seconds per task."""

    wall: dict[str, float]
    cpu: dict[str, float]
    #: The highest resident size after build, lower and verify, and after simulation.
    planning_bytes: float
    simulation_bytes: float
    num_actions: int


def measure(ranks: int, microbatches: int, chunks: int) -> Run:
    """Run every task once in this process."""
    from pipeloom import build_schedule, lower, simulate, verify

    wall: dict[str, float] = {}
    cpu: dict[str, float] = {}

    def timed(name: str, task: Callable[[], Made]) -> Made:
        gc.collect()
        start, cpu_start = time.perf_counter(), time.process_time()
        made = task()
        wall[name], cpu[name] = time.perf_counter() - start, time.process_time() - cpu_start
        return made

    def build_and_lower() -> Schedule:
        schedule = build_schedule(
            "interleaved_1f1b", ranks=ranks, microbatches=microbatches, chunks=chunks
        )
        program = lower(schedule)
        hash(program)
        return program

    program = timed("build_and_lower", build_and_lower)
    timed("verify", lambda: verify(program, sends="blocking", channel="all")).raise_for_errors()
    planning = peak_bytes()
    timed("simulate", lambda: simulate(program))
    return Run(wall, cpu, planning, peak_bytes(), sum(map(len, program.actions)))


def peak_bytes() -> float:
    """The highest resident size of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def measure_apart(ranks: int, microbatches: int, chunks: int) -> Run:
    """The same in a process of its own."""
    shape = [f"--ranks={ranks}", f"--microbatches={microbatches}", f"--chunks={chunks}"]
    command = [sys.executable, str(Path(__file__).resolve()), "--once", *shape]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Run(**json.loads(result.stdout))


def main() -> None:
    """Print one line a task: seconds, the ratio to torch, the target."""
    parser = argparse.ArgumentParser(description="Planning at scale, beside torch.")
    parser.add_argument("--ranks", type=int, default=TARGET_SHAPE[0])
    parser.add_argument("--microbatches", type=int, default=TARGET_SHAPE[1])
    parser.add_argument("--chunks", type=int, default=TARGET_SHAPE[2])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    shape = (wanted.ranks, wanted.microbatches, wanted.chunks)
    if wanted.once:
        print(json.dumps(asdict(measure(*shape))))
        return

    ours: list[Run] = []
    theirs = []
    for _ in range(wanted.repeats):
        if find_spec("torch") is not None:
            from _torch_peer import construct_interleaved

            theirs.append(construct_interleaved(*shape))
        ours.append(measure_apart(*shape))
    print("interleaved 1F1B, {} ranks × {} microbatches × {} chunks".format(*shape), end=", ")
    print(f"{ours[0].num_actions:,} actions, medians of {wanted.repeats}")
    print(f"{'':<24} {'CPU':>9} {'clock':>9}   {'ratio: CPU':>10} {'clock':>6}")
    torch_cpu = torch_wall = None
    if theirs:
        torch_cpu = median(run.cpu_seconds for run in theirs)
        torch_wall = median(run.seconds for run in theirs)
        print(f"{'torch: construction':<24} {torch_cpu:7.2f} s {torch_wall:7.2f} s")
    else:
        print("torch is not installed: no ratios")
    for row in ROWS:
        cpu = median(run.cpu[row.name] for run in ours)
        wall = median(run.wall[row.name] for run in ours)
        line = f"{row.label:<24} {cpu:7.2f} s {wall:7.2f} s"
        if torch_cpu is not None and torch_wall is not None:
            ratio = cpu / torch_cpu
            line += f"   {ratio:10.2f} {wall / torch_wall:6.2f}"
            line += _judge(ratio, row.target, shape)
        print(line)
    planning = max(run.planning_bytes for run in ours)
    simulation = max(run.simulation_bytes for run in ours)
    print(
        f"{'memory: planning':<24} {planning / GIB:7.2f} GiB"
        + _judge(planning / GIB, MEMORY_TARGET / GIB, shape)
    )
    print(f"{'memory: with simulation':<24} {simulation / GIB:7.2f} GiB")


def _judge(value: float, target: float, shape: tuple[int, ...]) -> str:
    if shape != TARGET_SHAPE:
        return ""
    return f"   target ≤ {target:.1f}   {'met' if value <= target else 'MISSED'}"


if __name__ == "__main__":
    main()
