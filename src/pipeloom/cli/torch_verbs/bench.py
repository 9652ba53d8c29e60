"""``pipeloom bench``: every benchmark beside torch in the same run, on one page."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from pipeloom.cli.common import AsJson, check_target, print_json
from pipeloom.errors import MissingExtraError


def run(
    suites: Annotated[
        list[str] | None,
        typer.Argument(metavar="SUITE", help="Only these; all of them without."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Smaller and less exact: minutes instead of an hour.")
    ] = False,
    show_list: Annotated[bool, typer.Option("--list", help="Say which suites there are.")] = False,
    save: Annotated[
        Path, typer.Option("--save", metavar="FILE", help="Where the page goes.")
    ] = Path("bench.md"),
    save_json: Annotated[
        Path | None,
        typer.Option(
            "--save-json", metavar="FILE", help="Where the data goes.", show_default="beside it"
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure pipeloom beside torch.distributed.pipelining, in the same run on this machine.

    Writes a page with the tables, the facts of the machine and how to repeat it, and the same as
    JSON. Exit status 1 when a suite failed.
    """
    from pipeloom.bench.suites import find_suites, run_suite

    chosen = find_suites(suites or [])
    if show_list:
        if as_json:
            print_json([{"name": suite.name, "title": suite.title} for suite in chosen])
        else:
            for suite in chosen:
                print(f"{suite.name:<16}{suite.title}")
        return
    data_path = save.with_suffix(".json") if save_json is None else save_json
    for path in (save, data_path):
        check_target(path)
    if find_spec("torch") is None:
        raise MissingExtraError("torch", extra="torch", purpose="pipeloom bench")
    from pipeloom.bench.page import find_facts, make_data, make_page

    facts = find_facts()
    results = []
    for suite in chosen:
        if not as_json:
            print(f"== {suite.name}: {suite.title}")
        results.append(run_suite(suite, quick=quick, on_line=_say_nothing if as_json else print))
    repeat = " ".join(["pipeloom bench", *(suites or []), *(["--quick"] if quick else [])])
    data = make_data(facts, results, repeat=repeat)
    save.write_text(make_page(facts, results, repeat=repeat), encoding="utf-8")
    data_path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    if as_json:
        print_json(data)
    else:
        print(f"wrote {save}\nwrote {data_path}")
    if any(result.status for result in results):
        raise typer.Exit(1)


def _say_nothing(line: str) -> None:
    """The data is printed at the end, and nothing else."""
