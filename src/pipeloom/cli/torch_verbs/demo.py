"""``pipeloom demo``: train a small model on 4 local ranks, and look at what was done.

::

    plan ─► ranks train, gradients checked ─► measured timeline beside the predicted one
                                           ─► report.html, trace.json
"""

from __future__ import annotations

import os
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from pipeloom.cli.common import (
    AsJson,
    Chunks,
    Options,
    TopologyOption,
    check_target,
    is_file,
    resolve_schedule,
)
from pipeloom.errors import MissingExtraError, PipeloomError, ScheduleError
from pipeloom.ir.schedule import Schedule

if TYPE_CHECKING:
    from pipeloom.cli.torch_verbs.demo_training import DemoPlan

RANKS, MICROBATCHES, STEPS = 4, 8, 80
INTERRUPTED = 130


class DeviceChoice(StrEnum):
    """Where the stages are."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class TransportChoice(StrEnum):
    """How ranks reach each other."""

    TORCH = "torch"
    LOCAL = "local"


def run(
    name_or_file: Annotated[
        str,
        typer.Argument(
            metavar="NAME|FILE", help="A schedule of the library, or a .csv or .json file."
        ),
    ] = "zbv",
    ranks: Annotated[
        int | None,
        typer.Option("-r", "--ranks", metavar="N", min=1, help="Ranks.", show_default=str(RANKS)),
    ] = None,
    microbatches: Annotated[
        int | None,
        typer.Option(
            "-m",
            "--microbatches",
            metavar="N",
            min=1,
            help="Microbatches of 4 rows each.",
            show_default=str(MICROBATCHES),
        ),
    ] = None,
    chunks: Chunks = None,
    option: Options = None,
    topology: TopologyOption = None,
    steps: Annotated[
        int, typer.Option("--steps", metavar="N", min=1, help="Steps of training.")
    ] = STEPS,
    device: Annotated[
        DeviceChoice, typer.Option("--device", help="auto takes a GPU if there is one.")
    ] = DeviceChoice.AUTO,
    transport: Annotated[
        TransportChoice,
        typer.Option("--transport", help="A process for every rank, or all ranks in this one."),
    ] = TransportChoice.TORCH,
    report: Annotated[
        Path, typer.Option("--report", metavar="FILE", help="Where the HTML report goes.")
    ] = Path("report.html"),
    trace: Annotated[
        Path, typer.Option("--trace", metavar="FILE", help="Where the trace for Perfetto goes.")
    ] = Path("trace.json"),
    as_json: AsJson = False,
) -> None:
    """Train a small GPT, character by character, on the help texts that come with Python.

    The gradients of the first steps are compared with those of the unpipelined model. Afterwards
    the last step is shown as it was measured and as it was predicted, and written as an HTML report
    and as a trace.
    """
    for path in (report, trace):
        check_target(path)
    if not is_file(name_or_file):
        ranks, microbatches = ranks or RANKS, microbatches or MICROBATCHES
    schedule = resolve_schedule(
        name_or_file,
        ranks=ranks,
        microbatches=microbatches,
        chunks=chunks,
        options=option,
        topology=topology,
    )
    if not schedule.has_backward:
        raise ScheduleError(f"{schedule.name} has no backward, so there is nothing to train with")
    if find_spec("torch") is None:
        raise MissingExtraError("torch", extra="torch", purpose="pipeloom demo")
    from pipeloom.cli.torch_verbs.demo_story import Story

    plan = make_plan(schedule, steps=steps, device=device)
    story = Story(plan, is_local=transport is TransportChoice.LOCAL, is_quiet=as_json)
    try:
        with story.progress():
            train(plan, story, transport)
    except KeyboardInterrupt:
        typer.echo("interrupted; every rank has ended", err=True)
        raise typer.Exit(INTERRUPTED) from None
    story.save(report, trace)
    if as_json:
        story.print_json()
    else:
        story.print()


def make_plan(schedule: Schedule, *, steps: int, device: DeviceChoice) -> DemoPlan:
    """Choose the device and share the cores out."""
    import torch

    from pipeloom.cli.torch_verbs.demo_training import DemoPlan

    has_gpu = torch.cuda.is_available()
    if device is DeviceChoice.CUDA and not has_gpu:
        raise PipeloomError("--device cuda: torch finds no GPU here; leave it out, or say cpu")
    chosen: Literal["cpu", "cuda"] = "cuda" if has_gpu and device is not DeviceChoice.CPU else "cpu"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return DemoPlan(
        schedule=schedule,
        steps=steps,
        device=chosen,
        # The same for both transports, so that both compute the same to the last bit.
        threads=max(1, (cores or 1) // schedule.num_ranks),
    )


def train(plan: DemoPlan, story: object, transport: TransportChoice) -> None:
    """Start the ranks, and tell the story what they say."""
    from pipeloom.cli.torch_verbs.demo_story import Story
    from pipeloom.cli.torch_verbs.demo_training import train_locally, train_rank

    assert isinstance(story, Story)
    if transport is TransportChoice.LOCAL:
        train_locally(lambda message: story.hear(0, message), plan)
        return
    import torch

    from pipeloom.cli.torch_verbs.launch import run_ranks

    ranks = plan.schedule.num_ranks
    # NCCL wants a GPU for every rank; with fewer, gloo carries what several share.
    own_gpu_each = plan.device == "cuda" and torch.cuda.device_count() >= ranks
    run_ranks(
        train_rank,
        plan,
        ranks=ranks,
        on_message=story.hear,
        backend="cpu:gloo,cuda:nccl" if own_gpu_each else "gloo",
    )
