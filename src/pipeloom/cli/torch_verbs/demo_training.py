"""The training of the demo, as one process sees it: a rank, or all of them.

::

    first steps     step, and the gradients of all stages compared with the unpipelined model's
    then            step … step                                        timed
    at the end      step, step, step, recorded: costs        step, step, step, recorded: measured
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pipeloom.cli.torch_verbs.character_model import (
    CharacterStage,
    ModelShape,
    find_loss,
    load_text,
    make_parts,
)
from pipeloom.cli.torch_verbs.stage_costs import MIB, add_bytes, in_milliseconds, measure_bytes
from pipeloom.cost.constant import StageCosts
from pipeloom.cost.from_profile import costs_from_timelines
from pipeloom.errors import StepFailed
from pipeloom.ir.schedule import Schedule
from pipeloom.ir.timeline import Timeline
from pipeloom.runtime.pipeline import LocalPipeline, Pipeline

__all__ = [
    "Checked",
    "DemoPlan",
    "RankSummary",
    "Recorded",
    "Stepped",
    "train_locally",
    "train_rank",
]

ROWS_PER_MICROBATCH = 4
CHECKED_STEPS = 2
#: The first half says what the stages cost; the middle one of the second half is shown.
RECORDED_STEPS = 6
LEARNING_RATE = 3e-3
#: How far a gradient in single precision may be off, as a share of the stage's largest.
TOLERANCE = 1e-4

Post = Callable[[Any], None]


@dataclass(frozen=True, kw_only=True)
class DemoPlan:
    """What is to be done, the same for every rank."""

    schedule: Schedule
    steps: int
    device: Literal["cpu", "cuda"]
    threads: int

    @property
    def rows(self) -> int:
        return ROWS_PER_MICROBATCH * self.schedule.num_microbatches


@dataclass(frozen=True)
class Checked:
    """The gradients of one step agree; ``error`` is the largest difference, as a share of the
    stage's largest gradient."""

    step: int
    error: float
    num_parameters: int


@dataclass(frozen=True)
class Stepped:
    """One step is done. ``counts``: it was an ordinary one, fit to be timed."""

    step: int
    loss: float
    seconds: float
    counts: bool


@dataclass(frozen=True)
class Recorded:
    """The timeline of a step at the end, and the costs that the steps before it gave."""

    measured: Timeline
    costs: StageCosts


@dataclass(frozen=True)
class RankSummary:
    """The memory of one process in MiB: at its highest, and before the model was made."""

    peak: float
    before: float


def train_rank(rank: int, post: Post, plan: DemoPlan) -> None:
    """Train one rank of the pipeline; the process group is there already."""
    device = _choose_device(plan.device, rank)
    torch.set_num_threads(plan.threads)
    memory = _MemoryMeter(device)
    schedule = plan.schedule
    everything = _make_stages(schedule)
    stages = {stage: everything[stage].to(device) for stage in schedule.placement.stages_on(rank)}
    pipe = Pipeline(dict(stages), schedule, loss_fn=find_loss)
    gather = _gather_from_all if rank == 0 else _send_to_rank_0
    train(plan, pipe, stages, device, post if rank == 0 else _say_nothing, gather)
    pipe.close()
    post(RankSummary(memory.peak(), memory.before))


def train_locally(post: Post, plan: DemoPlan) -> None:
    """Train with every rank in this process."""
    device = _choose_device(plan.device, 0)
    memory = _MemoryMeter(device)
    stages = {stage: module.to(device) for stage, module in _make_stages(plan.schedule).items()}
    pipe = LocalPipeline(dict(stages), plan.schedule, loss_fn=find_loss)
    train(plan, pipe, stages, device, post, lambda value: [value])
    pipe.close()
    post(RankSummary(memory.peak(), memory.before))


def train(
    plan: DemoPlan,
    pipe: Pipeline | LocalPipeline,
    stages: dict[int, CharacterStage],
    device: torch.device,
    post: Post,
    gather: Callable[[Any], list[Any] | None],
) -> None:
    """Check, train, measure; ``gather`` gives the values of all processes, or ``None``."""
    text = load_text()
    shape = _find_shape()
    parameters = [parameter for stage in stages.values() for parameter in stage.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE)
    whole = _Whole(plan, device)

    def step(number: int, *, counts: bool) -> None:
        drawn = text.batch(number, rows=plan.rows, context=shape.context)
        batch, target = (tokens.to(device) for tokens in drawn)
        optimizer.zero_grad()
        start = time.perf_counter()
        result = pipe.step(batch, target=target)
        if number < CHECKED_STEPS:
            checked = whole.compare(number, gather(_tell_state(stages)), batch, target)
            if checked is not None:
                post(checked)
        optimizer.step()
        loss = float(result.loss.detach()) if result.loss is not None else float("nan")
        post(Stepped(number, loss, time.perf_counter() - start, counts))

    for number in range(plan.steps):
        step(number, counts=number >= CHECKED_STEPS)
    with pipe.record() as recording:
        for number in range(plan.steps, plan.steps + RECORDED_STEPS):
            step(number, counts=False)
    # Its figures take a while to find and are needed once.
    if gather(None) is not None:
        timelines = recording.timelines
        before, after = timelines[: RECORDED_STEPS // 2], timelines[RECORDED_STEPS // 2 :]
        measured = sorted(after, key=lambda timeline: timeline.span)[len(after) // 2]
        batch, target = text.batch(0, rows=ROWS_PER_MICROBATCH, context=shape.context)
        kept = measure_bytes(
            whole.parts, (batch.to(device),), loss_fn=find_loss, target=target.to(device)
        )
        costs = costs_from_timelines(before)
        by_stage = [kept[part] for _, part in sorted(_part_of_stage(plan.schedule).items())]
        post(Recorded(measured, in_milliseconds(add_bytes(costs, by_stage, optimizer_states=2))))


State = dict[int, list[tuple[Tensor, Tensor]]]


def _tell_state(stages: dict[int, CharacterStage]) -> State:
    """Parameters and gradients by stage, on the host."""
    return {
        number: [
            (p.detach().cpu(), torch.zeros_like(p).cpu() if p.grad is None else p.grad.cpu())
            for p in stage.parameters()
        ]
        for number, stage in stages.items()
    }


class _Whole:
    """The unpipelined model, which says what the gradients should be."""

    def __init__(self, plan: DemoPlan, device: torch.device) -> None:
        self._part_of = _part_of_stage(plan.schedule)
        self.parts = _make_parts(plan.schedule)
        self._model = nn.Sequential(*self.parts).to(device)

    def compare(
        self, step: int, states: Sequence[State] | None, batch: Tensor, target: Tensor
    ) -> Checked | None:
        """Backward through the whole model at once, with the parameters the stages had."""
        if states is None:
            return None
        by_stage = {stage: pairs for state in states for stage, pairs in state.items()}
        with torch.no_grad():
            for stage, pairs in by_stage.items():
                part = self.parts[self._part_of[stage]]
                for parameter, (value, _) in zip(part.parameters(), pairs, strict=True):
                    parameter.copy_(value)
        self._model.zero_grad()
        find_loss(self._model(batch), target).backward()
        worst, count = 0.0, 0
        for stage, pairs in by_stage.items():
            part = self.parts[self._part_of[stage]]
            expected = [p.grad.cpu() for p in part.parameters() if p.grad is not None]
            largest = max(float(gradient.abs().max()) for gradient in expected)
            for wanted, (_, found) in zip(expected, pairs, strict=True):
                count += wanted.numel()
                error = float((found - wanted).abs().max()) / largest
                worst = max(worst, error)
                if not error <= TOLERANCE:
                    raise StepFailed(
                        f"step {step}: a gradient of stage {stage} differs from the unpipelined "
                        f"model's by {error:.1e} of the stage's largest",
                        stage=stage,
                    )
        return Checked(step, worst, count)


class _MemoryMeter:
    """The memory of this process, or of its GPU, in MiB."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.before = torch.cuda.memory_allocated(device) / MIB
        else:
            self.before = _resident_mib()

    def peak(self) -> float:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) / MIB
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _resident_mib() -> float:
    status = Path("/proc/self/statm")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return int(status.read_text().split()[1]) * resource.getpagesize() / MIB


def _make_stages(schedule: Schedule) -> dict[int, CharacterStage]:
    """Every stage; where the model is there twice, two copies with the same weights."""
    return {
        stage: part
        for chain in schedule.topology.chains
        for stage, part in zip(chain, _make_parts(schedule), strict=True)
    }


def _make_parts(schedule: Schedule) -> list[CharacterStage]:
    return make_parts(_find_shape(), len(schedule.topology.chains[0]))


def _find_shape() -> ModelShape:
    return ModelShape(vocabulary=load_text().vocabulary)


def _part_of_stage(schedule: Schedule) -> dict[int, int]:
    """Which part of the model each stage holds."""
    return {stage: part for chain in schedule.topology.chains for part, stage in enumerate(chain)}


def _choose_device(kind: str, rank: int) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _gather_from_all(value: Any) -> list[Any] | None:
    import torch.distributed as dist

    values: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(value, values, dst=0)
    return values


def _send_to_rank_0(value: Any) -> list[Any] | None:
    import torch.distributed as dist

    dist.gather_object(value, None, dst=0)
    return None


def _say_nothing(message: Any) -> None:
    """What only one rank needs to tell."""
