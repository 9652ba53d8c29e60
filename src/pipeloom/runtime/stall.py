"""When nothing moves: what every rank is doing, and who waits for whom.

>>> reports = [
...     RankReport(rank=0, step="step 3", action="0B1", waits_for=(1,), still_for=2.0),
...     RankReport(rank=1, step="step 3", action="1F1", still_for=2.1),
... ]
>>> print(explain_stall(reports, timeout=2.0, step="step 3"))
nothing moved for 2 s in step 3
  rank 0: waits at 0B1 for rank 1, for 2.0 s
  rank 1: runs 1F1, for 2.1 s
rank 0 waits at 0B1 for rank 1, which runs 1F1 and does not come back.
If that may take so long, give the pipeline a longer timeout= than 2 s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeloom.errors import PipelineStalled

__all__ = ["RankReport", "explain_stall"]


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """What one rank was doing when it was asked."""

    rank: int
    #: What it is in, such as "step 3"; ``None`` between steps.
    step: str | None = None
    last_step: str | None = None
    #: The current action as text, or words such as "the end of the step".
    action: str = ""
    stage: int | None = None
    microbatch: int | None = None
    #: Ranks that it waits for; empty while it computes.
    waits_for: tuple[int, ...] = ()
    #: Seconds since it last went from one action to the next.
    still_for: float = 0.0
    #: False if it was asked and did not even answer.
    answered: bool = True

    @property
    def condition(self) -> str:
        """In words, without the time."""
        if not self.answered:
            return "does not answer (its process is stopped, or its host is out of reach)"
        if self.step is None:
            if self.last_step is None:
                return "has not begun a step"
            return f"is not in a step; its last was {self.last_step}"
        if self.waits_for:
            return f"waits at {self.action} for {_name_ranks(self.waits_for)}"
        return f"runs {self.action}"


def explain_stall(
    reports: Sequence[RankReport], *, timeout: float, step: str | None
) -> PipelineStalled:
    """The error that says what every rank was doing and why nothing could move."""
    by_rank = {report.rank: report for report in reports}
    path, closes = follow_waits(by_rank)
    last = by_rank[path[-1]]
    lines = [f"nothing moved for {timeout:g} s in {step}"]
    for report in sorted(reports, key=lambda report: report.rank):
        seconds = f", for {report.still_for:.1f} s" if report.answered else ""
        lines.append(f"  rank {report.rank}: {report.condition}{seconds}")
    lines.append(_tell_path([by_rank[rank] for rank in path], closes=closes))
    if closes:
        lines.append("The ranks wait for each other in a circle: no rank is to blame alone.")
    elif last.answered and last.step is not None:
        lines.append(
            f"If that may take so long, give the pipeline a longer timeout= than {timeout:g} s."
        )
    elif last.answered:
        lines.append("All ranks must call step() and eval() equally often, in the same order.")
    return PipelineStalled(
        "\n".join(lines),
        rank=last.rank,
        stage=last.stage,
        microbatch=last.microbatch,
        action=last.action or None,
    )


def follow_waits(by_rank: Mapping[int, RankReport]) -> tuple[list[int], bool]:
    """From rank to rank that it waits for, up to one that waits for nobody (False), or round a
    circle (True; the path is the circle then). Of all beginnings, the longest path.

    >>> first = RankReport(rank=0, step="step 1", waits_for=(1,))
    >>> follow_waits({0: first, 1: RankReport(rank=1, step="step 1", waits_for=(0,))})
    ([0, 1], True)
    """
    longest: list[int] = []
    for start in sorted(by_rank):
        path = [start]
        while waits_for := by_rank[path[-1]].waits_for:
            following = waits_for[0]
            if following in path:
                return path[path.index(following) :], True
            if following not in by_rank:
                break
            path.append(following)
        if len(path) > len(longest):
            longest = path
    return longest, False


def _tell_path(path: Sequence[RankReport], *, closes: bool) -> str:
    first, *others = path
    text = f"rank {first.rank} {first.condition}"
    for report in others:
        text += f", which {report.condition}"
    if closes:
        return f"{text}, which is where the circle closes."
    if path[-1].answered and path[-1].step is not None:
        text += " and does not come back"
    return f"{text}."


def _name_ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks))}"
