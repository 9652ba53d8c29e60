"""``pipeloom passes``: run passes over a schedule and show what each one changed."""

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
    Options,
    Ranks,
    Sends,
    SendsChoice,
    TopologyOption,
    check_target,
    print_json,
    resolve_schedule,
)
from pipeloom.cost.files import load_costs
from pipeloom.cost.model import CostModel
from pipeloom.passes.difference import Difference
from pipeloom.passes.pipeline import PassPipeline, default_passes
from pipeloom.passes.registry import Pass, list_passes, make_pass, parse_pass


def run(
    name_or_file: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME|FILE]",
            help="A schedule of the library, or a .csv or .json file.",
            show_default=False,
        ),
    ] = None,
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    chunks: Chunks = None,
    option: Options = None,
    topology: TopologyOption = None,
    run_passes: Annotated[
        str | None,
        typer.Option(
            "--run",
            metavar="A,B:OPTION=VALUE,…",
            help="The passes to run, in order.",
            show_default="what lower() runs",
        ),
    ] = None,
    show_each: Annotated[
        bool, typer.Option("--show-each", help="Show every pass's changes, rank by rank.")
    ] = False,
    sends: Sends = SendsChoice.RENDEZVOUS,
    channel: Channel = ChannelChoice.EDGE,
    costs: Annotated[
        Path | None,
        typer.Option(
            "--costs",
            metavar="FILE",
            help="What stages weigh, for unshard_parameters:memory=…",
            show_default=False,
        ),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(
            "--save", metavar="FILE", help="Write the program (.csv, .json).", show_default=False
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run passes over a schedule, verify after each, and show what each one changed.

    Without a schedule: list the passes and their options.
    """
    if name_or_file is None:
        _list_passes(as_json=as_json)
        return
    if save is not None:
        check_target(save)
    schedule = resolve_schedule(
        name_or_file,
        ranks=ranks,
        microbatches=microbatches,
        chunks=chunks,
        options=option,
        topology=topology,
    )
    passes: list[Pass] = default_passes(schedule)
    if run_passes is not None:
        passes = [parse_pass(text) for text in run_passes.split(",") if text.strip()]
    if costs is not None:
        passes = _give_costs(passes, load_costs(costs))
    pipeline = PassPipeline(passes, sends=sends.value, channel=channel.value)
    differences = pipeline.explain(schedule)
    result = differences[-1].after if differences else schedule
    if save is not None:
        result.save(save)
    if as_json:
        print_json([_to_data(difference, show_each=show_each) for difference in differences])
        return
    for difference in differences:
        text = str(difference)
        print(text if show_each else text.partition("\n")[0])
    if save is not None:
        print(f"wrote {save}")
    elif not show_each:
        print(result)


def _give_costs(passes: list[Pass], costs: CostModel) -> list[Pass]:
    """Costs for the passes that have a limit in memory."""
    return [
        make_pass(step.name, **step.arguments, costs=costs) if "memory" in step.arguments else step
        for step in passes
    ]


def _list_passes(*, as_json: bool) -> None:
    if as_json:
        print_json(
            [
                {
                    "name": step.name,
                    "summary": step.summary,
                    "options": [
                        {"name": o.name, "type": o.type, "default": o.default} for o in step.options
                    ],
                }
                for step in list_passes()
            ]
        )
        return
    for step in list_passes():
        print(f"{step.name}: {step.summary}")
        for o in step.options:
            print(f"  {o.name}: {o.type} = {o.default!r}")


def _to_data(difference: Difference, *, show_each: bool) -> dict[str, object]:
    data: dict[str, object] = {
        "pass": difference.name,
        "counts": difference.counts,
        "actions": sum(map(len, difference.after.actions)),
    }
    if show_each:
        data["ranks"] = [
            {
                "added": list(map(str, added)),
                "removed": list(map(str, removed)),
                "moved": list(map(str, moved)),
                "program": list(map(str, program)),
            }
            for added, removed, moved, program in zip(
                difference.added,
                difference.removed,
                difference.moved,
                difference.after.actions,
                strict=True,
            )
        ]
    return data
