"""Chrome traces: what a viewer needs to show them right."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import pipeloom
from pipeloom.view.perfetto import make_trace
from support.hand_made_timelines import make_small_timeline

COSTS = pipeloom.UniformCosts(forward=1, input=1, weight=1, latency=0.1)


def events(trace: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


def test_spans_are_events_in_microseconds() -> None:
    trace = make_trace(make_small_timeline(scale=0.001, time_unit="s"))
    boxes = {e["name"]: e for e in events(trace, "X") if e["cat"] == "compute"}
    assert len(boxes) == 8
    last = boxes["0B1"]
    assert (last["ts"], last["dur"]) == (pytest.approx(7000), pytest.approx(2000))
    assert last["args"] == {"stage": 0, "microbatch": 1, "critical": True, "slack": 0.0}
    assert boxes["0F1"]["args"]["critical"] is False


@pytest.mark.parametrize(
    ("unit", "microseconds"), [("", 9000), ("s", 9e6), ("ms", 9000), ("us", 9), ("µs", 9)]
)
def test_every_unit_of_time(unit: str, microseconds: float) -> None:
    trace = make_trace(make_small_timeline(time_unit=unit))
    ends = [event["ts"] + event["dur"] for event in events(trace, "X")]
    assert max(ends) == pytest.approx(microseconds)


def test_ranks_and_lanes_have_names() -> None:
    schedule = pipeloom.lower(pipeloom.build_schedule("1f1b", ranks=3, microbatches=4))
    trace = make_trace(pipeloom.simulate(schedule, costs=COSTS))
    names = {
        (e["pid"], e["args"]["name"]) for e in events(trace, "M") if e["name"] == "process_name"
    }
    assert names == {(1, "1f1b · rank 0"), (2, "1f1b · rank 1"), (3, "1f1b · rank 2")}
    threads = {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in events(trace, "M")
        if e["name"] == "thread_name"
    }
    for event in events(trace, "X"):
        name = threads[event["pid"], event["tid"]]
        assert name.split()[0] == event["cat"]


@pytest.mark.parametrize("name", ["1f1b", "zbv", "dualpipev"])
def test_events_of_a_thread_never_overlap(name: str) -> None:
    schedule = pipeloom.lower(pipeloom.build_schedule(name, ranks=4, microbatches=8))
    trace = make_trace(pipeloom.simulate(schedule, costs=COSTS))
    threads = defaultdict(list)
    for event in events(trace, "X"):
        threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for intervals in threads.values():
        intervals.sort()
        for (_, end), (start, _) in pairwise(intervals):
            assert start >= end - 1e-3


def test_arrows_lead_from_a_send_to_its_receive() -> None:
    schedule = pipeloom.lower(pipeloom.build_schedule("1f1b", ranks=3, microbatches=4))
    trace = make_trace(pipeloom.simulate(schedule, costs=COSTS))
    tied = [event for event in events(trace, "X") if "bind_id" in event]
    sent = {event["bind_id"]: event["name"] for event in tied if event.get("flow_out")}
    received = {event["bind_id"]: event["name"] for event in tied if event.get("flow_in")}
    assert len(sent) == len(received) == 16
    for number, name in sent.items():
        assert name.replace("SEND", "RECV")[1:] == received[number][1:]
    assert not events(trace, "s")


def test_without_messages_arrows_lead_from_computation_to_computation() -> None:
    trace = make_trace(make_small_timeline())
    starts = {event["id"]: event for event in events(trace, "s")}
    ends = {event["id"]: event for event in events(trace, "f")}
    tied = {e["name"]: e["bind_id"] for e in events(trace, "X") if "bind_id" in e}

    def box_under(arrow: dict[str, Any]) -> str:
        (found,) = (
            event["name"]
            for event in events(trace, "X")
            if (event["pid"], event["tid"]) == (arrow["pid"], arrow["tid"])
            and event["ts"] < arrow["ts"] < event["ts"] + event["dur"]
        )
        return str(found)

    assert starts.keys() == ends.keys()
    arrows = {(box_under(starts[n]), box_under(ends[n])) for n in starts}
    arrows |= {(a, b) for a in tied for b in tied if tied[a] == tied[b] and a < b}
    assert arrows == {("0F0", "1F0"), ("0F1", "1F1"), ("0B0", "1B0"), ("0B1", "1B1")}
    assert all(end["bp"] == "e" for end in ends.values())


def test_memory_is_a_counter_per_rank() -> None:
    trace = make_trace(make_small_timeline())
    counters = [(e["pid"], e["ts"], e["args"]) for e in events(trace, "C")]
    assert counters[:4] == [
        (1, 0, {"activation": 1}),
        (1, 1000, {"activation": 2}),
        (1, 6000, {"activation": 1}),
        (1, 9000, {"activation": 0}),
    ]
    assert {pid for pid, _, _ in counters} == {1, 2}


def test_idle_time_has_its_cause() -> None:
    trace = make_trace(make_small_timeline())
    idle = {e["name"]: e["args"] for e in events(trace, "X") if e["cat"] == "idle"}
    assert set(idle) == {"warm-up: 0F0", "waiting: 1B0", "waiting: 1B1", "drain"}
    assert idle["waiting: 1B0"] == {
        "cause": "waiting", "waits for": "1B0", "of rank": 1, "before": "0B0",
    }  # fmt: skip


def test_several_timelines_are_several_groups_of_processes(tmp_path: Path) -> None:
    pair = [make_small_timeline(), make_small_timeline(source="measured")]
    trace = make_trace(pair)
    assert {event["pid"] for event in trace["traceEvents"]} == {1, 2, 3, 4}
    numbers = [event["bind_id"] for event in events(trace, "X") if event.get("flow_out")]
    assert "0x0" not in numbers, "which some readers take for none"
    assert len(set(numbers)) == len(numbers) == 8
    path = make_small_timeline().save(tmp_path / "x.trace.json")
    assert json.loads(path.read_text()) == make_trace(make_small_timeline())
