"""``pipeloom schedules``: the library, with names, constraints and closed forms."""

from __future__ import annotations

from typing import Annotated

import typer

from pipeloom.cli.common import AsJson, print_json
from pipeloom.schedules.entry import ScheduleEntry
from pipeloom.schedules.registry import find_schedule, list_schedules


def run(
    name: Annotated[
        str | None,
        typer.Argument(help="Only this schedule, with its options.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the schedules of the library and those that installed packages add.

    Closed forms: p ranks, m microbatches, v chunks per rank; F, I and W are a rank's costs of one
    microbatch; the bubble is the idle time of a rank, the peak is in activations of one microbatch
    on one rank.
    """
    entries = [find_schedule(name)] if name else list(list_schedules())
    if as_json:
        print_json([_to_data(entry) for entry in entries])
        return
    for index, entry in enumerate(entries):
        if index:
            print()
        _print_entry(entry)


def _print_entry(entry: ScheduleEntry) -> None:
    print(f"{entry.name}: {entry.summary}" if entry.summary else entry.name)
    lines = {
        "also": ", ".join(entry.aliases),
        "shape": entry.constraints_text or "any",
        "bubble": entry.bubble,
        "peak": entry.peak,
        "options": ", ".join(map(str, entry.options)),
    }
    for label, text in lines.items():
        if text:
            print(f"  {label.ljust(7)}  {text}")


def _to_data(entry: ScheduleEntry) -> dict[str, object]:
    return {
        "name": entry.name,
        "aliases": list(entry.aliases),
        "family": entry.family,
        "summary": entry.summary,
        "constraints": entry.constraints_text,
        "takes_chunks": entry.takes_chunks,
        "default_chunks": entry.default_chunks,
        "options": [
            {"name": option.name, "type": option.type, "default": repr(option.default)}
            for option in entry.options
        ],
        "bubble": entry.bubble,
        "peak": entry.peak,
    }
