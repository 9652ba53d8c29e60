"""What the engine does at the edges: messages, speeds, broken programs, nothing to do."""

from __future__ import annotations

import math

import pytest

from pipeloom import (
    CostFileError,
    Link,
    Network,
    ScheduleError,
    StageCosts,
    UniformCosts,
    VerificationError,
    build_schedule,
    lower,
    simulate,
)
from pipeloom.ir.notation import parse_grid
from pipeloom.simulate import find_makespan

UNIT = UniformCosts(1, 1, 1)

TWO_RANKS = """
0F0 0B0
1F0 1B0
"""


def times(timeline, rank: int, lane: str = "compute") -> dict[str, tuple[float, float]]:
    return {str(s.action): (s.start, s.end) for s in timeline.spans_of(rank, lane)}


def test_latency_lies_between_ranks_and_not_within() -> None:
    timeline = simulate(parse_grid("0F0 1F0 2F0 2B0 1B0 0B0"), UniformCosts(3, 3, 3, latency=5))
    assert timeline.makespan == 9
    timeline = simulate(parse_grid(TWO_RANKS), UniformCosts(1, 1, 1, latency=5))
    assert times(timeline, 0) == {"0F0": (0, 1), "0B0": (14, 16)}
    assert times(timeline, 1) == {"1F0": (6, 7), "1B0": (7, 9)}


def test_bandwidth_occupies_an_edge_and_latency_does_not() -> None:
    schedule = parse_grid("0F0 0F1 0F2\n1F0 1F1 1F2")
    costs = UniformCosts(1, 1, 1, latency=10, boundary=6, bandwidth=2)  # 3 on the wire
    timeline = simulate(schedule, costs)
    # Messages leave at 1, 4 and 7, each 3 long, and arrive 10 after their last byte.
    assert [span.start for span in timeline.spans_of(1, "compute")] == [14, 17, 20]


def test_links_of_nodes_and_of_edges() -> None:
    schedule = parse_grid("0F0\n1F0\n2F0\n3F0")
    network = Network(
        ranks_per_node=2,
        within_node=Link(latency=1),
        between_nodes=Link(latency=10),
        edges={(2, 3): Link(latency=100)},
    )
    timeline = simulate(schedule, UniformCosts(1, 1, 1, network=network))
    assert [timeline.spans_of(rank)[0].start for rank in range(4)] == [0, 2, 13, 114]


def test_written_messages_take_the_same_time_as_unwritten_ones() -> None:
    for name in ("gpipe", "1f1b", "interleaved_1f1b", "zbv", "dualpipev", "chimera"):
        schedule = build_schedule(name, ranks=4, microbatches=8)
        costs = UniformCosts(1, 1.2, 0.7, latency=0.3)
        assert simulate(lower(schedule), costs).makespan == pytest.approx(
            simulate(schedule, costs).makespan
        )


def test_stricter_sends_never_make_a_program_faster() -> None:
    program = lower(build_schedule("interleaved_1f1b", ranks=4, microbatches=8))
    costs = UniformCosts(1, 1, 1, latency=0.2, boundary=1, bandwidth=10)
    lengths = [
        simulate(program, costs, sends=sends, channel=channel).makespan
        for sends, channel in (
            *(("buffered", "edge"), ("rendezvous", "edge"), ("rendezvous", "pair")),
            *(("rendezvous", "all"), ("blocking", "all")),
        )
    ]
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[-1]


def test_serialised_messages_hold_their_ranks() -> None:
    schedule = parse_grid("0F0 0F1\n1F0 1F1")
    costs = UniformCosts(1, 1, 1, latency=2)
    timeline = simulate(schedule, costs, communication="serialised")
    assert times(timeline, 0) == {"0F0": (0, 1), "0F1": (3, 4)}
    assert times(timeline, 0, "send") == {"0SEND_F0": (1, 3), "0SEND_F1": (4, 6)}
    assert [(i.rank, i.cause, i.start, i.end) for i in timeline.idle_causes] == [
        (0, "communication", 1, 3),
        (0, "drain", 4, 7),
        (1, "warm-up", 0, 3),
        (1, "communication", 4, 6),
    ]


def test_speeds() -> None:
    schedule = parse_grid(TWO_RANKS)
    assert simulate(schedule, UNIT, speeds=[1, 0.5]).makespan == 1 + 2 + 4 + 2
    assert simulate(schedule, UNIT, speeds={1: 2}).makespan == 1 + 0.5 + 1 + 2
    assert simulate(schedule, UniformCosts(1, 1, 1, speeds=[1, 0.5])).makespan == 9
    with pytest.raises(CostFileError, match="3 numbers, but the schedule has 2 ranks"):
        simulate(schedule, UNIT, speeds=[1, 1, 1])
    with pytest.raises(CostFileError, match="above 0"):
        simulate(schedule, UNIT, speeds={0: 0})
    with pytest.raises(CostFileError, match=r"ranks \[7\]"):
        simulate(schedule, UNIT, speeds={7: 1})


@pytest.mark.parametrize(("overlap", "length"), [("sum", 5), ("max", 3), (0.8, 4)])
def test_overlapped_pairs(overlap: object, length: float) -> None:
    schedule = parse_grid("0F0 (0F1;0B0)OVERLAP_F_B 0B1")
    costs = UniformCosts(2, 2, 1, overlap=overlap)
    timeline = simulate(schedule, costs)
    assert timeline.spans[1].duration == pytest.approx(length)


def test_gathering_overlaps_and_holds_back_what_needs_it() -> None:
    schedule = parse_grid("0UNSHARD 0F0 1UNSHARD 1F0 0RESHARD 1B0 1RESHARD 0UNSHARD 0B0 0RESHARD")
    timeline = simulate(schedule, StageCosts(1, 1, 1, unshard=3, reshard=1))
    assert times(timeline, 0) == {"0F0": (3, 4), "1F0": (7, 8), "1B0": (8, 10), "0B0": (14, 16)}
    assert {(i.cause, str(i.waits_for)) for i in timeline.idle_causes} == {
        ("warm-up", "0UNSHARD"),
        ("communication", "1UNSHARD"),
        ("communication", "0UNSHARD"),
        ("drain", "None"),
    }


def test_copies_reduce_together() -> None:
    program = lower(build_schedule("chimera", ranks=4, microbatches=4))
    timeline = simulate(program, UniformCosts(1, 1, 1, reduce_grad=2))
    starts: dict[frozenset[int], set[float]] = {}
    for span in timeline.spans:
        if span.action.kind.value == "REDUCE_GRAD":
            copies = frozenset(program.topology.copies_of(span.action.stage))
            starts.setdefault(copies, set()).add(span.start)
    assert len(starts) == 4
    assert all(len(times) == 1 for times in starts.values())


# ── what cannot be simulated ─────────────────────────────────────────────────────────────────────


def test_a_deadlock_raises_the_verifiers_report() -> None:
    schedule = parse_grid("0B0 0F0\n1F0 1B0")
    with pytest.raises(VerificationError) as caught:
        simulate(schedule, UNIT)
    assert caught.value.report.violations[0].code == "BACKWARD_BEFORE_FORWARD"


def test_a_circle_across_ranks_raises_the_verifiers_report() -> None:
    # Each rank waits for what the other does only later.
    schedule = parse_grid("0F0 0B0 0F1 0B1\n1F1 1B1 1F0 1B0")
    with pytest.raises(VerificationError) as caught:
        simulate(schedule, UNIT)
    assert "waits" in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "0F0 0F0 0B0",  # twice
        "0B0",  # no forward
        "0F0 0W0",  # no input gradient
        "0F0\n1B0",  # no forward of stage 1
        "0F0 0SEND_F0\n1F0",  # nobody receives
        "0F0\n1RECV_F0 1F0",  # nobody sends
        "0F0 0B7\n1F0 1B0",  # a backward of nothing
        "0F0 0REDUCE_GRAD 0B0",  # reduced before it is there
        "0SEND_F0 0F0 0RECV_B0 0B0\n1RECV_F0 1F0 1B0 1SEND_B0",  # sent before it is there
    ],
)
def test_broken_programs_raise_the_verifiers_report(text: str) -> None:
    with pytest.raises(VerificationError):
        simulate(parse_grid(text), UNIT)


def test_receives_in_another_order_than_sends() -> None:
    schedule = parse_grid(
        "0F0 0F1 0SEND_F0 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1\n"
        "1RECV_F1 1RECV_F0 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1"
    )
    with pytest.raises(VerificationError, match="CHANNEL_ORDER"):
        simulate(schedule, UNIT)


def test_unknown_models_are_named() -> None:
    schedule = parse_grid(TWO_RANKS)
    with pytest.raises(ScheduleError, match="sends must be one of buffered, rendezvous, blocking"):
        simulate(schedule, UNIT, sends="magic")  # type: ignore[arg-type]
    with pytest.raises(ScheduleError, match="channel must be one of"):
        simulate(schedule, UNIT, channel="wire")  # type: ignore[arg-type]
    with pytest.raises(ScheduleError, match="communication must be one of"):
        simulate(schedule, UNIT, communication="none")  # type: ignore[arg-type]


# ── hardly anything to simulate ──────────────────────────────────────────────────────────────────


def test_one_rank_and_one_microbatch() -> None:
    timeline = simulate(parse_grid("0F0 0B0"), UNIT)
    assert (timeline.makespan, timeline.span, timeline.bubble, timeline.idle_fraction) == (
        *(3, 3, 0, 0),
    )
    assert timeline.idle_causes == ()
    assert timeline.figures is not None
    assert timeline.figures.distance_to_bound == 0


def test_nothing_takes_time() -> None:
    timeline = simulate(parse_grid(TWO_RANKS), UniformCosts(0, 0, 0))
    assert (timeline.makespan, timeline.span, timeline.bubble, timeline.idle_fraction) == (
        *(0, 0, 0, 0),
    )
    assert timeline.idle_causes == ()
    assert timeline.figures is not None
    assert timeline.figures.distance_to_bound is None


def test_a_rank_without_actions() -> None:
    schedule = parse_grid("0F0 0B0")
    schedule = schedule.__class__(
        placement=schedule.placement.__class__((0,), 2),
        topology=schedule.topology,
        num_microbatches=1,
        actions=(*schedule.actions, ()),
    )
    timeline = simulate(schedule, StageCosts(1, 1, 1))
    assert timeline.makespan == 3
    assert [(i.rank, i.cause, i.start, i.end) for i in timeline.idle_causes] == [(1, "drain", 0, 3)]
    assert timeline.idle_fraction == 0.5


def test_no_actions_at_all() -> None:
    schedule = parse_grid("0F0 0B0").with_actions([[]])
    timeline = simulate(schedule, UNIT)
    assert timeline.makespan == 0
    assert timeline.critical_path == ()


def test_huge_latency() -> None:
    timeline = simulate(parse_grid(TWO_RANKS), UniformCosts(1, 1, 1, latency=1e12))
    assert timeline.makespan == 2e12 + 6
    assert math.isclose(timeline.idle_fraction, 1)


def test_the_makespan_alone_is_the_same() -> None:
    costs = UniformCosts(1, 1.5, 0.5, latency=0.1)
    for name in ("1f1b", "zbv", "dualpipe"):
        schedule = build_schedule(name, ranks=4, microbatches=8)
        assert find_makespan(schedule, costs) == simulate(schedule, costs).makespan
        assert find_makespan(lower(schedule), costs) == simulate(lower(schedule), costs).makespan
