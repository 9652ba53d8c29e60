"""What the ranks do in the tests of whole pipelines; each function runs on every rank."""

from __future__ import annotations

import gc
import os
import random
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import pipeloom
from pipeloom import LocalPipeline, Pipeline
from pipeloom.errors import PipeloomError, StepError
from pipeloom.ir.schedule import Schedule
from tests.support.models import ZOO, copy_stages, squared_error


def legal_microbatches(name: str, ranks: int) -> int:
    for count in range(ranks, 5 * ranks):
        try:
            pipeloom.build_schedule(name, ranks=ranks, microbatches=count)
        except pipeloom.ScheduleError:
            continue
        return count
    raise AssertionError(f"no number of microbatches suits {name}")


def make_stages(schedule: Schedule, model: str = "blocks") -> list[nn.Module]:
    """The same on every rank: each chain has copies of its own."""
    torch.manual_seed(7)
    parts = ZOO[model].make_stages(len(schedule.topology.chains[0]))
    return [stage for _ in schedule.topology.chains for stage in copy_stages(parts)]


def place(stages: list[nn.Module], schedule: Schedule, rank: int) -> dict[int, nn.Module]:
    return {stage: stages[stage] for stage in schedule.placement.stages_on(rank)}


def compare_with_local(cases: list[tuple[str, str, dict[str, Any]]]) -> list[str]:
    """Step, evaluate with another number of microbatches, step again, over processes and in one
    process: what differs, to the last bit."""
    problems = []
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for name, model, options in cases:
        count = legal_microbatches(name, ranks)
        schedule = pipeloom.build_schedule(name, ranks=ranks, microbatches=count)
        local_stages, own_stages = make_stages(schedule, model), make_stages(schedule, model)
        common: dict[str, Any] = dict(microbatches=count, loss_fn=squared_error, **options)
        local = LocalPipeline(local_stages, name, ranks=ranks, **common)
        pipe = Pipeline(place(own_stages, schedule, rank), name, **common)
        for rows in (2 * count, 2 * count + 1):
            x, y = ZOO[model].make_batch(rows)
            keywords = ZOO[model].keywords(rows)
            expected = local.step(x, target=y, **keywords)
            result = pipe.step(x, target=y, **keywords)
            if not torch.equal(result.loss, expected.loss):
                problems.append(f"{name} {model}: loss {result.loss} is not {expected.loss}")
            evaluation = dict(target=y, microbatches=count + 2, return_output=False, **keywords)
            losses, truth = (one.eval(x, **evaluation).losses for one in (pipe, local))
            if not torch.equal(torch.stack(losses), torch.stack(truth)):
                problems.append(f"{name} {model}: eval's losses differ")
        for stage in schedule.placement.stages_on(rank):
            theirs = dict(local_stages[stage].named_parameters())
            for key, parameter in own_stages[stage].named_parameters():
                truth = theirs[key].grad
                if (parameter.grad is None) != (truth is None) or (
                    truth is not None and not torch.equal(parameter.grad, truth)
                ):
                    problems.append(f"{name} {model}: stage {stage}, {key} differs")
        pipe.close()
    return problems


# ── failures ─────────────────────────────────────────────────────────────────────────────────────


class Sabotage(nn.Module):
    """Does something bad at one forward or backward of one microbatch."""

    def __init__(self, stage: nn.Module, when: str, at: int, deed: str) -> None:
        super().__init__()
        self.stage = stage
        self.when, self.at, self.deed = when, at, deed
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        y = self.stage(x)
        if self.count == self.at:
            if self.when == "F":
                y = self._act(y)
            elif y.requires_grad:
                y.register_hook(self._act)
        return y

    def _act(self, value: Tensor) -> Tensor:
        if self.deed == "raise":
            raise ArithmeticError("the sabotage struck")
        if self.deed == "kill":
            os.kill(os.getpid(), 9)
        if self.deed == "sleep":
            time.sleep(4.0)
        if self.deed == "shape":
            return torch.cat([value, value])
        return value


def sabotage(
    name: str, stage: int, when: str, deed: str, at: int = 2, timeout: float = 300.0
) -> tuple[Any, ...]:
    """Run a step that fails; what this rank raised, after how long, and what it says afterwards."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    count = legal_microbatches(name, ranks)
    schedule = pipeloom.build_schedule(name, ranks=ranks, microbatches=count)
    stages = make_stages(schedule)
    stages[stage] = Sabotage(stages[stage], when, at, deed)
    pipe = Pipeline(
        place(stages, schedule, rank),
        name,
        microbatches=count,
        loss_fn=squared_error,
        timeout=timeout,
    )
    x, y = ZOO["blocks"].make_batch(2 * count)
    started = time.monotonic()
    try:
        pipe.step(x, target=y)
    except StepError as error:
        seconds = time.monotonic() - started
        try:
            pipe.step(x, target=y)
            again = "no error"
        except StepError as second:
            again = f"{type(second).__name__}: {second}"
        pipe.close()
        return (
            type(error).__name__,
            str(error),
            (error.rank, error.stage, error.microbatch, error.action),
            seconds,
            again == f"{type(error).__name__}: {error}",
        )
    return ("no error",)


def fail_in(kind: str) -> tuple[str, str, float]:
    """A handler that raises, in place of a kind of action, on the last rank that has it."""
    name = "1f1b" if kind == "B" else "dualpipev" if kind == "OVERLAP_F_B" else "zbv"
    rank, ranks = dist.get_rank(), dist.get_world_size()
    count = legal_microbatches(name, ranks)
    schedule = pipeloom.build_schedule(name, ranks=ranks, microbatches=count)

    def handler(context: Any) -> None:
        if rank == ranks - 1:
            raise ArithmeticError("the handler struck")
        for part in context.parts:
            context.run(part)

    pipe = Pipeline(
        place(make_stages(schedule), schedule, rank),
        name,
        microbatches=count,
        loss_fn=squared_error,
        handlers={kind: handler},
    )
    x, y = ZOO["blocks"].make_batch(2 * count)
    started = time.monotonic()
    try:
        pipe.step(x, target=y)
    except StepError as error:
        pipe.close()
        return type(error).__name__, str(error), time.monotonic() - started
    return "no error", "", 0.0


def mistake(kind: str) -> str:
    """A mistake of the user on one rank only; what every rank says."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    count = 4
    schedule = pipeloom.build_schedule("1f1b", ranks=ranks, microbatches=count)
    stages = place(make_stages(schedule), schedule, rank)
    if kind == "stage on two ranks" and rank == 1:
        stages = place(make_stages(schedule), schedule, 0)
    try:
        pipe = Pipeline(
            stages,
            "1f1b",
            microbatches=count + (kind == "other microbatches" and rank == 1),
            loss_fn=squared_error,
        )
        x, y = ZOO["blocks"].make_batch(8)
        if kind == "other batch" and rank == ranks - 1:
            y = y[:6]
        pipe.step(x, target=y)
    except PipeloomError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def leave_early() -> int:
    """The first rank has done its part of an evaluation, and left, before the last one begins."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    schedule = pipeloom.build_schedule("1f1b", ranks=ranks, microbatches=4)
    stages = place(make_stages(schedule), schedule, rank)
    pipe = Pipeline(stages, "1f1b", microbatches=4)
    x, _ = ZOO["blocks"].make_batch(8)
    pipe.eval(x)
    if rank == ranks - 1:
        time.sleep(0.5)
    output = pipe.eval(x).output
    pipe.close()
    return 0 if output is None else len(output)


# ── long runs, recording ─────────────────────────────────────────────────────────────────────────


def soak(name: str, steps: int, seed: int) -> dict[str, Any]:
    """Many steps with random batches and numbers of microbatches, evaluation in between."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    count = legal_microbatches(name, ranks)
    schedule = pipeloom.build_schedule(name, ranks=ranks, microbatches=count)
    stages = place(make_stages(schedule), schedule, rank)
    pipe = Pipeline(stages, name, microbatches=count, loss_fn=squared_error)
    chance = random.Random(seed)
    figures: dict[str, Any] = {}
    for step in range(steps):
        number = chance.randrange(1, 9)
        rows = chance.randrange(number, 4 * number)
        x, y = ZOO["blocks"].make_batch(rows)
        if chance.random() < 0.3:
            pipe.eval(x, target=y, microbatches=number)
        pipe.step(x, target=y, microbatches=number)
        for module in stages.values():
            module.zero_grad()
        if step == steps // 3:
            figures["before"] = measure()
    figures["after"] = measure()
    pipe.close()
    return figures


def measure() -> dict[str, int]:
    """What must not grow: file descriptors, tensors that are alive, resident memory in KiB."""
    gc.collect()
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    status = dict(line.split(":", 1) for line in lines)
    return {
        "files": len(os.listdir("/proc/self/fd")),
        "threads": int(status["Threads"]),
        "tensors": sum(isinstance(thing, Tensor) for thing in gc.get_objects()),
        "memory": int(status["VmRSS"].split()[0]),
    }


def record(name: str) -> tuple[int, float, list[tuple[int, str, float, float]], list[str]]:
    """A recorded step: ranks, makespan, the computations, and messages that arrive too early."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    count = legal_microbatches(name, ranks)
    schedule = pipeloom.build_schedule(name, ranks=ranks, microbatches=count)
    pipe = Pipeline(
        place(make_stages(schedule), schedule, rank),
        name,
        microbatches=count,
        loss_fn=squared_error,
    )
    x, y = ZOO["blocks"].make_batch(2 * count)
    pipe.step(x, target=y)
    with pipe.record() as recording:
        pipe.step(x, target=y)
    timeline = recording.timelines[0]
    pipe.close()
    spans = [(s.rank, str(s.action), s.start, s.end) for s in timeline.spans if s.lane == "compute"]
    end_of = {text: end for _, text, _, end in spans}
    early = [
        text
        for _, text, start, _ in spans
        if "F" in text
        and (before := f"{int(text.split('F')[0]) - 1}F{text.split('F')[1]}") in end_of
        and start < end_of[before]
    ]
    return timeline.num_ranks, timeline.makespan, spans, early
