"""Who waits for whom, against rules written down a second time, by name."""

from __future__ import annotations

import re
from collections import defaultdict

import pytest

import pipeloom
from pipeloom.view.links import find_lifetimes, find_links, find_messages
from support.hand_made_timelines import make_small_timeline

COSTS = pipeloom.UniformCosts(forward=1, input=1, weight=1, latency=0.2)


def sources_of(timeline: pipeloom.Timeline) -> dict[str, set[str]]:
    links = find_links(timeline)
    spans = timeline.spans
    return {
        str(span.action): {str(spans[source].action) for source in links.of(index)}
        for index, span in enumerate(spans)
    }


def test_a_small_pipeline() -> None:
    assert sources_of(make_small_timeline()) == {
        "0F0": set(),
        "0F1": set(),
        "1F0": {"0F0"},
        "1F1": {"0F1"},
        "1B0": {"1F0"},
        "1B1": {"1F1"},
        "0B0": {"0F0", "1B0"},
        "0B1": {"0F1", "1B1"},
    }


def expected_sources(action: str, last_stage: int, rank_of: dict[int, int]) -> set[str]:
    """What an action of a lowered chain with split backwards waits for, in words."""
    match = re.fullmatch(r"(\d+)(SEND_F|RECV_F|SEND_B|RECV_B|F|I|W|B)(\d+)", action)
    assert match, action
    stage, kind, m = int(match[1]), match[2], match[3]
    # The kind of the backward that gives the gradient differs from schedule to schedule.
    up, down = stage - 1, stage + 1
    if kind == "F":
        if up < 0:
            return set()
        return {f"{stage}RECV_F{m}" if rank_of[up] != rank_of[stage] else f"{up}F{m}"}
    if kind in "IB":
        found = {f"{stage}F{m}"}
        if stage < last_stage:
            local = rank_of[down] == rank_of[stage]
            found.add(f"{down}I{m}" if local else f"{stage}RECV_B{m}")
        return found
    if kind == "W":
        return {f"{stage}I{m}"}
    if kind == "SEND_F":
        return {f"{stage}F{m}"}
    if kind == "SEND_B":
        return {f"{stage}I{m}"}
    return {f"{up}SEND_F{m}"} if kind == "RECV_F" else {f"{down}SEND_B{m}"}


def test_a_lowered_program_with_two_stages_on_a_rank() -> None:
    schedule = pipeloom.lower(pipeloom.build_schedule("zbv", ranks=3, microbatches=6))
    timeline = pipeloom.simulate(schedule, costs=COSTS)
    rank_of = dict(enumerate(schedule.placement.ranks))
    found = sources_of(timeline)
    assert len(found) == len(timeline.spans)
    for action, sources in found.items():
        assert sources == expected_sources(action, schedule.num_stages - 1, rank_of), action


def test_messages_go_from_a_send_to_its_receive() -> None:
    schedule = pipeloom.lower(pipeloom.build_schedule("1f1b", ranks=3, microbatches=4))
    timeline = pipeloom.simulate(schedule, costs=COSTS)
    pairs = list(find_messages(timeline, find_links(timeline)))
    assert len(pairs) == 2 * 2 * 4
    for source, target in pairs:
        sent, received = (str(timeline.spans[i].action) for i in (source, target))
        assert sent.replace("SEND", "RECV")[1:] == received[1:]


def test_a_fused_action_does_not_wait_for_itself() -> None:
    schedule = pipeloom.build_schedule("dualpipev", ranks=2, microbatches=6)
    links = find_links(pipeloom.simulate(schedule, costs=COSTS))
    assert all(source != span for source, span in links.pairs())


def test_a_computation_waits_for_its_parameters() -> None:
    text = "0UNSHARD,0F0,0B0,0RESHARD,0REDUCE_GRAD"
    schedule = pipeloom.make_schedule([[pipeloom.parse_action(a) for a in text.split(",")]])
    found = sources_of(pipeloom.simulate(schedule, costs=COSTS))
    assert found["0F0"] == {"0UNSHARD"}
    assert found["0B0"] == {"0F0", "0UNSHARD"}
    assert found["0REDUCE_GRAD"] == {"0B0"}


def test_lifetimes_of_a_small_pipeline() -> None:
    found = {
        f"{life.product[0]} {life.product[1]} {life.product[2]}": (life.rank, life.start, life.end)
        for life in find_lifetimes(make_small_timeline())
    }
    assert found == {
        "activation 0 0": (0, 0, 6),
        "activation 0 1": (0, 1, 9),
        "activation 1 0": (1, 1, 4),
        "activation 1 1": (1, 4, 7),
    }


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "zbv", "interleaved_1f1b", "dualpipev"])
@pytest.mark.parametrize("lowered", [False, True])
def test_lifetimes_add_up_to_the_memory_curve(name: str, lowered: bool) -> None:
    schedule = pipeloom.build_schedule(name, ranks=4, microbatches=8)
    chunks = schedule.num_stages // schedule.num_ranks
    if lowered:
        schedule = pipeloom.lower(schedule)
    timeline = pipeloom.simulate(schedule, costs=COSTS)
    alive = defaultdict(list)
    for life in find_lifetimes(timeline):
        if life.product[0] in ("activation", "retained"):
            alive[life.rank].append((life.start, life.end))
    for curve in timeline.memory:
        for index, (time, total) in enumerate(zip(curve.times, curve.totals, strict=True)):
            until = curve.times[index + 1] if index + 1 < len(curve.times) else time
            if until - time < 1e-9:
                continue
            middle = (time + until) / 2
            count = sum(start <= middle < end for start, end in alive[curve.rank])
            assert count / chunks == pytest.approx(total), (curve.rank, middle)
