"""Lists of passes, what lower() runs, and names and options of passes."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from pipeloom.errors import ScheduleError, VerificationError
from pipeloom.ir.action import Kind
from pipeloom.ir.notation import parse_grid
from pipeloom.ir.schedule import Schedule
from pipeloom.passes.insert_communication import insert_communication
from pipeloom.passes.pipeline import PassPipeline, default_passes, lower
from pipeloom.passes.place_receives import place_receives
from pipeloom.passes.registry import PASS_NAMES, list_passes, make_pass, parse_pass
from pipeloom.passes.strip_communication import strip_communication
from pipeloom.schedules.registry import build_schedule, list_schedules
from pipeloom.verify.verifier import verify
from unit.passes.blocking_run import edges_of, find_stuck

TINY = "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"
SHAPES = list(product((1, 2, 3, 4, 6), (1, 2, 4, 6, 8, 12)))


def counts(schedule: Schedule) -> dict[str, int]:
    found: dict[str, int] = {}
    for action in schedule.all_actions():
        found[str(action.kind)] = found.get(str(action.kind), 0) + 1
    return found


@pytest.mark.parametrize("name", [entry.name for entry in list_schedules()])
def test_the_whole_library_lowers(name: str) -> None:
    """Under the strictest model, by the proof and by an independent run; computations unchanged."""
    legal = 0
    for ranks, microbatches in SHAPES:
        try:
            schedule = build_schedule(name, ranks=ranks, microbatches=microbatches)
        except ScheduleError:
            continue
        legal += 1
        program = lower(schedule)
        verify(program, sends="blocking", channel="all").raise_for_errors()
        rows = [map(str, row) for row in program.actions]
        assert find_stuck(rows, edges_of(program.topology)) == []
        bare = strip_communication(program)
        kept = [[a for a in row if a.kind is not Kind.REDUCE_GRAD] for row in bare.actions]
        assert tuple(map(tuple, kept)) == schedule.actions
    assert legal >= 3


@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "zbv", "chimera", "dualpipev"])
@pytest.mark.parametrize("receives", [None, "early", "late"])
def test_everything_at_once(name: str, receives: Any) -> None:
    schedule = build_schedule(name, ranks=4, microbatches=8)
    program = lower(schedule, shard=True, lookahead=2, receives=receives)
    verify(program).raise_for_errors()
    if receives is None:
        verify(program, sends="blocking", channel="all").raise_for_errors()
    found = counts(program)
    assert found["UNSHARD"] == found["RESHARD"]
    assert found["REDUCE_GRAD"] == schedule.num_stages


def test_copies_exchange_their_gradients_by_default() -> None:
    schedule = build_schedule("chimera", ranks=4, microbatches=8)
    assert counts(lower(schedule))["REDUCE_GRAD"] == 8
    assert "REDUCE_GRAD" not in counts(lower(build_schedule("1f1b", ranks=4, microbatches=8)))


def test_a_complete_program_stays_as_it_is() -> None:
    program = lower(parse_grid(TINY))
    assert lower(program) == program


def test_options_reach_their_passes() -> None:
    schedule = parse_grid(TINY)
    late = lower(schedule, receives="late")
    assert late == place_receives(insert_communication(schedule), "late")
    steps = default_passes(
        schedule, shard={0}, lookahead=2, receives="early", receive_lookahead=3, channel="all"
    )
    assert list(map(str, steps)) == [
        "unshard_parameters:stages=0:lookahead=2",
        "insert_communication",
        "place_receives:when=early:lookahead=3:channel=all",
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lokahead": 2}, "no option 'lokahead'; it has shard, receives, lookahead"),
        ({"lookahead": 2}, "lookahead has no effect without shard=True"),
        ({"channel": "all"}, "channel has no effect without receives='early' or 'late'"),
    ],
)
def test_options_that_do_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        lower(parse_grid(TINY), **options)


def test_every_pass_makes_valid_programs_of_valid_programs() -> None:
    names = [
        *("merge_backward", "split_backward", "unshard_parameters", "reduce_gradients"),
        *("insert_communication", "place_receives", "strip_communication", "merge_backward"),
    ]
    assert set(names) == set(PASS_NAMES)
    for entry in list_schedules():
        schedule = build_schedule(entry.name, ranks=4, microbatches=8)
        PassPipeline(names).run(schedule)


def test_a_wrong_pass_is_named() -> None:
    def drop_the_last(schedule: Schedule) -> Schedule:
        return schedule.with_actions(row[:-1] for row in schedule.actions)

    pipeline = PassPipeline(["split_backward", drop_the_last, "insert_communication"])
    with pytest.raises(VerificationError) as caught:
        pipeline.run(parse_grid(TINY))
    assert "after the pass drop_the_last" in caught.value.__notes__[0]
    PassPipeline([drop_the_last], verify_each=False).run(parse_grid(TINY))


def test_what_is_no_pass_is_refused() -> None:
    with pytest.raises(ScheduleError, match="a name or a function of a Schedule, not 3"):
        PassPipeline([3])  # type: ignore[list-item]

    def forgetful(schedule: Schedule) -> Schedule:
        return None  # type: ignore[return-value]

    with pytest.raises(ScheduleError, match="the pass forgetful returned None, not a Schedule"):
        PassPipeline([forgetful]).run(parse_grid(TINY))


def test_wrong_input_is_not_blamed_on_a_pass() -> None:
    with pytest.raises(VerificationError) as caught:
        PassPipeline(["merge_backward"]).run(parse_grid("0F0 0F0"))
    assert "what goes in" in caught.value.__notes__[0]


def test_the_pipeline_verifies_under_its_model() -> None:
    crossing = parse_grid(
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1\n"
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"
    )
    PassPipeline([]).run(crossing)
    with pytest.raises(VerificationError, match="DEADLOCK"):
        PassPipeline([], sends="blocking", channel="all").run(crossing)


def test_explain_tells_what_each_pass_changed() -> None:
    pipeline = PassPipeline(["split_backward", "merge_backward", "insert_communication"])
    assert repr(pipeline) == (
        "<PassPipeline split_backward → merge_backward → insert_communication>"
    )
    split, merged, inserted = pipeline.explain(parse_grid(TINY))
    assert split.counts == {"+I": 4, "+W": 4, "-B": 4}
    assert merged.counts == {"+B": 4, "-I": 4, "-W": 4}
    assert inserted.counts == {"+SEND_F": 2, "+RECV_B": 2, "+RECV_F": 2, "+SEND_B": 2}
    assert inserted.after == pipeline.run(parse_grid(TINY))


def test_passes_are_listed_with_a_line_and_their_options() -> None:
    passes = {step.name: step for step in list_passes()}
    assert list(passes) == list(PASS_NAMES)
    assert all(step.summary.endswith(".") and "`" not in step.summary for step in passes.values())
    options = {option.name: option for option in passes["place_receives"].options}
    assert options["lookahead"].type == "int"
    assert options["when"].default == "early"


def test_passes_by_text() -> None:
    step = parse_pass("unshard_parameters:stages=0+3:lookahead=2:memory=none")
    assert step.arguments == {"stages": frozenset({0, 3}), "lookahead": 2, "memory": None}
    assert parse_pass("unshard_parameters:memory=1.5").arguments == {"memory": 1.5}
    assert str(parse_pass("place_receives:when=late")) == "place_receives:when=late"
    assert make_pass(insert_communication).name == "insert_communication"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("insert_comunication", "did you mean insert_communication"),
        ("nothing like it", "no pass is named 'nothing like it'"),
        ("place_receives:late", "write name:option=value"),
        ("place_receives:whne=late", "has no option 'whne'; it has when, lookahead"),
        ("merge_backward:stages=1", "it has none"),
        ("place_receives:lookahead=two", "not a value for int"),
        ("unshard_parameters:lookahead=1:lookahead=2", "sets 'lookahead' twice"),
    ],
)
def test_wrong_texts_say_what_is_right(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        parse_pass(text)
