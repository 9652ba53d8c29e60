"""``pipeloom simulate``: how long a schedule takes, why, and where memory peaks."""

from __future__ import annotations

from collections import defaultdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

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
)
from pipeloom.cli.predictions import (
    CostsFile,
    MemoryLimit,
    find_overfull,
    format_number,
    format_share,
    read_costs,
    read_limit,
    resolve_for_costs,
    show_work,
)
from pipeloom.ir.timeline import IdleSpan, Timeline
from pipeloom.ir.timeline_json import figures_to_data, timeline_to_data
from pipeloom.simulate.engine import simulate

MOST_CAUSES = 3
#: More ranks than this are summed up: the first, the fullest, the last.
MOST_RANKS = 16


class CommunicationChoice(StrEnum):
    """Whether a rank computes while it sends and receives."""

    OVERLAPPED = "overlapped"
    SERIALISED = "serialised"


def run(
    name_or_file: NameOrFile,
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    chunks: Chunks = None,
    option: Options = None,
    topology: TopologyOption = None,
    costs: CostsFile = None,
    memory: MemoryLimit = None,
    lower: Annotated[
        bool, typer.Option("--lower", help="Insert sends and receives first.")
    ] = False,
    sends: Sends = SendsChoice.BUFFERED,
    channel: Channel = ChannelChoice.EDGE,
    communication: Annotated[
        CommunicationChoice,
        typer.Option("--communication", help="Whether messages hold their ranks."),
    ] = CommunicationChoice.OVERLAPPED,
    save: Annotated[
        list[Path] | None,
        typer.Option(
            "--save",
            metavar="FILE",
            help="Write the timeline (.json) or its picture (.svg, .png, .html, .trace.json); "
            "may be repeated.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Predict how long a schedule takes, why its ranks wait, and where memory peaks.

    bubble is 1 − busiest rank's work / span; the lower bound is what no order of the same stages
    on the same ranks can beat.
    """
    model = read_costs(costs)
    limit = read_limit(memory, model)
    schedule = resolve_for_costs(
        name_or_file,
        costs=model,
        memory_limit=limit,
        ranks=ranks,
        microbatches=microbatches,
        chunks=chunks,
        options=option or (),
        topology=topology,
    )
    if lower:
        from pipeloom.passes.pipeline import lower as lower_schedule

        schedule = lower_schedule(schedule)
    with show_work(f"simulating {schedule.name}"):
        timeline = simulate(
            schedule,
            model,
            sends=sends.value,
            channel=channel.value,
            communication=communication.value,
            memory=limit,
        )
    for path in save or ():
        timeline.save(path)
    if as_json:
        print_json(describe(timeline))
        return
    print_summary(timeline)
    for path in save or ():
        print(f"wrote {path}")


def describe(timeline: Timeline) -> dict[str, Any]:
    """Everything that is known about a timeline, the figures first."""
    schedule = timeline.schedule
    overfull = find_overfull(timeline)
    return {
        "name": schedule.name,
        "ranks": schedule.num_ranks,
        "stages": schedule.num_stages,
        "microbatches": schedule.num_microbatches,
        **figures_to_data(timeline),
        "fits": None if timeline.memory_limit is None else not overfull,
        "ranks_over_limit": overfull,
        "timeline": timeline_to_data(timeline),
    }


def print_summary(timeline: Timeline) -> None:
    """The figures that a person wants first."""
    schedule, figures = timeline.schedule, timeline.figures
    assert figures is not None
    unit = timeline.time_unit

    def time(value: float) -> str:
        return format_number(value, unit)

    print(
        f"{schedule.name} · {schedule.num_ranks} ranks · {schedule.num_stages} stages · "
        f"{schedule.num_microbatches} microbatches"
    )
    bound = max(figures.bounds, key=figures.bounds.__getitem__, default=None)
    print(f"makespan      {time(figures.makespan)}")
    if bound is not None:
        print(
            f"lower bound   {time(figures.bounds[bound])} ({bound}); the makespan is "
            f"{format_share(figures.distance_to_bound)} above it"
        )
    print(f"span          {time(figures.span)}")
    print(
        f"bubble        {format_share(figures.bubble)} of the span, "
        f"{format_share(figures.bubble_makespan)} of the makespan; "
        f"ranks idle {format_share(figures.idle_fraction)} of the time"
    )
    _print_memory(timeline)
    _print_causes(timeline)


def _print_memory(timeline: Timeline) -> None:
    figures = timeline.figures
    assert figures is not None
    unit = timeline.memory_unit
    limit = timeline.memory_limit
    overfull = set(find_overfull(timeline))
    head = f"peak memory   {format_number(max(timeline.peak_memory, default=0.0), unit)}"
    if limit is not None:
        over = "1 rank is over" if len(overfull) == 1 else f"{len(overfull)} ranks are over"
        verdict = over if overfull else "every rank is within"
        head += f"; {verdict} the limit of {format_number(limit, unit)}"
    print(head)
    ranks = range(timeline.num_ranks)
    if timeline.num_ranks > MOST_RANKS:
        fullest = max(ranks, key=timeline.peak_memory.__getitem__)
        shown = sorted({0, fullest, timeline.num_ranks - 1})
    else:
        shown = list(ranks)
    for rank in shown:
        peak = figures.peaks[rank]
        parts = ", ".join(
            f"{name} {format_number(size)}" for name, size in peak.categories.items() if size
        )
        where = f" at {peak.action}" if peak.action is not None else ""
        mark = "  over the limit" if rank in overfull else ""
        print(f"  rank {rank:<4} {format_number(peak.total, unit):<10} {parts}{where}{mark}")


def _print_causes(timeline: Timeline) -> None:
    causes: dict[str, list[IdleSpan]] = defaultdict(list)
    for idle in timeline.idle_causes:
        causes[idle.cause].append(idle)
    totals = {cause: sum(s.end - s.start for s in spans) for cause, spans in causes.items()}
    everything = sum(totals.values())
    if not everything:
        print("idle time     none")
        return
    print(f"idle time     {format_number(everything, timeline.time_unit)} over all ranks")
    largest = sorted(totals, key=lambda cause: -totals[cause])[:MOST_CAUSES]
    for cause in largest:
        longest = max(causes[cause], key=lambda idle: idle.end - idle.start)
        share = format_share(totals[cause] / everything)
        print(
            f"  {cause:<14}{share:>7}  "
            f"{format_number(totals[cause], timeline.time_unit):<10} {_tell(longest, timeline)}"
        )


def _tell(idle: IdleSpan, timeline: Timeline) -> str:
    length = format_number(idle.end - idle.start, timeline.time_unit)
    text = f"longest: {length} on rank {idle.rank}"
    if idle.before is not None:
        text += f" before {idle.before}"
    if idle.waits_for is not None:
        text += f", for {idle.waits_for} of rank {idle.waits_for_rank}"
    return text
