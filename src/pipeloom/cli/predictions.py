"""What ``simulate`` and ``compare`` share: costs, limits, schedules made to measure, numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from pipeloom.cli.common import is_file, parse_options, resolve_schedule
from pipeloom.cost.constant import StageCosts, UniformCosts
from pipeloom.cost.files import load_costs
from pipeloom.cost.units import parse_memory
from pipeloom.ir.schedule import Schedule
from pipeloom.ir.timeline import Timeline
from pipeloom.simulate.engine import UNIT_COSTS, simulate

CostsFile = Annotated[
    Path | None,
    typer.Option(
        "--costs",
        metavar="FILE",
        help="A cost file (docs/costs.md); without it F, I and W take 1 each.",
        show_default=False,
    ),
]
MemoryLimit = Annotated[
    str | None,
    typer.Option(
        "--memory",
        metavar="AMOUNT",
        help="What a rank may hold: 40GiB, or a number in the costs' unit.",
        show_default=False,
    ),
]


def read_costs(path: Path | None) -> UniformCosts | StageCosts:
    """The costs of a file; 1 for each of F, I and W without one."""
    return UNIT_COSTS if path is None else load_costs(path)


def read_limit(amount: str | None, costs: UniformCosts | StageCosts) -> float | None:
    """The memory limit in the costs' unit."""
    return None if amount is None else parse_memory(amount, costs.memory_unit)


def resolve_for_costs(
    name_or_file: str,
    *,
    costs: UniformCosts | StageCosts,
    memory_limit: float | None,
    ranks: int | None = None,
    microbatches: int | None = None,
    chunks: int | None = None,
    options: Iterable[str] = (),
    topology: str | None = None,
) -> Schedule:
    """The schedule that the arguments name; one that is made for costs is made for these.

    One that has a peak of its own is squeezed into the limit only where it would not fit.
    """
    if is_file(name_or_file) or ranks is None or microbatches is None or topology is not None:
        return resolve_schedule(
            name_or_file,
            ranks=ranks,
            microbatches=microbatches,
            chunks=chunks,
            options=options,
            topology=topology,
        )
    from pipeloom.schedules.registry import build_schedule, find_schedule

    entry = find_schedule(name_or_file)
    given = parse_options(options)
    names = {option.name for option in entry.options}

    def build(**measured: Any) -> Schedule:
        known = {name: value for name, value in measured.items() if name in names}
        return build_schedule(
            entry.name, ranks=ranks, microbatches=microbatches, chunks=chunks, **known | given
        )

    if memory_limit is None:
        return build(costs=costs)
    if entry.keeps_peak:
        schedule = build(costs=costs)
        if not find_overfull(simulate(schedule, costs, memory=memory_limit)):
            return schedule
    return build(costs=costs, memory_limit=memory_limit)


def find_overfull(timeline: Timeline) -> list[int]:
    """The ranks whose peak is over the limit."""
    limit = timeline.memory_limit
    if limit is None:
        return []
    return [rank for rank, peak in enumerate(timeline.peak_memory) if peak > limit * (1 + 1e-9)]


@contextmanager
def show_work(what: str) -> Iterator[None]:
    """Say on the terminal's standard error that something is going on, until it is done."""
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_terminal:
        with console.status(what):
            yield
    else:
        yield


def format_number(value: float, unit: str = "") -> str:
    """A number as people read it: at most five digits that matter.

    >>> format_number(1588.36, "ms"), format_number(0.33333333), format_number(1234567)
    ('1588.4 ms', '0.33333', '1234567')
    """
    text = f"{value:.0f}" if abs(value) >= 10_000 else f"{value:.5g}"
    return f"{text} {unit}" if unit else text


def format_share(value: float | None) -> str:
    """A share in percent.

    >>> format_share(0.0312), format_share(None)
    ('3.1 %', '–')
    """
    return "–" if value is None else f"{100 * value:.1f} %"
