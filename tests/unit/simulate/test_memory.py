"""Peaks, curves, and who is alive."""

from __future__ import annotations

import pytest

from pipeloom import (
    CostFileError,
    StageCosts,
    UniformCosts,
    build_schedule,
    lower,
    simulate,
    verify,
)
from pipeloom.ir.notation import parse_grid
from pipeloom.ir.occupancy import walk_occupancy

BYTES = UniformCosts(
    *(1, 1, 1),
    activation=10,
    retained=0.5,
    boundary=2,
    weights=100,
    gradients=50,
    optimizer=200,
    memory_unit="MiB",
)


def test_a_curve_by_hand() -> None:
    timeline = simulate(parse_grid("0F0 0F1 0I0 0W0 0B1"), UniformCosts(1, 1, 1, retained=0.5))
    (curve,) = timeline.memory
    assert dict(zip(curve.times, curve.totals, strict=True)) == {0: 1, 1: 2, 3: 1.5, 4: 1, 6: 0}
    assert curve.categories["activation"] == (1, 2, 1, 1, 0)
    assert curve.categories["retained"] == (0, 0, 0.5, 0, 0)
    (peak,) = timeline.figures.peaks
    assert (peak.total, peak.time, str(peak.action)) == (2, 1, "0F1")
    assert peak.alive == (("activation 0F0", 1), ("activation 0F1", 1))


def test_what_stays_does_not_count_twice() -> None:
    timeline = simulate(parse_grid("0F0 0I0 0W0"), UniformCosts(1, 1, 1, retained=1))
    assert timeline.peak_memory == (1,)


SHARDED = "0UNSHARD 0F0 0RESHARD 1UNSHARD 1F0 1B0 1RESHARD 0UNSHARD 0B0 0RESHARD"
FULL_GATHER = "0UNSHARD 1UNSHARD 0F0 1F0 1B0 0B0 0RESHARD 1RESHARD 0REDUCE_GRAD 1REDUCE_GRAD"


def test_parameters_are_whole_between_gathering_and_release() -> None:
    costs = StageCosts(1, 1, 1, activation=0, weights=1, gathered=[8, 10], unshard=2, reshard=1)
    timeline = simulate(parse_grid(SHARDED), costs)
    (curve,) = timeline.memory
    # 0UNSHARD 0-2, 0F0 2-3, 0RESHARD 3-4, 1UNSHARD 4-6, 1F0 6-7, 1B0 7-9, 1RESHARD 9-10, …
    assert dict(zip(curve.times, curve.categories["gathered parameters"], strict=True)) == {
        **{0: 8, 4: 10, 10: 8, 15: 0}
    }
    (peak,) = timeline.figures.peaks
    assert (peak.total, peak.time, str(peak.action)) == (12, 4, "1UNSHARD")
    assert peak.alive == (("gathered parameters 1UNSHARD", 10), ("weights of rank 0", 2))


def test_what_is_gathered_beside_a_computation_counts_from_when_it_is() -> None:
    # 0F0 needs stage 0 only; stage 1 is gathered behind it, once the first gathering is over.
    costs = StageCosts(5, 1, 1, activation=[1, 0], weights=0, gathered=[2, 4], unshard=3)
    timeline = simulate(parse_grid(FULL_GATHER), costs)
    (curve,) = timeline.memory
    assert dict(zip(curve.times, curve.totals, strict=True)) == {0: 2, 3: 2 + 4 + 1, 17: 0}


def test_gathered_parameters_are_as_large_as_weights_unless_said() -> None:
    program = parse_grid(FULL_GATHER)
    for costs in (UniformCosts(1, 1, 1, weights=8), StageCosts(1, 1, 1, weights=4)):
        (peak,) = simulate(program, costs).figures.peaks
        assert peak.categories["weights"] == peak.categories["gathered parameters"] == 8
    whole = UniformCosts(1, 1, 1, weights=1, gathered=8, activation=0)
    report = verify(program, costs=whole, memory=8)
    assert report.codes == ("MEMORY_LIMIT",)
    assert "gathered parameters of stage 0 (4)" in str(report)
    assert verify(program, costs=whole, memory=9).ok


def test_static_parts_and_buffers() -> None:
    # rank 0   0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 …      two activations, a gradient on its way
    # rank 1   1RECV_F0 1F0 1RECV_F1 1B0 …               one activation, two inputs
    program = parse_grid(
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1\n"
        "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1"
    )
    first, last = simulate(program, BYTES).figures.peaks
    static = {"weights": 100, "gradients": 50, "optimizer": 200}
    assert first.categories == {**static, "activation": 20, "received gradient": 2}
    assert str(first.action) == "0RECV_B0"
    assert last.categories == {**static, "activation": 10, "received output": 4}
    assert str(last.action) == "1RECV_F1"
    assert last.total == sum(size for _, size in last.alive) == 364
    assert last.alive == (
        ("optimizer of rank 1", 200),
        ("weights of rank 1", 100),
        ("gradients of rank 1", 50),
        ("activation 1F0", 10),
        ("received output 1RECV_F0", 2),
        ("received output 1RECV_F1", 2),
    )


@pytest.mark.parametrize("name", ["1f1b", "zbv", "interleaved_zero_bubble", "dualpipe", "chimera"])
@pytest.mark.parametrize("lowered", [False, True])
def test_the_walk_in_time_is_the_walk_over_the_order(name: str, lowered: bool) -> None:
    schedule = build_schedule(name, ranks=4, microbatches=8)
    schedule = lower(schedule) if lowered else schedule
    timeline = simulate(schedule, BYTES)
    bound = BYTES.bind(schedule)
    for rank, row in enumerate(schedule.actions):
        walked = walk_occupancy(schedule.dependencies, row, bound.size_of)
        static = sum(bound.static_memory[rank].values())
        peak = timeline.figures.peaks[rank]
        assert peak.total == pytest.approx(static + walked.peak)
        assert peak.action == row[walked.peak_position]
        assert max(timeline.memory[rank].totals) == pytest.approx(peak.total)
        assert timeline.memory[rank].totals[-1] == pytest.approx(static)
        sizes = sorted(size for _, size in walked.alive_at_peak)
        static_parts = [size for size in bound.static_memory[rank].values() if size]
        assert sorted(size for _, size in peak.alive) == pytest.approx(sorted(sizes + static_parts))
        total = [sum(at) for at in zip(*timeline.memory[rank].categories.values(), strict=True)]
        assert total == pytest.approx(timeline.memory[rank].totals)


def test_both_directions_hold_their_weights() -> None:
    timeline = simulate(build_schedule("dualpipe", ranks=4, microbatches=8), BYTES)
    assert all(peak.categories["weights"] == 200 for peak in timeline.figures.peaks)


def test_limits_with_units() -> None:
    schedule = build_schedule("1f1b", ranks=2, microbatches=2)
    assert simulate(schedule, BYTES, memory="1GiB").memory_limit == 1024
    assert simulate(schedule, BYTES, memory=400).memory_limit == 400
    with pytest.raises(CostFileError, match="without a memory unit"):
        simulate(schedule, UniformCosts(1, 1, 1), memory="40GiB")


def test_forward_only_frees_what_nobody_comes_back_for() -> None:
    schedule = build_schedule("forward_only", ranks=2, microbatches=6)
    assert simulate(schedule, UniformCosts(1, 1, 1)).peak_memory == (1, 1)


def test_stages_of_different_size() -> None:
    costs = StageCosts(1, 1, 1, activation=[3, 1])
    timeline = simulate(build_schedule("1f1b", ranks=2, microbatches=4), costs)
    assert timeline.peak_memory == (6, 1)
