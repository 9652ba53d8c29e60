"""``pipeloom check``: prove a schedule right, or report everything that is wrong with it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipeloom.cli.common import (
    AsJson,
    Channel,
    ChannelChoice,
    Chunks,
    Microbatches,
    NameOrFile,
    Options,
    Ranks,
    Sends,
    SendsChoice,
    TopologyOption,
    print_json,
    resolve_schedule,
)
from pipeloom.cost.files import load_costs
from pipeloom.cost.units import parse_memory
from pipeloom.errors import ScheduleError
from pipeloom.verify.verifier import verify


def run(
    name_or_file: NameOrFile,
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    chunks: Chunks = None,
    option: Options = None,
    topology: TopologyOption = None,
    sends: Sends = SendsChoice.RENDEZVOUS,
    channel: Channel = ChannelChoice.EDGE,
    lower: Annotated[
        bool, typer.Option("--lower", help="Insert sends and receives, then verify.")
    ] = False,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory",
            help="The limit of every rank, as 40GiB or, for costs without a unit, 12.5.",
            show_default=False,
        ),
    ] = None,
    costs: Annotated[
        Path | None,
        typer.Option("--costs", metavar="FILE", help="What actions cost.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Verify a schedule; exit 1 with a report when it fails.

    A schedule without communication is checked for completeness and order, and that messages
    could carry it through; with communication, for deadlocks under the model that --sends and
    --channel name.
    """
    schedule = resolve_schedule(
        name_or_file,
        ranks=ranks,
        microbatches=microbatches,
        chunks=chunks,
        options=option,
        topology=topology,
    )
    if lower:
        from pipeloom.passes.pipeline import lower as lower_schedule

        schedule = lower_schedule(schedule)
    cost_model = limit = None
    if costs is not None:
        cost_model = load_costs(costs)
    if memory is not None:
        if cost_model is None:
            raise ScheduleError("--memory needs --costs FILE, which says what actions hold")
        limit = parse_memory(memory, cost_model.memory_unit)
    report = verify(
        schedule, sends=sends.value, channel=channel.value, costs=cost_model, memory=limit
    )
    if as_json:
        print_json(report.to_json())
    else:
        print(report)
    if not report.ok:
        raise typer.Exit(1)
