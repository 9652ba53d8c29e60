"""A timeline whose every figure was worked out on paper.

::

    rank 0   |0F0|0F1|. . . .|0B0    |. .|0B1    |      waits 2..4 for 1B0, 6..7 for 1B1
    rank 1   |. .|1F0|1B0    |1F1|1B1    |_______|      warms up 0..1, drains 7..9
             0   1   2   3   4   5   6   7   8   9
"""

from __future__ import annotations

from pipeloom.ir.action import Action, Kind
from pipeloom.ir.schedule import make_schedule
from pipeloom.ir.timeline import Figures, IdleSpan, MemoryCurve, PeakMemory, Span, Timeline

F, B = Kind.F, Kind.B

_SPANS = (
    (0, 0.0, 1.0, Action(F, 0, 0)),
    (0, 1.0, 2.0, Action(F, 0, 1)),
    (1, 1.0, 2.0, Action(F, 1, 0)),
    (1, 2.0, 4.0, Action(B, 1, 0)),
    (0, 4.0, 6.0, Action(B, 0, 0)),
    (1, 4.0, 5.0, Action(F, 1, 1)),
    (1, 5.0, 7.0, Action(B, 1, 1)),
    (0, 7.0, 9.0, Action(B, 0, 1)),
)


def make_small_timeline(
    *, name: str = "small", source: str = "simulated", scale: float = 1.0, time_unit: str = ""
) -> Timeline:
    """The timeline above, with all times multiplied by ``scale``."""
    schedule = make_schedule(
        [[span[3] for span in _SPANS if span[0] == rank] for rank in (0, 1)], name=name
    )
    spans = tuple(Span(r, "compute", s * scale, e * scale, a) for r, s, e, a in _SPANS)
    by_name = {str(span.action): span for span in spans}
    idle = (
        IdleSpan(1, 0.0, 1.0 * scale, "warm-up", Action(F, 0, 0), 0, Action(F, 1, 0)),
        IdleSpan(0, 2.0 * scale, 4.0 * scale, "waiting", Action(B, 1, 0), 1, Action(B, 0, 0)),
        IdleSpan(0, 6.0 * scale, 7.0 * scale, "waiting", Action(B, 1, 1), 1, Action(B, 0, 1)),
        IdleSpan(1, 7.0 * scale, 9.0 * scale, "drain"),
    )

    def curve(rank: int, steps: dict[float, float]) -> MemoryCurve:
        totals = tuple(steps.values())
        return MemoryCurve(
            rank, tuple(time * scale for time in steps), totals, {"activation": totals}
        )

    figures = Figures(
        makespan=9.0 * scale,
        span=9.0 * scale,
        bubble=1 - 6 / 9,
        bubble_makespan=1 - 6 / 9,
        idle_fraction=6 / 18,
        work=(6.0 * scale, 6.0 * scale),
        bubble_of_rank=(1 / 3, 1 / 3),
        idle_causes=idle,
        peaks=(
            PeakMemory(
                0, 2.0, 1.0 * scale, Action(F, 0, 1), {"activation": 2.0},
                (("activation 0F0", 1.0), ("activation 0F1", 1.0)),
            ),
            PeakMemory(
                1, 1.0, 1.0 * scale, Action(F, 1, 0), {"activation": 1.0},
                (("activation 1F0", 1.0),),
            ),
        ),
        critical_path=tuple(by_name[n] for n in ("0F0", "1F0", "1B0", "1F1", "1B1", "0B1")),
        slack=(0.0, 2.0 * scale, 0.0, 0.0, 1.0 * scale, 0.0, 0.0, 0.0),
        bounds={"compute": 6.0 * scale},
    )  # fmt: skip
    return Timeline(
        schedule,
        spans,
        source=source,
        time_unit=time_unit,
        memory=(
            curve(0, {0.0: 1.0, 1.0: 2.0, 6.0: 1.0, 9.0: 0.0}),
            curve(1, {0.0: 0.0, 1.0: 1.0, 4.0: 1.0, 7.0: 0.0}),
        ),
        figures=figures,
    )
