"""``pipeloom compare``: the library, side by side, under the same costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

import typer

from pipeloom.cli.common import (
    AsJson,
    TopologyOption,
    print_json,
    print_table,
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
)
from pipeloom.cost.constant import StageCosts, UniformCosts
from pipeloom.errors import PipeloomError, ScheduleError
from pipeloom.ir.schedule import Schedule
from pipeloom.ir.timeline import Timeline
from pipeloom.schedules.registry import find_schedule, list_schedules
from pipeloom.simulate.engine import simulate

PARETO_MARK = "*"


class SortKey(StrEnum):
    """What to sort the table by."""

    MAKESPAN = "makespan"
    SPAN = "span"
    BUBBLE = "bubble"
    MEMORY = "memory"
    BOUND = "bound"
    NAME = "name"


@dataclass(frozen=True)
class Row:
    """One schedule that could be simulated."""

    name: str
    chunks: int | None
    timeline: Timeline
    #: Why it does not fit; empty if it does.
    problem: str
    is_best: bool = False

    @property
    def peak(self) -> float:
        return max(self.timeline.peak_memory, default=0.0)


@dataclass(frozen=True)
class LeftOut:
    """One schedule that does not allow the shape or the costs, and why."""

    name: str
    chunks: int | None
    reason: str


@dataclass(frozen=True)
class Candidate:
    """A name of the library with its chunks, or a file."""

    name: str
    chunks: int | None = None
    is_file: bool = False


def run(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME|FILE]...",
            help="Schedules and files to compare; without names the whole library is.",
            show_default=False,
        ),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option("-r", "--ranks", min=1, help="Ranks.", show_default=False)
    ] = None,
    microbatches: Annotated[
        int | None,
        typer.Option("-m", "--microbatches", min=1, help="Microbatches.", show_default=False),
    ] = None,
    chunks: Annotated[
        list[int] | None,
        typer.Option(
            "-v",
            "--chunks",
            min=1,
            help="Stages per rank where a schedule lets one choose; may be repeated.",
            show_default=False,
        ),
    ] = None,
    topology: TopologyOption = None,
    costs: CostsFile = None,
    memory: MemoryLimit = None,
    sort: Annotated[SortKey, typer.Option("--sort", help="The column to sort by.")] = (
        SortKey.MAKESPAN
    ),
    as_json: AsJson = False,
) -> None:
    """Compare schedules under the same costs: the whole library, and files.

    A star marks the Pareto-best: nothing that fits is faster without needing more memory. What
    does not fit the limit comes last, what does not allow the shape below the table.
    """
    model = read_costs(costs)
    limit = read_limit(memory, model)
    candidates = list_candidates(names or [], ranks, microbatches, chunks or [])

    def build(candidate: Candidate) -> Schedule:
        return resolve_for_costs(
            candidate.name,
            costs=model,
            memory_limit=limit,
            ranks=None if candidate.is_file else ranks,
            microbatches=None if candidate.is_file else microbatches,
            chunks=candidate.chunks,
            topology=topology if candidate.is_file else None,
        )

    with _progress(len(candidates)) as advance:
        rows, left_out = compare(candidates, build, model, limit, advance)
    rows = sort_rows(rows, sort)
    if as_json:
        print_json(
            {
                "ranks": ranks,
                "microbatches": microbatches,
                "memory_limit": limit,
                "time_unit": model.time_unit,
                "memory_unit": model.memory_unit,
                "schedules": [_to_data(row) for row in rows],
                "left_out": [vars(item) for item in left_out],
            }
        )
        return
    _print_rows(rows, model)
    if left_out:
        print()
        print("left out")
        for item in left_out:
            print(f"  {_title(item.name, item.chunks)}: {item.reason}")


def list_candidates(
    names: Iterable[str], ranks: int | None, microbatches: int | None, chunks: list[int]
) -> list[Candidate]:
    """What is to be compared: files, and names with each number of chunks that they allow."""
    from pipeloom.cli.common import is_file

    files = [Candidate(name, is_file=True) for name in names if is_file(name)]
    entries = [find_schedule(name) for name in names if not is_file(name)]
    if not entries and (ranks is not None or microbatches is not None or not files):
        entries = [entry for entry in list_schedules() if entry.name != "forward_only"]
    if entries and (ranks is None or microbatches is None):
        missing = [
            flag
            for flag, value in (("-r RANKS", ranks), ("-m MICROBATCHES", microbatches))
            if value is None
        ]
        raise ScheduleError(f"comparing needs a shape; add {' and '.join(missing)}")
    named = [
        Candidate(entry.name, number)
        for entry in entries
        for number in (
            (chunks or [entry.default_chunks])
            if entry.takes_chunks
            else [entry.default_chunks if entry.default_chunks != 1 else None]
        )
    ]
    return files + named


def compare(
    candidates: Iterable[Candidate],
    build: Callable[[Candidate], Schedule],
    costs: UniformCosts | StageCosts,
    memory_limit: float | None,
    advance: Callable[[str], None] = lambda name: None,
) -> tuple[list[Row], list[LeftOut]]:
    """Simulate every candidate; what cannot be is left out with its reason."""
    rows: list[Row] = []
    left_out: list[LeftOut] = []
    for candidate in candidates:
        advance(candidate.name)
        try:
            timeline = simulate(build(candidate), costs, memory=memory_limit)
        except PipeloomError as error:
            if candidate.is_file and isinstance(error, OSError):
                raise
            reason = " ".join(str(error).split("\n\n")[0].split())
            left_out.append(LeftOut(candidate.name, candidate.chunks, reason))
            continue
        rows.append(Row(candidate.name, candidate.chunks, timeline, _why_it_does_not_fit(timeline)))
    return mark_best(rows), left_out


def mark_best(rows: list[Row]) -> list[Row]:
    """Mark what nothing that fits beats in time without taking more memory."""

    def beats(other: Row, row: Row) -> bool:
        ours, theirs = (row.timeline.makespan, row.peak), (other.timeline.makespan, other.peak)
        at_least = all(b <= a * (1 + 1e-9) for a, b in zip(ours, theirs, strict=True))
        better = any(b < a * (1 - 1e-9) for a, b in zip(ours, theirs, strict=True))
        return at_least and better

    fitting = [row for row in rows if not row.problem]
    return [
        Row(
            row.name,
            row.chunks,
            row.timeline,
            row.problem,
            not row.problem and not any(beats(other, row) for other in fitting),
        )
        for row in rows
    ]


def sort_rows(rows: list[Row], key: SortKey) -> list[Row]:
    """What fits before what does not, each by the column."""

    def figure(row: Row) -> Any:
        timeline = row.timeline
        if key is SortKey.NAME:
            return (row.name, row.chunks or 0)
        if key is SortKey.MEMORY:
            return (row.peak, timeline.makespan)
        if key is SortKey.BOUND:
            assert timeline.figures is not None
            return (timeline.figures.distance_to_bound or 0.0, timeline.makespan)
        return (getattr(timeline, key.value), row.peak)

    return sorted(rows, key=lambda row: (bool(row.problem), figure(row)))


def _why_it_does_not_fit(timeline: Timeline) -> str:
    overfull = find_overfull(timeline)
    if not overfull:
        return ""
    worst = max(overfull, key=timeline.peak_memory.__getitem__)
    peak = format_number(timeline.peak_memory[worst], timeline.memory_unit)
    count = "1 rank" if len(overfull) == 1 else f"{len(overfull)} ranks"
    return f"does not fit: {count} over, rank {worst} needs {peak}"


def _print_rows(rows: list[Row], costs: UniformCosts | StageCosts) -> None:
    if not rows:
        print("nothing to compare")
        return
    in_time = f" ({costs.time_unit})" if costs.time_unit else ""
    in_memory = f" ({costs.memory_unit})" if costs.memory_unit else ""
    headers = [
        *("", "schedule", f"makespan{in_time}", f"span{in_time}", "bubble"),
        *(f"peak memory{in_memory}", "above bound"),
    ]
    has_problems = any(row.problem for row in rows)
    lines = []
    for row in rows:
        figures = row.timeline.figures
        assert figures is not None
        line = [
            PARETO_MARK if row.is_best else "",
            _title(row.name, row.chunks),
            format_number(figures.makespan),
            format_number(figures.span),
            format_share(figures.bubble),
            format_number(row.peak),
            format_share(figures.distance_to_bound),
        ]
        lines.append([*line, row.problem] if has_problems else line)
    print_table([*headers, ""] if has_problems else headers, lines, numbers=range(2, 7))
    print()
    print(f"{PARETO_MARK} nothing that fits is faster without needing more memory")


def _title(name: str, chunks: int | None) -> str:
    return name if chunks is None else f"{name}, {chunks} chunks"


def _to_data(row: Row) -> dict[str, Any]:
    figures = row.timeline.figures
    assert figures is not None
    return {
        "name": row.name,
        "chunks": row.chunks,
        "makespan": figures.makespan,
        "span": figures.span,
        "bubble": figures.bubble,
        "bubble_makespan": figures.bubble_makespan,
        "idle_fraction": figures.idle_fraction,
        "peak_memory": list(row.timeline.peak_memory),
        "lower_bound": figures.lower_bound,
        "distance_to_bound": figures.distance_to_bound,
        "fits": not row.problem,
        "why_not": row.problem or None,
        "pareto_best": row.is_best,
    }


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """A bar on the terminal's standard error, gone when the work is done."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("simulating", total=total)
        started = False

        def advance(name: str) -> None:
            nonlocal started
            progress.update(task, description=f"simulating {name}", advance=1 if started else 0)
            started = True

        yield advance
