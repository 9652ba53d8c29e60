"""A training step beside torch.distributed.pipelining, alternating in the same processes.

    python benchmarks/runtime.py                        2 ranks, every schedule, both sizes
    python benchmarks/runtime.py --ranks 8 --threads 2  8 ranks where there are 16 cores
    python benchmarks/runtime.py --schedules 1f1b zbv --size overhead --alternations 60

Both run the same model, inputs, schedule and number of microbatches over gloo, each with a copy of
the weights. One alternation times torch and pipeloom one after the other, first one first, then the
other; a time is that of the slowest rank from a common start. What is printed is the median of the
ratios pipeloom / torch with its 95 % interval, from the order statistics of the ratios. Ours shares
the loss with every rank within the time, which torch does not do.

The last column is the same ratio in CPU time, added up over the ranks and their threads: where
other programs use the cores as well, it says more than the clock.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed import pipelining as peer

import pipeloom

PEERS = {
    "gpipe": peer.ScheduleGPipe,
    "1f1b": peer.Schedule1F1B,
    "interleaved_1f1b": peer.ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": peer.ScheduleInterleavedZeroBubble,
    "zbv": peer.ScheduleZBVZeroBubble,
    "dualpipev": peer.ScheduleDualPipeV,
}


@dataclass(frozen=True, kw_only=True)
class Size:
    """What is trained."""

    name: str
    width: int
    tokens: int
    """Rows of one microbatch."""
    blocks: int
    """In the whole model; 0: one per stage."""
    microbatches: int
    steps: int
    """Steps that are timed together, so that one time is long enough to be measured."""
    bound: float
    """The ratio that the upper end of the interval should not exceed."""


SIZES = {
    size.name: size
    for size in (
        Size(name="overhead", width=32, tokens=16, blocks=0, microbatches=16, steps=5, bound=0.7),
        Size(
            name="compute", width=512, tokens=256, blocks=32, microbatches=16, steps=1, bound=1.02
        ),
    )
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One schedule at one size."""

    schedule: str
    size: str
    ranks: int
    torch_milliseconds: float
    pipeloom_milliseconds: float
    ratio: float
    lower: float
    upper: float
    cpu_ratio: float
    alternations: int


class Block(nn.Module):
    """A residual block of two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(nn.functional.gelu(self.first(self.norm(x))))


def make_stages(size: Size, num_stages: int) -> list[nn.Module]:
    """The same weights in every process and at every call."""
    torch.manual_seed(0)
    blocks = size.blocks or num_stages
    shares = [
        (stage + 1) * blocks // num_stages - stage * blocks // num_stages
        for stage in range(num_stages)
    ]
    return [nn.Sequential(*(Block(size.width) for _ in range(share))) for share in shares]


def make_torch_step(
    schedule: pipeloom.Schedule, name: str, size: Size, rank: int, batch: tuple[Tensor, Tensor]
) -> Callable[[], None]:
    """A step of torch's own engine."""
    x, y = batch
    modules = make_stages(size, schedule.num_stages)
    own = schedule.placement.stages_on(rank)
    stages = [
        peer.PipelineStage(modules[index], index, schedule.num_stages, torch.device("cpu"))
        for index in own
    ]
    one_stage = name in ("gpipe", "1f1b")
    engine: Any = PEERS[name](
        stages[0] if one_stage else stages,  # type: ignore[arg-type]
        size.microbatches,
        loss_fn=nn.functional.mse_loss,
    )
    arguments = (x,) if 0 in own else ()
    is_last = schedule.num_stages - 1 in own

    def step() -> None:
        losses: list[Tensor] = []
        keywords: dict[str, Any] = {"target": y, "losses": losses} if is_last else {}
        engine.step(*arguments, return_outputs=False, **keywords)
        for index in own:
            modules[index].zero_grad()

    return step


def make_pipeloom_step(
    schedule: pipeloom.Schedule, name: str, size: Size, rank: int, batch: tuple[Tensor, Tensor]
) -> Callable[[], None]:
    """The same step of ours."""
    x, y = batch
    modules = make_stages(size, schedule.num_stages)
    own = {index: modules[index] for index in schedule.placement.stages_on(rank)}
    pipe = pipeloom.Pipeline(
        own, name, microbatches=size.microbatches, loss_fn=nn.functional.mse_loss
    )

    def step() -> None:
        pipe.step(x, target=y)
        for module in own.values():
            module.zero_grad()

    return step


@dataclass(frozen=True)
class Time:
    """Seconds of one step: on the clock of the slowest rank, and of CPU over all ranks."""

    wall: float
    cpu: float


def time_step(step: Callable[[], None], count: int) -> Time:
    """Time a step from a common start."""
    dist.barrier()
    start, cpu_start = time.perf_counter(), time.process_time()
    for _ in range(count):
        step()
    wall = torch.tensor([(time.perf_counter() - start) / count], dtype=torch.float64)
    cpu = torch.tensor([(time.process_time() - cpu_start) / count], dtype=torch.float64)
    dist.all_reduce(wall, dist.ReduceOp.MAX)
    dist.all_reduce(cpu)
    return Time(wall.item(), cpu.item())


def compare(name: str, size: Size, alternations: int) -> Outcome:
    """Alternate the two and take the ratios pair by pair."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    schedule = pipeloom.build_schedule(name, ranks=ranks, microbatches=size.microbatches)
    rows = size.tokens * size.microbatches
    batch = torch.randn(rows, size.width), torch.randn(rows, size.width)
    steps = [
        make(schedule, name, size, rank, batch) for make in (make_torch_step, make_pipeloom_step)
    ]
    for step in steps:
        time_step(step, 2)
    times: list[tuple[Time, Time]] = []
    for index in range(alternations):
        order = (0, 1) if index % 2 == 0 else (1, 0)
        pair = {which: time_step(steps[which], size.steps) for which in order}
        times.append((pair[0], pair[1]))
    ratios = [ours.wall / theirs.wall for theirs, ours in times]
    lower, upper = interval_of_median(ratios)
    return Outcome(
        schedule=name,
        size=size.name,
        ranks=ranks,
        torch_milliseconds=statistics.median(theirs.wall for theirs, _ in times) * 1e3,
        pipeloom_milliseconds=statistics.median(ours.wall for _, ours in times) * 1e3,
        ratio=statistics.median(ratios),
        lower=lower,
        upper=upper,
        cpu_ratio=statistics.median(ours.cpu / theirs.cpu for theirs, ours in times),
        alternations=alternations,
    )


def interval_of_median(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """The order statistics between which the median lies, whatever the distribution.

    >>> interval_of_median(range(1, 11))
    (2, 9)
    """
    ordered = sorted(values)
    count = len(ordered)
    outside, index = 0.0, 0
    while True:
        outside += 2 * math.comb(count, index) / 2**count
        if outside > 1 - confidence or index >= (count - 1) // 2:
            break
        index += 1
    index = max(index - 1, 0)
    return ordered[index], ordered[count - 1 - index]


def work(rank: int, wanted: argparse.Namespace, port: int, results: str) -> None:
    """One rank of the whole benchmark."""
    torch.set_num_threads(wanted.threads)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore("127.0.0.1", port, wanted.ranks, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=wanted.ranks)
    outcomes = []
    for size_name in wanted.size:
        size = SIZES[size_name]
        size = replace(size, blocks=wanted.blocks) if wanted.blocks and size.blocks else size
        for name in wanted.schedules:
            outcome = compare(name, size, wanted.alternations)
            outcomes.append(asdict(outcome))
            if rank == 0:
                print(describe(outcome, size), flush=True)
    if rank == 0:
        Path(results).write_text(json.dumps(outcomes, indent=2), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def describe(outcome: Outcome, size: Size) -> str:
    """One line of the table."""
    verdict = "yes" if outcome.upper <= size.bound else "NO"
    return (
        f"{outcome.size:<9} {outcome.schedule:<24} {outcome.torch_milliseconds:10.2f} "
        f"{outcome.pipeloom_milliseconds:10.2f} {outcome.ratio:7.3f} "
        f"[{outcome.lower:.3f}, {outcome.upper:.3f}]  ≤ {size.bound:g}: {verdict:<3}  "
        f"{outcome.cpu_ratio:.3f}"
    )


def main() -> None:
    """Start the ranks and print one line per schedule and size."""
    parser = argparse.ArgumentParser(description="Time a training step beside torch's own engine.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="intra-op threads of each rank")
    parser.add_argument("--schedules", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--size", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--blocks", type=int, default=0, help="of the compute-bound model")
    parser.add_argument("--alternations", type=int, default=30)
    parser.add_argument("--json", default=os.devnull, help="write the figures to this file")
    wanted = parser.parse_args()
    print(
        f"{wanted.ranks} ranks x {wanted.threads} threads on {os.cpu_count()} cores, gloo, "
        f"torch {torch.__version__}; milliseconds per step, ratio pipeloom / torch"
    )
    print(
        f"{'size':<9} {'schedule':<24} {'torch':>10} {'pipeloom':>10} {'ratio':>7} "
        f"{'95 % interval':<28}  cpu"
    )
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    mp.spawn(work, args=(wanted, store.port, wanted.json), nprocs=wanted.ranks)


if __name__ == "__main__":
    main()
