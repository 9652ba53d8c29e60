"""What a stage costs under uniform costs and under costs per stage."""

from __future__ import annotations

import math

import pytest

from pipeloom import CostFileError, Link, Network, StageCosts, UniformCosts, build_schedule
from pipeloom.ir.action import Kind
from pipeloom.ir.notation import parse_action


def build(name: str = "1f1b", **shape: int):
    return build_schedule(name, **{"ranks": 4, "microbatches": 8, **shape})


def test_a_chunk_costs_its_share() -> None:
    bound = UniformCosts(2, 3, 4, activation=8, retained=0.5).bind(build("zbv"))
    assert bound.durations[Kind.F] == (1,) * 8
    assert bound.durations[Kind.I] == (1.5,) * 8
    assert bound.durations[Kind.W] == (2,) * 8
    assert bound.durations[Kind.B] == (3.5,) * 8
    assert bound.size_of(("activation", 0, 0, None)) == 4
    assert bound.size_of(("retained", 0, 0, None)) == 2


def test_a_stage_of_two_directions_costs_a_whole_rank() -> None:
    bound = UniformCosts(2, 3, 4, weights=10).bind(build("dualpipe"))
    assert bound.durations[Kind.F] == (2,) * 8
    assert bound.static_memory[0]["weights"] == 20


def test_a_full_backward_of_its_own() -> None:
    assert UniformCosts(1, 1, 1, full=1.8).bind(build()).durations[Kind.B] == (1.8,) * 4
    assert StageCosts(1, 1, 1, full=[1, 2, 3, 4]).bind(build()).durations[Kind.B] == (1, 2, 3, 4)
    # Bounds may use the cheaper way.
    assert UniformCosts(1, 1, 1, full=1.8).bind(build()).backward == (1.8,) * 4
    assert UniformCosts(1, 1, 1, full=5).bind(build()).backward == (2,) * 4


def test_extra_work_of_the_first_and_last_stage_is_not_shared_out() -> None:
    bound = UniformCosts(2, 2, 2, extra_first=0.5, extra_last=1).bind(build("zbv"))
    assert bound.durations[Kind.F] == (2, 1, 1, 1, 1, 1, 1, 3)


def test_costs_per_stage_are_taken_as_they_are() -> None:
    bound = StageCosts([1, 2, 3, 4], 1, [2, 2, 2, 9]).bind(build())
    assert bound.durations[Kind.F] == (1, 2, 3, 4)
    assert bound.durations[Kind.B] == (3, 3, 3, 10)


def test_both_copies_of_a_part_cost_the_same() -> None:
    bound = StageCosts([1, 2, 3, 4], 1, 1).bind(build("dualpipe"))
    assert bound.durations[Kind.F] == (1, 2, 3, 4, 1, 2, 3, 4)
    with pytest.raises(CostFileError, match=r"3 stages, but .* has 8; .* 8 numbers or 4"):
        StageCosts([1, 2, 3], 1, 1).bind(build("dualpipe"))
    with pytest.raises(CostFileError, match="3 stages, but schedule '1f1b' has 4"):
        StageCosts([1, 2, 3], 1, 1).bind(build())


def test_messages_by_boundary_and_link() -> None:
    network = Network(edges={(1, 2): Link(latency=7, bandwidth=4)})
    costs = StageCosts(1, 1, 1, latency=1, boundary=[10, 20, 30, 0], network=network)
    bound = costs.bind(build())
    assert bound.transfer_of(("sent output", 0, 0, 1)) == (0, 1)
    assert bound.transfer_of(("sent output", 1, 0, 2)) == (5, 7)
    # The gradient of stage 2's input is as large as the output of stage 1.
    assert bound.size_of(("sent gradient", 2, 0, 1)) == 20
    assert bound.size_of(("received gradient", 1, 0, 2)) == 20
    assert bound.size_of(("received output", 2, 0, 1)) == 20


def test_fused_actions() -> None:
    pair = parse_action("(0F4;3B1)OVERLAP_F_B")
    lengths = {
        overlap: UniformCosts(1, 1, 2, overlap=overlap).bind(build()).duration_of(pair)
        for overlap in ("sum", "max", 0.5)
    }
    assert lengths == {"sum": 4, "max": 3, 0.5: 2}


BAD = {
    "forward": [-1, math.nan, math.inf, "1", True, None],
    "input": [-1, 10**400, 1e200],
    "full": [-1],
    "latency": [-1, math.nan, math.inf],
    "bandwidth": [0, -1, math.nan, 1e-320],
    "activation": [-1],
    "retained": [1.5, -0.1],
    "overlap": ["mean", 0, -1, math.nan],
    "boundary": [-1],
    "weights": [math.inf],
    "unshard": [-1],
    "speeds": [[0, 1], [-1], [1e-320]],
    "gathered": [-1, "8"],
}


@pytest.mark.parametrize("model", [UniformCosts, StageCosts])
@pytest.mark.parametrize(("field", "value"), [(k, v) for k, vs in BAD.items() for v in vs])
def test_numbers_that_are_none(model: type, field: str, value: object) -> None:
    with pytest.raises(CostFileError, match=field):
        model(**{"forward": 1, "input": 1, "weight": 1, field: value})


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(CostFileError) as caught:
        StageCosts([1, -2], [1, 1, 1], "x", latency=-1, overlap="no")
    text = str(caught.value)
    for part in ("forward[1]", "forward has 2, input has 3", "weight", "latency", "overlap"):
        assert part in text


def test_links_that_are_wrong() -> None:
    with pytest.raises(CostFileError, match="edge 0>1: latency"):
        UniformCosts(1, 1, 1, network=Network(edges={(0, 1): Link(latency=-1)}))
    with pytest.raises(CostFileError, match="need ranks_per_node"):
        UniformCosts(1, 1, 1, network=Network(within_node=Link()))
    with pytest.raises(CostFileError, match="whole number"):
        UniformCosts(1, 1, 1, network=Network(ranks_per_node=0))
    with pytest.raises(CostFileError, match="given twice"):
        UniformCosts(1, 1, 1, latency=1, network=Network(link=Link(latency=2)))
