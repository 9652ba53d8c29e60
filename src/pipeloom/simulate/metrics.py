"""The lengths and shares of a timeline, each defined once.

::

    makespan          0 to the last end of anything
    span              the largest, over ranks, of last end − first start of computation
    bubble            1 − busiest rank's work / span
    bubble_makespan   1 − busiest rank's work / makespan
    idle_fraction     idle time / (ranks × makespan)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from pipeloom.ir.timeline import Span


class Metrics(NamedTuple):
    """Lengths and shares; ``work`` and ``bubble_of_rank`` have an entry per rank."""

    makespan: float
    span: float
    bubble: float
    bubble_makespan: float
    idle_fraction: float
    work: tuple[float, ...]
    bubble_of_rank: tuple[float, ...]


def find_metrics(spans: Iterable[Span], num_ranks: int) -> Metrics:
    """Measure the spans of a timeline."""
    work = [0.0] * num_ranks
    first = [float("inf")] * num_ranks
    last = [0.0] * num_ranks
    makespan = 0.0
    for rank, lane, start, end, _ in spans:
        if end > makespan:
            makespan = end
        if lane == "compute":
            work[rank] += end - start
            if start < first[rank]:
                first[rank] = start
            if end > last[rank]:
                last[rank] = end
    span = max((max(0.0, b - a) for a, b in zip(first, last, strict=True)), default=0.0)
    busiest = max(work, default=0.0)
    return Metrics(
        makespan=makespan,
        span=span,
        bubble=_missing_share(busiest, span),
        bubble_makespan=_missing_share(busiest, makespan),
        idle_fraction=_missing_share(sum(work), num_ranks * makespan),
        work=tuple(work),
        bubble_of_rank=tuple(_missing_share(own, makespan) for own in work),
    )


def _missing_share(part: float, whole: float) -> float:
    """1 − part / whole; what is left of a division by rounding is not below 0."""
    return max(0.0, 1.0 - part / whole) if whole > 0 else 0.0
