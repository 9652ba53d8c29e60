"""Measured spans get the same figures as simulated ones."""

from __future__ import annotations

import pytest

from pipeloom import UniformCosts, VerificationError, analyse, build_schedule, lower, simulate
from pipeloom.ir.notation import parse_action, parse_grid
from pipeloom.ir.timeline import Span, Timeline


def measured(rows: list[tuple[int, str, float, float]], lane: str = "compute") -> list[Span]:
    return [Span(rank, lane, start, end, parse_action(text)) for rank, text, start, end in rows]


@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "zbv", "dualpipev", "dualpipe"])
@pytest.mark.parametrize("lowered", [False, True])
def test_a_simulated_run_analysed_as_a_measured_one_has_the_same_figures(
    name: str, lowered: bool
) -> None:
    schedule = build_schedule(name, ranks=4, microbatches=8)
    schedule = lower(schedule) if lowered else schedule
    simulated = simulate(schedule, UniformCosts(1, 2, 1))
    again = analyse(schedule, simulated.spans, costs=UniformCosts(1, 2, 1))
    assert again.figures == simulated.figures
    assert again.memory == simulated.memory
    assert (again.source, again.clock) == ("measured", "measured")


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_memory_of_a_measured_run_is_that_of_its_costs(name: str) -> None:
    costs = UniformCosts(1, 2, 1, latency=0.5, activation=3, retained=0.5, boundary=0.25, weights=2)
    simulated = simulate(lower(build_schedule(name, ranks=4, microbatches=8)), costs)
    again = analyse(simulated.schedule, simulated.spans, costs=costs)
    assert again.peak_memory == simulated.peak_memory
    assert again.memory == simulated.memory


def test_pauses_of_a_measured_run() -> None:
    schedule = parse_grid("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1")
    spans = measured(
        [
            *((0, "0F0", 0, 1), (0, "0F1", 1.5, 2.5), (0, "0B0", 6, 8), (0, "0B1", 9, 11)),
            *((1, "1F0", 2, 3), (1, "1B0", 3, 5), (1, "1F1", 5, 6), (1, "1B1", 6, 8)),
        ]
    )
    timeline = analyse(schedule, spans)
    assert timeline.makespan == 11
    told = [(i.rank, i.cause, i.start, i.end, str(i.waits_for)) for i in timeline.idle_causes]
    assert told == [
        (0, "overhead", 1, 1.5, "None"),  # nothing was awaited: the host was busy elsewhere
        (0, "waiting", 2.5, 5, "1B0"),
        (0, "communication", 5, 6, "1B0"),
        (0, "overhead", 8, 9, "None"),
        (1, "warm-up", 0, 2, "0F0"),
        (1, "drain", 8, 11, "None"),
    ]
    assert [str(span.action) for span in timeline.critical_path][-1] == "0B1"
    assert timeline.figures.bounds == {}
    assert timeline.figures.distance_to_bound is None


def test_spans_that_are_missing_are_left_out() -> None:
    schedule = parse_grid("0F0 0B0\n1F0 1B0")
    spans = measured([(0, "0F0", 0, 1), (1, "1F0", 1, 2), (0, "0B0", 4, 6)])
    timeline = analyse(schedule, spans)
    assert timeline.makespan == 6
    assert [str(span.action) for span in timeline.critical_path] == ["0F0", "1F0", "0B0"]


def test_a_broken_schedule_cannot_be_analysed() -> None:
    with pytest.raises(VerificationError):
        analyse(parse_grid("0B0 0F0"), [])


def test_figures_of_what_was_not_analysed() -> None:
    timeline = Timeline(parse_grid("0F0 0B0"), ())
    with pytest.raises(ValueError, match=r"pipeloom\.analyse"):
        timeline.makespan  # noqa: B018
    assert analyse(timeline).makespan == 0
