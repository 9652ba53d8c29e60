"""Planning at scale, beside torch's own construction of the same schedule in the same run.

    python benchmarks/planning.py [--ranks 64 --microbatches 512 --chunks 4] [--repeats 3]

The schedule is interleaved 1F1B: 262,144 computations at the default shape, about 790,000 actions
with communication. torch's construction (its order and its communication) and ours run in turn,
each in a process of its own, and the fastest of the repeats counts.

Targets: build and lower (placement, topology and hash included) in a fifth of torch's time; proof
of the lowered program under (blocking, all) in torch's time; 1.5 GiB of memory at most.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

GIB = 1024**3


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


def measure(ranks: int, microbatches: int, chunks: int) -> dict[str, float]:
    """Run every task once in this process; seconds each, and the peak of memory in bytes."""
    from pipeloom import build_schedule, lower, simulate, verify

    def timed(task: Callable[[], object]) -> float:
        start = time.perf_counter()
        task()
        return time.perf_counter() - start

    programs = []

    def build_and_lower() -> None:
        schedule = build_schedule(
            "interleaved_1f1b", ranks=ranks, microbatches=microbatches, chunks=chunks
        )
        program = lower(schedule)
        hash(program)
        programs.append(program)

    seconds = {"build_and_lower": timed(build_and_lower)}
    (program,) = programs
    reports = []
    seconds["verify"] = timed(
        lambda: reports.append(verify(program, sends="blocking", channel="all"))
    )
    reports[0].raise_for_errors()
    peak = peak_bytes()  # What planning a program takes; the timeline below is the simulator's.
    seconds["simulate"] = timed(lambda: simulate(program))
    num_actions = sum(map(len, program.actions))
    return {**seconds, "peak_bytes": peak, "num_actions": num_actions}


def peak_bytes() -> float:
    """The highest resident size of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def measure_apart(ranks: int, microbatches: int, chunks: int) -> dict[str, float]:
    """The same in a process of its own."""
    shape = [f"--ranks={ranks}", f"--microbatches={microbatches}", f"--chunks={chunks}"]
    command = [sys.executable, str(Path(__file__).resolve()), "--once", *shape]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    measured: dict[str, float] = json.loads(result.stdout)
    return measured


def main() -> None:
    """Print one line a task: seconds, the ratio to torch, the target."""
    parser = argparse.ArgumentParser(description="Planning at scale, beside torch.")
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=512)
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    shape = (wanted.ranks, wanted.microbatches, wanted.chunks)
    if wanted.once:
        print(json.dumps(measure(*shape)))
        return

    ours, theirs = [], []
    for _ in range(wanted.repeats):
        if find_spec("torch") is not None:
            from _torch_peer import construct_interleaved

            theirs.append(construct_interleaved(*shape))
        ours.append(measure_apart(*shape))
    print("interleaved 1F1B, {} ranks × {} microbatches × {} chunks".format(*shape), end=", ")
    print(f"{ours[0]['num_actions']:,.0f} actions, fastest of {wanted.repeats}")
    torch_seconds = min(theirs, default=None)
    if torch_seconds is None:
        print("torch is not installed: no ratios")
    else:
        print(f"{'torch: construction':<24} {torch_seconds:7.2f} s")
    for row in ROWS:
        seconds = min(run[row.name] for run in ours)
        line = f"{row.label:<24} {seconds:7.2f} s"
        if torch_seconds is not None:
            ratio = seconds / torch_seconds
            line += (
                f"   ratio {ratio:5.2f}   target ≤ {row.target:.1f}   {_judge(ratio, row.target)}"
            )
        print(line)
    peak = max(run["peak_bytes"] for run in ours)
    print(
        f"{'memory at the peak':<24} {peak / GIB:7.2f} GiB               target ≤ "
        f"{MEMORY_TARGET / GIB:.1f}   {_judge(peak, MEMORY_TARGET)}"
    )


def _judge(value: float, target: float) -> str:
    return "met" if value <= target else "MISSED"


if __name__ == "__main__":
    main()
