"""The peak of every rank against a limit."""

from __future__ import annotations

import pytest

from pipeloom.cost.constant import StageCosts, UniformCosts
from pipeloom.errors import CostFileError, ScheduleError
from pipeloom.ir.notation import parse_grid
from pipeloom.verify.verifier import verify

COSTS = UniformCosts(forward=1, input=1, weight=1, retained=0.5)
GPIPE = parse_grid("0F0 0F1 0F2 0B0 0B1 0B2 \n 1F0 1F1 1F2 1B0 1B1 1B2")


def test_every_rank_over_the_limit_is_named_with_the_action_at_its_peak() -> None:
    report = verify(GPIPE, costs=COSTS, memory=2)
    assert [(v.code, v.rank, v.position, str(v.action)) for v in report.violations] == [
        ("MEMORY_LIMIT", 0, 2, "0F2"),
        ("MEMORY_LIMIT", 1, 2, "1F2"),
    ]
    why = report.violations[0].why
    assert "holds 3 here, 1 over the limit of 2" in why
    for microbatch in range(3):
        assert f"activation of stage 0 for microbatch {microbatch} (1)" in why


def test_a_limit_that_is_just_reached_holds() -> None:
    report = verify(GPIPE, costs=COSTS, memory=3)
    assert report.ok
    assert report.checks[-1] == "memory"


def test_a_limit_for_each_rank() -> None:
    schedule = parse_grid("0F0 0F1 0B0 0B1 \n 1F0 1B0 1F1 1B1")
    assert verify(schedule, costs=COSTS, memory=[2, 1]).ok
    assert [v.rank for v in verify(schedule, costs=COSTS, memory=[1, 1]).violations] == [0]
    with pytest.raises(ScheduleError, match="3 limits, but there are 2 ranks"):
        verify(schedule, costs=COSTS, memory=[1, 1, 1])


def test_what_stays_from_i_until_w_counts() -> None:
    """After 0I0 half an activation stays: with 0F1 that is one and a half."""
    late = parse_grid("0F0 0I0 0F1 0I1 0W0 0W1")
    assert verify(late, costs=COSTS, memory=1.5).ok
    (violation,) = verify(late, costs=COSTS, memory=1.4).violations
    assert str(violation.action) == "0F1"


def test_a_limit_needs_costs() -> None:
    with pytest.raises(ScheduleError, match="needs costs"):
        verify(GPIPE, memory=2)


@pytest.mark.parametrize("memory", [-1, float("nan"), "much", "3GiB"])
def test_limits_that_are_none(memory: float | str) -> None:
    with pytest.raises(CostFileError):
        verify(GPIPE, costs=COSTS, memory=memory)


def test_limits_with_units() -> None:
    costs = StageCosts(
        forward=[1, 1], input=[1, 1], weight=[1, 1], activation=[512, 512], memory_unit="MiB"
    )
    assert verify(GPIPE, costs=costs, memory="1.5GiB").ok
    report = verify(GPIPE, costs=costs, memory="1GiB")
    assert "holds 1536 MiB here, 512 MiB over the limit of 1024 MiB" in report.violations[0].why


def test_what_stages_hold_all_the_time_counts() -> None:
    costs = StageCosts(forward=1, input=1, weight=1, activation=1, weights=[10, 20])
    assert verify(GPIPE, costs=costs, memory=[13, 23]).ok
    (violation,) = verify(GPIPE, costs=costs, memory=[13, 22]).violations
    assert violation.rank == 1
    assert "holds 23 here, 1 over the limit of 22 (static 20; 3 in 3 pieces" in violation.why
