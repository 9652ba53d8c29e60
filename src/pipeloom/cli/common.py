"""What the verbs share: the arguments that name a schedule, and printing.

::

    pipeloom show  zbv -r 4 -m 8 --chunks 2 --option key=value     a name, and its shape
    pipeloom check mine.csv --topology bidirectional               a file, which knows its shape
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from pipeloom.errors import ParseError, PipeloomError, ScheduleError
from pipeloom.ir.schedule import Schedule
from pipeloom.ir.serialization import load_schedule

#: What has an argument of its own.
_FLAGS = {
    "name": "NAME",
    "ranks": "-r RANKS",
    "microbatches": "-m MICROBATCHES",
    "chunks": "--chunks CHUNKS",
}

SCHEDULE_SUFFIXES = (".csv", ".json")


class TopologyChoice(StrEnum):
    """What a CSV cannot say: how its stages are connected."""

    CHAIN = "chain"
    BIDIRECTIONAL = "bidirectional"


class SendsChoice(StrEnum):
    """When a send is done."""

    BUFFERED = "buffered"
    RENDEZVOUS = "rendezvous"
    BLOCKING = "blocking"


class ChannelChoice(StrEnum):
    """Which messages share a queue."""

    ALL = "all"
    PAIR = "pair"
    EDGE = "edge"


NameOrFile = Annotated[
    str,
    typer.Argument(
        metavar="NAME|FILE",
        help="A schedule of the library, or a .csv or .json file.",
        show_default=False,
    ),
]
Ranks = Annotated[
    int | None, typer.Option("-r", "--ranks", metavar="N", min=1, help="Ranks.", show_default=False)
]
Microbatches = Annotated[
    int | None,
    typer.Option(
        "-m", "--microbatches", metavar="N", min=1, help="Microbatches.", show_default=False
    ),
]
Chunks = Annotated[
    int | None,
    typer.Option(
        "-v", "--chunks", metavar="N", min=1, help="Stages per rank and chain.", show_default=False
    ),
]
Options = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        metavar="KEY=VALUE",
        help="An option of the schedule; may be repeated.",
        show_default=False,
    ),
]
TopologyOption = Annotated[
    TopologyChoice | None,
    typer.Option("--topology", help="How a CSV's stages are connected.", show_default="chain"),
]
Sends = Annotated[SendsChoice, typer.Option("--sends", help="When a send is done.")]
Channel = Annotated[ChannelChoice, typer.Option("--channel", help="Which messages share a queue.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def resolve_schedule(
    name_or_file: str,
    *,
    ranks: int | None = None,
    microbatches: int | None = None,
    chunks: int | None = None,
    options: Iterable[str] | None = None,
    topology: str | None = None,
) -> Schedule:
    """The schedule that the arguments name: built, or loaded from a file."""
    if is_file(name_or_file):
        given = {"-r": ranks, "-m": microbatches, "--chunks": chunks, "--option": options}
        unused = [flag for flag, value in given.items() if value]
        if unused:
            raise ScheduleError(
                f"{name_or_file} is a file and says its own shape; leave out {', '.join(unused)}"
            )
        return load_schedule(
            name_or_file, topology=TopologyChoice(topology).value if topology else None
        )
    from pipeloom.schedules.registry import build_schedule, find_schedule

    entry = find_schedule(name_or_file)
    missing = [
        flag
        for flag, value in (("-r RANKS", ranks), ("-m MICROBATCHES", microbatches))
        if value is None
    ]
    if missing:
        raise ScheduleError(f"{entry.name} needs a shape; add {' and '.join(missing)}")
    if topology is not None:
        raise ScheduleError("--topology is for CSV files; a schedule of the library has its own")
    assert ranks is not None
    assert microbatches is not None
    return build_schedule(
        name_or_file,
        ranks=ranks,
        microbatches=microbatches,
        chunks=chunks,
        **parse_options(options or ()),
    )


def is_file(name_or_file: str) -> bool:
    """True for what is meant as a file; a file whose name is that of a schedule needs its path.

    >>> is_file("mine.csv"), is_file("./zbv"), is_file("zbv")
    (True, True, False)
    """
    path = Path(name_or_file)
    if path.suffix.lower() in SCHEDULE_SUFFIXES or path.name != name_or_file:
        return True
    return bool(path.suffix) and path.is_file()


def check_target(path: Path) -> None:
    """Refuse a file that cannot be written before any work is done for it."""
    if not path.parent.is_dir():
        raise PipeloomError(f"{path} cannot be written: there is no folder {path.parent}")
    if path.is_dir():
        raise PipeloomError(f"{path} cannot be written: it is a folder")


def parse_options(settings: Iterable[str]) -> dict[str, Any]:
    """Read ``key=value`` settings; a value is a number, true, false, none, a list or a text.

    >>> parse_options(["group_size=4", "limit=1.5", "costs=[1, 2]", "mode=fast"])
    {'group_size': 4, 'limit': 1.5, 'costs': [1, 2], 'mode': 'fast'}
    """
    options: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        key = key.strip()
        if not equals or not key.isidentifier():
            raise ParseError(f"--option {setting}: write it as key=value")
        if key in _FLAGS:
            raise ParseError(f"--option {setting}: {key} is no option; write {_FLAGS[key]}")
        if key in options:
            raise ParseError(f"--option {key} is given twice")
        options[key] = _read_value(text.strip())
    return options


def _read_value(text: str) -> Any:
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def print_json(data: Any) -> None:
    """Print data as JSON, for programs."""
    print(json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False))


def print_table(
    headers: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Iterable[int] = ()
) -> None:
    """Print a table for people: as wide as the terminal, whole where the output is no terminal."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    right = set(numbers)
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for index, header in enumerate(headers):
        table.add_column(
            Text(header), justify="right" if index in right else "left", overflow="fold"
        )
    for row in rows:
        table.add_row(*map(Text, row))
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 100_000
    with console.capture() as capture:
        console.print(table)
    for line in capture.get().splitlines():
        print(line.rstrip())
