"""Programs that run with torch's package and with ours; each function runs on every rank."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

WIDTH = 4
TORCH, OURS = "torch.distributed.pipelining", "pipeloom.torch_api"
SINGLE = ("GPipe", "1F1B")
LOOPED = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")


class Block(nn.Module):
    """A stage whose every weight gets a gradient; keywords reach it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 2 * WIDTH)
        self.second = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        y = self.second(torch.tanh(self.first(x)))
        return x + (y if scale is None else y * scale)


def make_model(num_stages: int, seed: int = 3) -> list[nn.Module]:
    torch.manual_seed(seed)
    return [Block().double() for _ in range(num_stages)]


def make_batch(rows: int, seed: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    """Input, target, and a keyword of as many rows."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(  # type: ignore[return-value]
        torch.randn(rows, width, generator=generator, dtype=torch.float64)
        for width in (WIDTH, WIDTH, 1)
    )


def mean_loss(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def summed_loss(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).sum()


def stages_of(name: str, rank: int, ranks: int, chunks: int) -> list[int]:
    if name in V_SHAPED:
        return [rank, 2 * ranks - 1 - rank]
    return [rank + chunk * ranks for chunk in range(chunks)]


def build(
    package: str,
    name: str,
    microbatches: int,
    *,
    loss_fn: Callable[..., Any] | None = mean_loss,
    chunks: int = 2,
    modules: list[nn.Module] | None = None,
    stage_options: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Any, list[Any], list[nn.Module]]:
    """A schedule, its local stages, and all modules of the model."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    chunks = 1 if name in SINGLE else chunks
    num_stages = ranks * chunks
    modules = make_model(num_stages) if modules is None else modules
    stage_class = importlib.import_module(f"{package}.stage").PipelineStage
    get_schedule_class = importlib.import_module(f"{package}.schedules").get_schedule_class
    stages = [
        stage_class(modules[index], index, num_stages, torch.device("cpu"), **(stage_options or {}))
        for index in stages_of(name, rank, ranks, chunks)
    ]
    given = stages[0] if name in SINGLE else stages
    return (
        get_schedule_class(name)(given, microbatches, loss_fn=loss_fn, **options),
        stages,
        modules,
    )


def gradients(stages: list[Any]) -> dict[str, Tensor | None]:
    return {
        f"{stage.stage_index}.{name}": None if p.grad is None else p.grad.clone()
        for stage in stages
        for name, p in stage.submod.named_parameters()
    }


def run_plainly(
    modules: list[nn.Module],
    parts: list[tuple[Any, Any, dict[str, Any]]],
    *,
    loss_fn: Callable[..., Any] = mean_loss,
    average: bool = True,
) -> tuple[list[Tensor], Tensor]:
    """The truth: microbatch by microbatch, an ordinary backward each."""
    losses, outputs = [], []
    for x, y, keywords in parts:
        value = x
        for module in modules:
            value = module(value, **keywords)
        loss = loss_fn(value, y)
        (loss / len(parts) if average else loss).backward()
        losses.append(loss.detach())
        outputs.append(value.detach())
    return losses, torch.cat(outputs)


def differences(
    mine: dict[str, Any], theirs: dict[str, Any], tolerance: float = 1e-12
) -> list[str]:
    """Names under which two results are not close."""
    problems = [f"{name} is missing" for name in mine.keys() ^ theirs.keys()]
    for name in mine.keys() & theirs.keys():
        one, other = mine[name], theirs[name]
        if (one is None) != (other is None):
            problems.append(f"{name}: {one} and {other}")
        elif one is not None and not torch.allclose(one, other, rtol=tolerance, atol=tolerance):
            problems.append(f"{name} differs by {(one - other).abs().max():g}")
    return sorted(problems)


def train(
    package: str,
    name: str,
    *,
    microbatches: int,
    steps: int = 2,
    form: str = "batch",
    zero_grad: bool = True,
    with_eval: bool = False,
    rows: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Two steps and what came of each: losses, output, gradients."""
    schedule, stages, _ = build(package, name, microbatches, **options)
    results: dict[str, Any] = {}
    for step in range(steps):
        x, y, scale = make_batch(rows or 2 * microbatches, seed=5 + step)
        losses: list[Tensor] = []
        first = stages[0].is_first or stages[-1].is_first
        last = stages[0].is_last or stages[-1].is_last
        if form == "batch":
            output = schedule.step(
                *((x,) if first else ()),
                target=y if last else None,
                losses=losses,
                scale=scale,
            )
        else:
            output = schedule.step(
                arg_mbs=[(one,) for one in x.tensor_split(microbatches)] if first else None,
                kwarg_mbs=[{"scale": one} for one in scale.tensor_split(microbatches)],
                target_mbs=list(y.tensor_split(microbatches)) if last else None,
                losses=losses,
            )
        results |= {f"step {step} {k}": v for k, v in gradients(stages).items()}
        if last:
            results[f"step {step} output"] = output.detach()
            results |= {f"step {step} loss {m}": v.detach() for m, v in enumerate(losses)}
        else:
            assert output is None
        if zero_grad:
            for stage in stages:
                stage.submod.zero_grad()
        if with_eval:
            losses = []
            evaluated = schedule.eval(
                *((x,) if first else ()), target=y if last else None, losses=losses, scale=scale
            )
            if last:
                results[f"eval {step} output"] = evaluated.detach()
                results |= {f"eval {step} loss {m}": v.detach() for m, v in enumerate(losses)}
    return results


def train_plainly(
    name: str,
    *,
    microbatches: int,
    steps: int = 2,
    zero_grad: bool = True,
    with_eval: bool = False,
    rows: int | None = None,
    chunks: int = 2,
    loss_fn: Callable[..., Any] = mean_loss,
    scale_grads: bool = True,
    **_: Any,
) -> dict[str, Any]:
    """The same without a pipeline, as far as this rank can tell."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    chunks = 1 if name in SINGLE else chunks
    modules = make_model(ranks * chunks)
    own = stages_of(name, rank, ranks, chunks)
    results: dict[str, Any] = {}
    for step in range(steps):
        tensors = make_batch(rows or 2 * microbatches, seed=5 + step)
        parts = [
            (x, y, {"scale": scale})
            for x, y, scale in zip(*(t.tensor_split(microbatches) for t in tensors), strict=True)
        ]
        losses, output = run_plainly(modules, parts, loss_fn=loss_fn, average=scale_grads)
        for index in own:
            for key, p in modules[index].named_parameters():
                results[f"step {step} {index}.{key}"] = p.grad.clone()
        if len(modules) - 1 in own:
            for what in ("step", "eval") if with_eval else ("step",):
                results[f"{what} {step} output"] = output
                results |= {f"{what} {step} loss {m}": v for m, v in enumerate(losses)}
        if zero_grad:
            for module in modules:
                module.zero_grad()
    return results


def compare_with_truth(cases: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """Ours beside the unpipelined model: what differs."""
    problems = []
    for name, options in cases:
        found = differences(train(OURS, name, **options), train_plainly(name, **options))
        problems += [f"{name} {options}: {problem}" for problem in found]
    return problems


def compare_with_torch(cases: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """Ours beside torch's package: what differs."""
    problems = []
    for name, options in cases:
        theirs = train(TORCH, name, **options)
        found = differences(train(OURS, name, **options), theirs)
        problems += [f"{name} {options}: {problem}" for problem in found]
    return problems


class Branch(nn.Module):
    """A part that no input leads to; torch's split backward forgets it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))
        self.alone = nn.Parameter(torch.full((WIDTH,), 0.3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x * self.weight) + torch.tanh(self.alone) ** 2


def train_with_branch() -> list[str]:
    modules, truth = ([Branch() for _ in range(4)] for _ in range(2))
    schedule, stages, _ = build(OURS, "ZBVZeroBubble", 4, modules=modules)  # type: ignore[arg-type]
    x, y, _ = make_batch(8)
    schedule.step(x, target=y)
    run_plainly(truth, [(a, b, {}) for a, b in zip(x.chunk(4), y.chunk(4), strict=True)])  # type: ignore[arg-type]
    expected = {
        f"{stage.stage_index}.{key}": p.grad
        for stage in stages
        for key, p in truth[stage.stage_index].named_parameters()
    }
    return differences(gradients(stages), expected)
