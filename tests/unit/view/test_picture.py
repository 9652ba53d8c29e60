"""The model that all pictures share."""

from __future__ import annotations

from dataclasses import replace

import pytest

import pipeloom
from pipeloom.ir.action import Action, Kind
from pipeloom.ir.timeline import Span
from pipeloom.view.picture import make_picture, make_pictures, without_details
from support.hand_made_timelines import make_small_timeline

COSTS = pipeloom.UniformCosts(forward=1, input=1, weight=1, latency=0.2)


def test_boxes_stand_in_the_row_of_their_rank_and_lane() -> None:
    picture = make_picture(make_small_timeline())
    assert [(row.rank, row.lane, row.num_tracks) for row in picture.rows] == [
        (0, "compute", 1),
        (1, "compute", 1),
    ]
    seen = [(box.row, box.start, box.end, str(box.action)) for box in picture.boxes]
    assert seen[:4] == [(0, 0, 1, "0F0"), (0, 1, 2, "0F1"), (1, 1, 2, "1F0"), (1, 2, 4, "1B0")]
    assert [str(box.action) for box in picture.boxes_of_row[0]] == ["0F0", "0F1", "0B0", "0B1"]
    assert picture.end == 9


def test_causes_are_ranked_and_add_up() -> None:
    picture = make_picture(make_small_timeline())
    ranked = picture.rank_causes()
    assert [(c.cause, c.waits_for, c.time, c.num_spans) for c in ranked] == [
        ("drain", "", 2.0, 1),
        ("waiting", "1B0 of rank 1", 2.0, 1),
        ("waiting", "1B1 of rank 1", 1.0, 1),
        ("warm-up", "0F0 of rank 0", 1.0, 1),
    ]
    assert sum(cause.share for cause in ranked) == pytest.approx(1)
    totals = picture.total_causes()
    assert [(total.cause, total.time) for total in totals] == [
        ("waiting", 3.0),
        ("drain", 2.0),
        ("warm-up", 1.0),
    ]


def test_the_critical_path_is_marked() -> None:
    picture = make_picture(make_small_timeline())
    marked = [str(picture.boxes[index].action) for index in sorted(picture.critical_spans)]
    assert marked == ["0F0", "1F0", "1B0", "1F1", "1B1", "0B1"]


def test_the_legend_names_what_occurs_and_nothing_else() -> None:
    legend = [style.name for style in make_picture(make_small_timeline()).legend]
    assert legend == ["F", "B", "warm-up", "waiting", "drain"]
    fused = pipeloom.simulate(pipeloom.build_schedule("dualpipev", ranks=2, microbatches=4))
    assert {"F", "I", "W", "B"} <= {style.name for style in make_picture(fused).legend}


def test_facts_have_units() -> None:
    facts = dict(make_picture(make_small_timeline(scale=0.001, time_unit="s")).facts)
    assert facts == {
        "makespan": "9 ms",
        "bubble": "33.3 %",
        "idle": "33.3 %",
        "peak memory": "2",
    }


def test_boxes_that_overlap_stand_on_tracks() -> None:
    timeline = make_small_timeline()
    extra = [
        Span(0, "send", 1.0, 3.0, Action(Kind.SEND_F, 0, 0)),
        Span(0, "send", 2.0, 4.0, Action(Kind.SEND_F, 0, 1)),
        Span(0, "send", 3.0, 5.0, Action(Kind.SEND_F, 0, 2)),
    ]
    spans = sorted([*timeline.spans, *extra], key=lambda span: (span.start, span.rank))
    picture = make_picture(replace(timeline, spans=tuple(spans)))
    send = next(index for index, row in enumerate(picture.rows) if row.lane == "send")
    assert picture.rows[send].num_tracks == 2
    assert [box.track for box in picture.boxes_of_row[send]] == [0, 1, 0]


@pytest.mark.parametrize("name", ["1f1b", "zbv", "dualpipev", "interleaved_1f1b"])
def test_no_two_boxes_of_a_track_cover_each_other(name: str) -> None:
    schedule = pipeloom.lower(pipeloom.build_schedule(name, ranks=4, microbatches=8))
    picture = make_picture(pipeloom.simulate(schedule, costs=COSTS))
    busy_until: dict[tuple[int, int], float] = {}
    for box in picture.boxes:
        assert box.start >= busy_until.get((box.row, box.track), 0.0) - 1e-6
        busy_until[box.row, box.track] = box.end


def test_work_and_idle_time_fill_every_rank() -> None:
    schedule = pipeloom.build_schedule("zbv", ranks=4, microbatches=8)
    picture = make_picture(pipeloom.simulate(schedule, costs=COSTS))
    for rank, row in enumerate(picture.rows):
        assert row.rank == rank
        work = sum(box.end - box.start for box in picture.boxes_of_row[rank])
        idle = sum(idle.end - idle.start for idle in picture.idle_of_rank[rank])
        assert work + idle == pytest.approx(picture.end)


def test_a_timeline_without_figures_is_analysed() -> None:
    timeline = replace(make_small_timeline(), figures=None)
    assert make_picture(timeline).figures.makespan == 9


def test_titles_tell_timelines_apart() -> None:
    small = make_small_timeline()
    measured = make_small_timeline(source="measured")
    other = make_small_timeline(name="other")
    titles = [picture.title for picture in make_pictures([small, measured, other])]
    assert titles == ["small (simulated)", "small (measured)", "other"]
    titles = [picture.title for picture in make_pictures([small, small])]
    assert len(set(titles)) == 2


def test_a_picture_of_computation_alone() -> None:
    schedule = pipeloom.lower(pipeloom.build_schedule("1f1b", ranks=3, microbatches=4))
    picture = make_picture(pipeloom.simulate(schedule, costs=COSTS))
    bare = without_details(picture)
    assert {row.lane for row in bare.rows} == {"compute"}
    assert len(bare.boxes) == 3 * 4 * 2
    for box in bare.boxes:
        assert bare.rows[box.row].rank == picture.timeline.spans[box.span].rank


def test_an_empty_timeline_is_a_picture() -> None:
    empty = pipeloom.make_schedule([[], []])
    picture = make_picture(pipeloom.Timeline(empty, ()))
    assert picture.boxes == ()
    assert picture.end == 0
