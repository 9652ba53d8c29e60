"""``pipeloom report``: timelines side by side in one HTML file.

::

    pipeloom simulate zbv -r 4 -m 8 --save predicted.json
    pipeloom report predicted.json measured.json -o compare.html --open
"""

from __future__ import annotations

import json
import webbrowser
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from pipeloom.cli.common import AsJson, check_target, print_json
from pipeloom.errors import ParseError, ScheduleError
from pipeloom.ir.timeline import Timeline
from pipeloom.view.picture import Picture, make_pictures


class ThemeChoice(StrEnum):
    """How the page looks when it is opened; the reader can switch."""

    AUTO = "auto"
    LIGHT = "light"
    DARK = "dark"


def run(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="Timelines (.json) that simulate or a measured run has saved, or schedules "
            "(.csv, .json), which are simulated with F, I and W taking 1 each.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE", help="The file to write.")
    ] = Path("report.html"),
    title: Annotated[
        str | None, typer.Option("--title", help="The title of the page.", show_default=False)
    ] = None,
    theme: Annotated[
        ThemeChoice, typer.Option("--theme", help="Light, dark, or as the reader's system.")
    ] = ThemeChoice.AUTO,
    open_page: Annotated[
        bool, typer.Option("--open", help="Open the page in the browser.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write timelines as one HTML page that needs no server and no network.

    All are drawn on one axis. Where two run the same actions, as a predicted and a measured one
    do, each action is compared with its twin.
    """
    if output.suffix.lower() != ".html":
        raise ScheduleError(
            f"{output}: a report is an .html file; pictures are made by show --save"
        )
    check_target(output)
    pictures = make_pictures(load_all(files))
    from pipeloom.view.html_report import render

    render([picture.timeline for picture in pictures], output, title=title, theme=theme.value)
    if as_json:
        print_json({"written": str(output), "timelines": [*map(describe, pictures)]})
    else:
        print(f"wrote {output}")
    if open_page:
        webbrowser.open(output.absolute().as_uri())


def load_all(files: list[Path]) -> list[Timeline]:
    """Every file's timeline; all files that cannot be used are reported at once."""
    timelines: list[Timeline] = []
    problems: list[str] = []
    for path in files:
        try:
            timelines.append(load(path))
        except (ParseError, ScheduleError) as error:
            problems.append(str(error))
    if problems:
        raise ParseError("\n".join(problems))
    return timelines


def load(path: Path) -> Timeline:
    """The timeline of a file, or of the schedule that is in it."""
    from pipeloom.ir.serialization import load_schedule
    from pipeloom.ir.timeline_json import timeline_from_json
    from pipeloom.simulate.engine import simulate

    if path.suffix.lower() == ".json":
        text = read_text(path)
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ParseError(f"{path} is not JSON: {error}") from error
        if isinstance(data, dict) and isinstance(data.get("timeline"), dict):
            # What `pipeloom simulate --json` prints has the timeline inside.
            data, text = data["timeline"], json.dumps(data["timeline"])
        if isinstance(data, dict) and data.get("pipeloom") == "timeline":
            return timeline_from_json(text, source=str(path))
    return simulate(load_schedule(path))


def read_text(path: Path) -> str:
    """The text of a file; a reason where there is none."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ParseError(f"{path} is not a text file: {error}") from error
    except OSError as error:
        raise ParseError(f"{path} cannot be read: {error.strerror}") from error


def describe(picture: Picture) -> dict[str, object]:
    """What the page says first about a timeline."""
    figures, timeline = picture.figures, picture.timeline
    return {
        "title": picture.title,
        "source": timeline.source,
        "makespan": figures.makespan,
        "bubble": figures.bubble,
        "idle_fraction": figures.idle_fraction,
        "peak_memory": list(timeline.peak_memory),
    }
