"""What is gathered, when, and never more than allowed."""

from __future__ import annotations

import random

import pytest

from pipeloom.cost.constant import StageCosts
from pipeloom.errors import ScheduleError
from pipeloom.ir.action import Kind
from pipeloom.ir.notation import parse_grid
from pipeloom.ir.schedule import Schedule
from pipeloom.passes.insert_communication import insert_communication
from pipeloom.passes.unshard_parameters import unshard_parameters
from pipeloom.verify.verifier import verify

LOOPED = """
rank 0  0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
rank 1  1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1
"""


def first_row(schedule: Schedule) -> str:
    return " ".join(map(str, schedule.actions[0]))


def most_gathered(schedule: Schedule, sizes: dict[int, float] | None = None) -> float:
    """Walk each rank: the most that is gathered at a time; computations find their stage whole."""
    most = 0.0
    for row in schedule.actions:
        whole: set[int] = set()
        for action in row:
            if action.kind is Kind.UNSHARD:
                assert action.stage not in whole
                whole.add(action.stage)
            elif action.kind is Kind.RESHARD:
                whole.remove(action.stage)
            elif action.microbatch is not None or action.parts:
                for part in action.parts or (action,):
                    if part.kind in (Kind.F, Kind.B, Kind.I, Kind.W):
                        assert part.stage in whole, f"{action} runs on a sharded stage"
            most = max(most, sum(sizes[s] if sizes else 1 for s in whole))
        assert not whole
    return most


def test_one_stage_at_a_time() -> None:
    result = unshard_parameters(parse_grid(LOOPED), lookahead=1)
    assert first_row(result) == (
        "0UNSHARD 0F0 0F1 0RESHARD 2UNSHARD 2F0 2F1 2B0 2B1 2RESHARD 0UNSHARD 2REDUCE_GRAD "
        "0B0 0B1 0RESHARD 0REDUCE_GRAD"
    )
    assert most_gathered(result) == 1


def test_the_next_stage_is_gathered_before_the_last_is_done_with() -> None:
    result = unshard_parameters(parse_grid(LOOPED), lookahead=2)
    assert first_row(result).startswith("0UNSHARD 2UNSHARD 0F0")
    assert first_row(result).count("UNSHARD") == 2
    assert most_gathered(result) == 2


@pytest.mark.parametrize("lookahead", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(10))
def test_the_next_stages_are_whole_during_every_computation(seed: int, lookahead: int) -> None:
    """Against the words: while a computation runs, exactly the next stages are gathered."""
    rng = random.Random(seed)
    order = [rng.randrange(4) for _ in range(12)] + [0, 1, 2, 3]
    row = [f"{stage}F{position}" for position, stage in enumerate(order)]
    result = unshard_parameters(parse_grid(" ".join(row)), lookahead=lookahead)
    whole: set[int] = set()
    position = 0
    for action in result.actions[0]:
        if action.kind is Kind.F:
            assert whole == set(list(dict.fromkeys(order[position:]))[:lookahead])
            position += 1
        elif action.kind is Kind.UNSHARD:
            whole.add(action.stage)  # type: ignore[arg-type]
        else:
            whole.remove(action.stage)  # type: ignore[arg-type]
    assert position == len(order)


@pytest.mark.parametrize("lookahead", [2, 3])
def test_torch_gathers_the_same(lookahead: int) -> None:
    pipelining = pytest.importorskip("torch.distributed.pipelining.schedules")
    text = "0F0 0F1 1F0 1F1 2F0 2F1 0F2 2B0 1F2 2B1 1B0 2F2 1B1 0B0 2B2 0B1 1B2 0B2"
    theirs = pipelining._add_unshard_reshard(
        [pipelining._Action.from_str(t) for t in text.split()], max_active_stages=lookahead
    )
    ours = unshard_parameters(parse_grid(text), lookahead=lookahead)
    kept = [str(a) for a in ours.actions[0] if a.kind is not Kind.REDUCE_GRAD]
    # Both bounds and gathers agree; which of several stages goes first may differ.
    assert sorted(kept) == sorted(map(str, theirs))
    assert [t for t in kept if "RESHARD" not in t] == [
        str(a) for a in theirs if "RESHARD" not in str(a)
    ]


def test_a_budget_in_memory() -> None:
    schedule = parse_grid("0F0 1F0 2F0 2B0 1B0 0B0")
    costs = StageCosts(forward=1, input=1, weight=1, weights=[1.0, 4.0, 2.0])
    sizes = {0: 1.0, 1: 4.0, 2: 2.0}
    for memory in (4.0, 5.0, 6.0, 7.0):
        result = unshard_parameters(schedule, memory=memory, costs=costs)
        assert most_gathered(result, sizes) <= memory
    assert first_row(unshard_parameters(schedule, memory=7, costs=costs)).count("UNSHARD") == 3
    assert most_gathered(unshard_parameters(schedule, memory=7, costs=costs, lookahead=1)) == 1


def test_a_budget_that_does_not_hold_one_stage_says_how_much_it_takes() -> None:
    costs = StageCosts(forward=1, input=1, weight=1, weights=[1.0, 4.0])
    with pytest.raises(ScheduleError, match=r"1F0 on rank 0 needs 4 .*at least memory=4"):
        unshard_parameters(parse_grid("0F0 1F0 1B0 0B0"), memory=3, costs=costs)


def test_a_fused_action_needs_both_its_stages() -> None:
    schedule = parse_grid("0F0 1F0 (0F1;1B0)OVERLAP_F_B 0B0 1F1 1B1 0B1")
    with pytest.raises(ScheduleError, match=r"OVERLAP_F_B on rank 0 needs 2 stages.*lookahead=2"):
        unshard_parameters(schedule, lookahead=1)
    result = unshard_parameters(schedule, lookahead=2)
    assert most_gathered(result) == 2
    verify(result).raise_for_errors()


def test_only_the_stages_named() -> None:
    result = unshard_parameters(parse_grid(LOOPED), stages=[2, 3])
    assert result.sharded_stages == {2, 3}
    assert "0UNSHARD" not in str(result)
    assert "0REDUCE_GRAD" not in str(result)
    verify(result).raise_for_errors()


def test_a_program_with_communication_may_be_sharded_too() -> None:
    result = unshard_parameters(insert_communication(parse_grid(LOOPED)), lookahead=1)
    assert most_gathered(result) == 1
    verify(result, sends="blocking", channel="all").raise_for_errors()


def test_forwards_alone_reduce_nothing() -> None:
    result = unshard_parameters(parse_grid("0F0 0F1\n1F0 1F1"))
    assert first_row(result) == "0UNSHARD 0F0 0F1 0RESHARD"
    verify(result).raise_for_errors()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stages": [0, 9]}, r"no stage 9; the stages are 0\.\.3"),
        ({"lookahead": 0}, "lookahead is 0"),
        ({"memory": 4.0}, "needs both"),
    ],
)
def test_wrong_options_say_what_is_right(options: dict[str, object], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        unshard_parameters(parse_grid(LOOPED), **options)  # type: ignore[arg-type]


def test_twice_is_refused() -> None:
    result = unshard_parameters(parse_grid(LOOPED), stages=[0])
    with pytest.raises(ScheduleError, match="gathers stage 0 already"):
        unshard_parameters(result)
    verify(unshard_parameters(result, stages=[1, 2, 3])).raise_for_errors()
