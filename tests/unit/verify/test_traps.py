"""The traps that a verifier must not fall into, each with the place and the words it should say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeloom.errors import ParseError, ScheduleError, VerificationError
from pipeloom.ir.action import Action, Kind, fuse
from pipeloom.ir.notation import parse_action, parse_grid
from pipeloom.ir.placement import Placement
from pipeloom.ir.schedule import Schedule
from pipeloom.ir.topology import Topology
from pipeloom.verify.deadlock import CHANNELS, SENDS, find_deadlock
from pipeloom.verify.report import Report
from pipeloom.verify.verifier import verify

MODELS = [(sends, channel) for sends in SENDS for channel in CHANNELS]


def check(*rows: str, topology: Topology | None = None, **model: str) -> Report:
    return verify(parse_grid("\n".join(rows), topology=topology), **model)  # type: ignore[arg-type]


def test_a_right_program_verifies_under_every_model() -> None:
    rows = ("0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0")
    for sends, channel in MODELS:
        assert check(*rows, sends=sends, channel=channel).violations == ()


def test_a_microbatch_runs_twice_while_another_never_runs() -> None:
    report = check("0F0 0F1 0F1 0B0 0B1 0B2")
    duplicate, missing = report.violations
    assert (duplicate.code, duplicate.rank, duplicate.position) == ("DUPLICATE_FORWARD", 0, 2)
    assert str(duplicate.action) == "0F1"
    assert duplicate.related[0].position == 1
    assert (missing.code, missing.rank, missing.position) == ("MISSING_FORWARD", 0, None)
    assert "microbatch 2" in missing.why


def test_a_full_backward_that_runs_twice_is_one_mistake() -> None:
    (violation,) = check("0F0 0B0 0B0").violations
    assert (violation.code, violation.position) == ("DUPLICATE_BACKWARD", 2)


def test_a_full_and_a_split_backward_of_the_same_microbatch() -> None:
    assert check("0F0 0I0 0W0 0B0").codes == ("DUPLICATE_BACKWARD", "DUPLICATE_WEIGHT")


def test_a_backward_before_its_forward() -> None:
    (violation,) = check("0B0 0F0").violations
    assert (violation.code, violation.position) == ("BACKWARD_BEFORE_FORWARD", 0)
    assert "0F0" in violation.hint


def test_a_backward_that_another_rank_can_never_feed_is_said_once_per_cause() -> None:
    report = check("0F0 0B0", "1B0 1F0")
    assert report.codes == ("BACKWARD_BEFORE_FORWARD",)  # not also the ranks that hang on it


def test_a_stage_on_two_ranks() -> None:
    report = check("0F0 0F1 0B0 0B1", "1F0 0F2 1F1 1B0 1B1", "1F2 1B2 0B2")
    two_ranks = [v for v in report.violations if v.code == "STAGE_ON_TWO_RANKS"]
    assert [v.rank for v in two_ranks] == [1, 2]
    assert [place.rank for place in two_ranks[0].related] == [2]


def test_a_message_of_a_stage_that_only_stands_on_a_wrong_rank() -> None:
    placed = parse_grid("0F0 0SEND_F0 0RECV_B0 0B0 \n 1RECV_F0 1F0 1B0 1SEND_B0")
    rows = [list(row) for row in placed.actions]
    rows[0].append(rows[1].pop())
    report = verify(placed.with_actions(rows))
    assert report.codes == ("WRONG_RANK",)
    assert report.violations[0].position == 4


def test_a_missing_rank() -> None:
    right = parse_grid("0F0 0B0 \n 1F0 1B0 \n 2F0 2B0")
    report = verify(replace(right, actions=right.actions[:2]))
    assert [(v.code, v.rank) for v in report.violations] == [("MISSING_RANK", 2)]
    report = verify(right.with_actions([right.actions[0], (), right.actions[2]]))
    assert [(v.code, v.rank) for v in report.violations] == [("MISSING_RANK", 1)]


def test_a_rank_without_stages_may_rest() -> None:
    right = parse_grid("0F0 0B0 \n 1F0 1B0")
    assert verify(replace(right, placement=Placement((0, 1), 3), actions=(*right.actions, ()))).ok


def test_a_missing_row_in_a_file() -> None:
    (violation,) = check("0F0 0B0", "2F0 2B0").violations
    assert violation.code == "STAGE_ON_NO_RANK"
    assert "stage 1" in violation.why


def test_weights_without_inputs_and_inputs_without_weights() -> None:
    assert check("0F0 0W0").codes == ("WEIGHT_WITHOUT_INPUT",)
    assert check("0F0 0I0").codes == ("INPUT_WITHOUT_WEIGHT",)
    assert check("0F0 0F1 0I0 0I1 0W0").codes == ("INPUT_WITHOUT_WEIGHT",)


def test_an_unknown_stage_and_an_unknown_microbatch() -> None:
    report = check("0F0 0B0 3F0", "1F0 1B0", topology=Topology.chain(2))
    assert [(v.code, v.rank, v.position) for v in report.violations] == [("UNKNOWN_STAGE", 0, 2)]
    right = parse_grid("0F0 0B0")
    mutant = right.with_actions([(*right.actions[0], parse_action("0F1"))])
    assert verify(mutant).codes == ("UNKNOWN_MICROBATCH",)


def test_a_circular_wait_across_ranks_of_a_compute_only_schedule() -> None:
    (violation,) = check("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0").violations
    assert violation.code == "DEADLOCK"
    assert violation.why == (
        "rank 0 waits at 0B0 (for 1B0) for rank 1, which waits at 1F1 (for 0F1) for rank 0: "
        "a circle"
    )
    assert {place.rank for place in violation.related} == {1}


def test_a_circle_of_three_ranks_is_told_in_order() -> None:
    rows = (
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1RECV_F1 1F1 1RECV_B0 1B0 1SEND_B0 1RECV_B1 1B1 1SEND_B1 1SEND_F0 1SEND_F1",
        "2RECV_F0 2F0 2B0 2SEND_B0 2RECV_F1 2F1 2B1 2SEND_B1",
    )
    (violation,) = check(*rows, sends="blocking").violations
    assert violation.why.startswith("rank 1 waits at 1RECV_B0 for rank 2")
    assert "which waits at 2RECV_F0 for rank 1: a circle" in violation.why


def test_independent_circles_are_all_reported() -> None:
    rows = (
        "0F0 0B0 0F1 0B1",
        "1F1 1B1 1F0 1B0",
        "2F2 2B2 2F3 2B3",
        "3F3 3B3 3F2 3B2",
    )
    report = check(*rows, topology=Topology(((0, 1), (2, 3))))
    assert report.codes == ("DEADLOCK",)
    assert [v.rank for v in report.violations] == [0, 2]


def test_a_receive_without_a_send_and_a_send_without_a_receive() -> None:
    (violation,) = check("0F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0").violations
    assert (violation.code, violation.rank, violation.position) == ("RECEIVE_WITHOUT_SEND", 1, 0)
    assert "add 0SEND_F0 to rank 0" in violation.hint
    report = check("0F0 0SEND_F0 0RECV_B0 0B0", "1F0 1B0 1SEND_B0")
    assert report.codes == ("MISSING_RECEIVE", "SEND_WITHOUT_RECEIVE")
    assert "add 1RECV_F0 to rank 1" in report.violations[1].hint


def test_sends_and_receives_of_a_pair_in_different_order() -> None:
    rows = ("0F0 0F1 0SEND_F0 0SEND_F1", "1RECV_F1 1RECV_F0 1F0 1F1")
    (violation,) = check(*rows, sends="buffered").violations
    assert violation.code == "CHANNEL_ORDER"
    assert (violation.rank, violation.position, str(violation.action)) == (0, 2, "0SEND_F0")
    assert [str(place.action) for place in violation.related] == ["1RECV_F1", "1RECV_F0"]
    assert check(*rows, sends="rendezvous").codes == ("CHANNEL_ORDER", "DEADLOCK")


def test_forwards_and_gradients_between_two_ranks_share_a_directed_pair() -> None:
    """In a V, rank 0 sends outputs (of stage 0) and gradients (of stage 3) to the same rank."""
    right = (
        "0F0 0SEND_F0 3RECV_F0 3F0 3B0 3SEND_B0 0RECV_B0 0B0",
        "1RECV_F0 1F0 2F0 2SEND_F0 2RECV_B0 2B0 1B0 1SEND_B0",
    )
    assert check(*right, sends="blocking", channel="all").ok
    wrong = (right[0], "2RECV_B0 1RECV_F0 1F0 2F0 2SEND_F0 2B0 1B0 1SEND_B0")
    assert "CHANNEL_ORDER" in check(*wrong, sends="buffered").codes


DEFERRED = (
    "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
    "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
)


@pytest.mark.parametrize(
    ("sends", "channel", "runs"),
    [
        ("blocking", "all", False),
        ("blocking", "edge", False),
        ("rendezvous", "all", False),
        ("rendezvous", "pair", False),
        ("rendezvous", "edge", True),
        ("buffered", "all", True),
        ("buffered", "edge", True),
    ],
)
def test_a_deferred_receive_deadlocks_unless_each_edge_has_its_channel(
    sends: str, channel: str, runs: bool
) -> None:
    report = check(*DEFERRED, sends=sends, channel=channel)
    assert report.ok is runs
    assert report.codes == (() if runs else ("DEADLOCK",))


def test_a_rank_that_waits_behind_another_message_says_so() -> None:
    rows = (
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
    )
    (violation,) = check(*rows, sends="rendezvous", channel="all").violations
    assert violation.why == (
        "rank 0 waits at 0B0 (for 0RECV_B0, queued behind 0SEND_F1) for rank 1, "
        "which waits with 1SEND_B0 for rank 0: a circle"
    )


def test_copies_that_reduce_in_different_orders_wait_in_a_circle() -> None:
    topology = Topology.bidirectional(2)
    right = (
        "0F0 3F1 3B1 0B0 0REDUCE_GRAD 3REDUCE_GRAD",
        "2F1 1F0 1B0 2B1 2REDUCE_GRAD 1REDUCE_GRAD",
    )
    assert check(*right, topology=topology).ok
    wrong = (right[0], "2F1 1F0 1B0 2B1 1REDUCE_GRAD 2REDUCE_GRAD")
    (violation,) = check(*wrong, topology=topology).violations
    assert violation.why == (
        "rank 0 waits at 0REDUCE_GRAD (to reach 2REDUCE_GRAD) for rank 1, "
        "which waits at 1REDUCE_GRAD (to reach 3REDUCE_GRAD) for rank 0: a circle"
    )


def test_copies_on_one_rank_need_no_collective() -> None:
    rows = ("0F0 1F1 0B0 1B1 0REDUCE_GRAD 1REDUCE_GRAD",)
    assert check(*rows, topology=Topology.bidirectional(1)).ok


def test_garbage_after_an_action() -> None:
    with pytest.raises(ParseError, match=r"row 1, column 1: '0F0xyz': 'xyz' after the action"):
        parse_grid("0F0xyz 0B0")


def test_the_needs_of_fused_actions_are_those_of_their_parts() -> None:
    row = (Action(Kind.F, 0, 0), fuse(Action(Kind.F, 0, 1), Action(Kind.B, 0, 0)))
    schedule = Schedule(Placement((0,), 1), Topology.chain(1), 2, (row,))
    assert verify(schedule).codes == ("MISSING_BACKWARD",)
    whole = schedule.with_actions([(*row, Action(Kind.B, 0, 1))])
    assert verify(whole).ok
    swapped = schedule.with_actions([(row[1], row[0], Action(Kind.B, 0, 1))])
    assert verify(swapped).codes == ("BACKWARD_BEFORE_FORWARD",)


def test_sharding() -> None:
    assert check("0UNSHARD 0F0 0RESHARD 0UNSHARD 0B0 0REDUCE_GRAD 0RESHARD").ok
    assert check("0RESHARD 0UNSHARD 0F0 0B0 0REDUCE_GRAD").ok, "releasing twice does no harm"
    assert check("0UNSHARD 0F0").ok, "nothing to reduce in a forward-only program"
    report = check("0UNSHARD 0F0 0RESHARD 0B0 0REDUCE_GRAD")
    assert [(v.code, v.position) for v in report.violations] == [("COMPUTE_ON_SHARDED", 3)]
    report = check("0UNSHARD 0UNSHARD 0F0 0B0 0RESHARD")
    assert report.codes == ("DOUBLE_UNSHARD", "MISSING_REDUCE")
    assert report.violations[1].position == 3, "after the last backward"
    report = check("0UNSHARD 0F0 0B0 \n 1UNSHARD 2UNSHARD 1F0 2F0 2B0 1B0 2RESHARD")
    assert [str(v.action) for v in report.violations] == ["0B0", "1B0", "2B0"]
    assert check("0F0 0F1 0B0 0REDUCE_GRAD 0B1").codes == ("REDUCE_BEFORE_BACKWARD",)


def test_a_skip_connection_needs_its_message() -> None:
    topology = Topology.chain(3).with_edges((0, 2))
    rows = [
        "0F0 0SEND_F0>1 0SEND_F0>2",
        "1RECV_F0 1F0 1SEND_F0",
        "2RECV_F0<0 2RECV_F0<1 2F0",
    ]
    assert check(*rows, topology=topology, sends="rendezvous", channel="edge").ok
    assert check(*rows, topology=topology, sends="blocking", channel="all").ok
    early = ["0F0 0SEND_F0>2 0SEND_F0>1", rows[1], "2RECV_F0<1 2RECV_F0<0 2F0"]
    assert check(*early, topology=topology).ok
    assert check(*early, topology=topology, sends="blocking").codes == ("DEADLOCK",)
    rows[0], rows[2] = "0F0 0SEND_F0>1", "2RECV_F0<1 2F0"
    assert check(*rows, topology=topology).codes == ("MISSING_RECEIVE",)


def test_find_deadlock_gives_what_verify_reports() -> None:
    schedule = parse_grid("\n".join(DEFERRED))
    violation = find_deadlock(schedule, sends="blocking", channel="all")
    assert violation == verify(schedule, sends="blocking", channel="all").violations[0]
    assert find_deadlock(schedule) is None


def test_find_deadlock_also_tells_of_a_wait_for_what_never_comes() -> None:
    violation = find_deadlock(parse_grid("0F0 0RECV_B0 0B0 \n 1RECV_F0 1F0 1B0 1SEND_B0"))
    assert violation is not None
    assert "nobody ever meets it (1RECV_F0)" in violation.why


def test_unknown_models_are_refused() -> None:
    schedule = parse_grid("0F0")
    with pytest.raises(ScheduleError, match="buffered, rendezvous, blocking, not 'slow'"):
        verify(schedule, sends="slow")  # type: ignore[arg-type]
    with pytest.raises(ScheduleError, match="all, pair, edge, not 'none'"):
        verify(schedule, channel="none")  # type: ignore[arg-type]


def test_raise_for_errors_carries_the_report() -> None:
    report = check("0B0 0F0")
    with pytest.raises(VerificationError, match="BACKWARD_BEFORE_FORWARD") as caught:
        report.raise_for_errors()
    assert caught.value.report is report
    assert isinstance(caught.value, ValueError)
    check("0F0 0B0").raise_for_errors()


def test_a_rank_waits_at_its_end_for_what_it_has_posted() -> None:
    topology = Topology.chain(2)
    schedule = parse_grid("0F0 0SEND_F0 \n 1UNSHARD", topology=topology)
    assert find_deadlock(schedule, sends="buffered") is None
    violation = find_deadlock(schedule, sends="rendezvous")
    assert violation is not None
    assert violation.why.startswith("rank 0 waits at its end (for 0SEND_F0)")


def test_what_another_rank_computed_without_a_message_never_comes() -> None:
    placement = Placement((0, 1), 2)
    right = parse_grid("0F0 0SEND_F0 0RECV_B0 0B0 \n 1RECV_F0 1F0 1B0 1SEND_B0")
    rows = [list(row) for row in right.actions]
    rows[0].insert(1, rows[1].pop(1))  # 1F0 on rank 0, where nothing of stage 1 is
    moved = replace(right, placement=placement, actions=tuple(map(tuple, rows)))
    assert "WRONG_RANK" in verify(moved).codes
    violation = find_deadlock(moved)
    assert violation is not None
    assert "what it needs is made nowhere" in violation.why


def test_fusing_what_depends_on_each_other() -> None:
    (violation,) = check("(0F0;0B0)OVERLAP_F_B").violations
    assert (violation.code, violation.position) == ("OVERLAP_WITH_ITSELF", 0)


def test_repeated_messages_meet_in_order() -> None:
    rows = (
        "0F0 0SEND_F0 0SEND_F0 0SEND_F0 0RECV_B0 0B0",
        "1RECV_F0 1RECV_F0 1RECV_F0 1F0 1B0 1SEND_B0",
    )
    report = check(*rows, sends="blocking")
    assert [v.code for v in report.violations] == ["DUPLICATE_SEND"] * 2 + ["DUPLICATE_RECEIVE"] * 2


def test_a_split_backward_twice_after_a_full_one() -> None:
    report = check("0F0 0B0 0I0 0I0 0W0")
    assert report.codes == ("DUPLICATE_BACKWARD", "DUPLICATE_WEIGHT")


def test_a_circle_and_something_missing_are_both_reported() -> None:
    report = check("0F0 0B0 0F1 0B1 0F2", "1F1 1B1 1F0 1B0 1F2 1B2")
    assert report.codes == ("MISSING_BACKWARD", "DEADLOCK")
