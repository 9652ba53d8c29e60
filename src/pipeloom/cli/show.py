"""``pipeloom show``: draw or print a schedule, or save it or its picture.

::

    to a terminal    the simulated timeline, in colour        --as timeline
    to a pipe        the order, which can be parsed again     --as order
"""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from pipeloom.cli.common import (
    SCHEDULE_SUFFIXES,
    AsJson,
    Chunks,
    Microbatches,
    NameOrFile,
    Options,
    Ranks,
    TopologyOption,
    check_target,
    resolve_schedule,
)
from pipeloom.errors import ScheduleError
from pipeloom.ir.notation import format_grid
from pipeloom.ir.schedule import Schedule
from pipeloom.ir.serialization import schedule_to_json


class View(StrEnum):
    """What is printed."""

    TIMELINE = "timeline"
    ORDER = "order"


class Direction(StrEnum):
    """How ranks lie in the grid."""

    ROWS = "rows"
    COLUMNS = "columns"


def run(
    name_or_file: NameOrFile,
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    chunks: Chunks = None,
    option: Options = None,
    topology: TopologyOption = None,
    lower: Annotated[bool, typer.Option("--lower", help="With sends and receives.")] = False,
    ranks_as: Annotated[
        Direction, typer.Option("--ranks-as", help="How ranks lie in the grid.")
    ] = Direction.ROWS,
    view: Annotated[
        View | None,
        typer.Option(
            "--as",
            help="The simulated timeline, or the order alone.",
            show_default="timeline in a terminal, order in a pipe",
        ),
    ] = None,
    save: Annotated[
        list[Path] | None,
        typer.Option(
            "--save",
            metavar="FILE",
            help="Write the order (.csv, .json) or a picture (.svg, .png, .html, .trace.json); "
            "may be repeated.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show a schedule of the library or of a file.

    Without --lower it is the order of computations; sends and receives are shown where a file has
    them.
    """
    for path in save or ():
        check_target(path)
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
    for path in save or ():
        save_as(schedule, path)
    if as_json:
        print(schedule_to_json(schedule), end="")
    elif save:
        for path in save:
            print(f"wrote {path}")
    elif view is View.TIMELINE:
        draw(schedule)
    elif view is None and ranks_as is Direction.ROWS and sys.stdout.isatty():
        try:
            draw(schedule)
        except ScheduleError as error:
            # A program that cannot run has no timeline, and is looked at all the more.
            print(format_grid(schedule))
            print(f"\nno timeline can be drawn: {error}", file=sys.stderr)
    else:
        columns = ranks_as is Direction.COLUMNS
        print(format_grid(schedule, ranks_as="columns" if columns else "rows"))


def draw(schedule: Schedule) -> None:
    """Draw the simulated timeline: as wide as the terminal, in the characters it has."""
    from rich.console import Console

    from pipeloom.simulate.engine import simulate
    from pipeloom.view.text import can_encode, draw_coloured

    console = Console(highlight=False, soft_wrap=True)
    picture = draw_coloured(
        simulate(schedule), width=console.width, unicode=can_encode(console.encoding)
    )
    console.print(picture, end="")


def save_as(schedule: Schedule, path: Path) -> None:
    """Write the order itself, or, for the suffix of a picture, the simulated timeline."""
    name = path.name.lower()
    if name.endswith(SCHEDULE_SUFFIXES) and not name.endswith(".trace.json"):
        schedule.save(path)
        return
    from pipeloom.ir.renderers import find_renderer
    from pipeloom.simulate.engine import simulate

    find_renderer(path)  # An unknown suffix is an error before anything is simulated.
    simulate(schedule).save(path)
