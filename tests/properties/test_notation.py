"""What is printed is parsed back: actions, grids, CSV and JSON."""

from __future__ import annotations

import random
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.errors import ParseError
from pipeloom.ir.action import Action, Kind, fuse
from pipeloom.ir.dependencies import RULES, Role
from pipeloom.ir.notation import (
    LARGEST_NUMBER,
    format_csv,
    format_grid,
    parse_action,
    parse_csv,
    parse_grid,
)
from pipeloom.ir.questions import find_malformed
from pipeloom.ir.schedule import Schedule, make_schedule
from pipeloom.ir.serialization import load_schedule, schedule_from_json, schedule_to_json
from tests.support.random_programs import make_program

NUMBERS = st.integers(0, LARGEST_NUMBER)
KINDS = st.sampled_from([kind for kind in Kind if RULES[kind].role is not Role.FUSED])
COMPUTATIONS = st.builds(
    lambda kind, stage, microbatch: Action(kind, stage, microbatch),
    st.sampled_from([kind for kind in Kind if RULES[kind].role is Role.COMPUTE]),
    NUMBERS,
    NUMBERS,
)


@st.composite
def actions(draw: st.DrawFn) -> Action:
    if draw(st.booleans()) and draw(st.booleans()):
        return fuse(*draw(st.lists(COMPUTATIONS, min_size=2, max_size=3)))
    kind = draw(KINDS)
    rule = RULES[kind]
    is_message = rule.role in (Role.SEND, Role.RECEIVE)
    return Action(
        kind,
        draw(NUMBERS),
        draw(NUMBERS) if rule.has_microbatch else None,
        (),
        draw(st.none() | NUMBERS) if is_message else None,
    )


@given(actions())
def test_an_action_is_parsed_from_what_it_prints(action: Action) -> None:
    assert find_malformed(action) is None
    assert parse_action(str(action)) == action


@given(st.lists(st.lists(actions(), min_size=1), min_size=1))
def test_rows_are_parsed_from_the_csv_they_make(rows: list[list[Action]]) -> None:
    assert parse_csv(format_csv(rows)) == rows


@given(st.text(st.sampled_from("0123456789FBIWSENDRCV_<>();OLAP x"), max_size=14))
def test_a_text_is_an_action_or_an_error_that_quotes_it(text: str) -> None:
    message = None
    try:
        action = parse_action(text)
    except ParseError as error:
        message = str(error)
    if message is None:
        # Only leading zeros may be lost.
        assert len(str(action)) <= len(text)
        assert parse_action(str(action)) == action
    else:
        assert repr(text) in message


@given(actions(), st.sampled_from("xyz 9F-+.,;()<>_"))
def test_garbage_after_an_action_is_refused_or_belongs_to_it(action: Action, garbage: str) -> None:
    text = f"{action}{garbage}"
    try:
        parsed = parse_action(text)
    except ParseError:
        return
    assert str(parsed) == text
    assert garbage == "9"


def random_schedules() -> list[Schedule]:
    rng = random.Random("notation")
    programs = [make_program(rng, written=rng.random() < 0.5, sharded=True) for _ in range(60)]
    return [program for program in programs if all(program.actions)]


@pytest.mark.parametrize("schedule", random_schedules(), ids=repr)
def test_schedules_survive_every_format(schedule: Schedule, tmp_path_factory) -> None:  # type: ignore[no-untyped-def]
    assert schedule_from_json(schedule_to_json(schedule)) == schedule
    assert schedule_from_json(schedule_to_json(schedule)).name == schedule.name

    again = parse_grid(format_grid(schedule), topology=schedule.topology)
    assert again.actions == schedule.actions
    assert again == make_schedule(schedule.actions, topology=schedule.topology)

    folder = tmp_path_factory.mktemp("formats")
    assert load_schedule(schedule.save(folder / "it.json")) == schedule
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = schedule.save(folder / "it.csv")
    loaded = load_schedule(path, topology=schedule.topology)
    assert loaded.actions == schedule.actions
    assert loaded.fingerprint() == again.fingerprint()
