"""torch's own unit-time alignment, where it is right.

Its visualizer places every action on a grid of unit times: a forward and a split backward take
one, a full backward two. It is wrong from the moment a rank has nothing left to do (the rows behind
it move up), so only what starts before that is compared.
"""

from __future__ import annotations

import contextlib
import io

import pytest

from pipeloom import UniformCosts, build_schedule, simulate

visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")
schedules = pytest.importorskip("torch.distributed.pipelining.schedules")

SHAPES = [(2, 4), (2, 6), (3, 6), (4, 8), (4, 12), (8, 16)]
NAMES = [
    *("gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble"),
    *("zb_h1", "zb_h2", "zbv", "grouped_interleaved"),
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("ranks", "microbatches"), SHAPES)
def test_same_times_until_a_rank_is_done(name: str, ranks: int, microbatches: int) -> None:
    schedule = build_schedule(name, ranks=ranks, microbatches=microbatches)
    rows = [[schedules._Action.from_str(str(action)) for action in row] for row in schedule.actions]
    with contextlib.redirect_stdout(io.StringIO()):
        spaced = visualizer.add_schedule_op_spacing(rows)
    theirs: list[dict[str, int]] = []
    ends = []
    for row in spaced:
        now, starts, end = 0, {}, 0
        for action in row:
            if action is None:
                now += 1
                continue
            starts[str(action)] = now
            now += visualizer.action_type_to_color_mapping[action.computation_type].width
            end = now
        theirs.append(starts)
        ends.append(end)
    per_rank = schedule.num_stages / ranks  # one unit per stage
    timeline = simulate(schedule, UniformCosts(per_rank, per_rank, per_rank))
    first_done = min(
        max(span.end for span in timeline.spans_of(rank, "compute")) for rank in range(ranks)
    )
    compared = 0
    for span in timeline.spans:
        if span.end < first_done:
            assert theirs[span.rank][str(span.action)] == span.start, span
            compared += 1
    assert compared > len(timeline.spans) / 2
