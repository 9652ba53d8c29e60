"""Every schedule of the library, at random legal shapes, verifies: as it is, and lowered under the
strictest model; small ones also run with symbols."""

from __future__ import annotations

import random

import pytest

from pipeloom.errors import ScheduleError
from pipeloom.ir.schedule import Schedule
from pipeloom.passes.pipeline import lower
from pipeloom.schedules.registry import build_schedule, list_schedules
from pipeloom.verify.verifier import verify
from tests.support.brute_force_executor import find_fault

NAMES = [entry.name for entry in list_schedules()]
SHAPES_EACH = 10
TRIES = 400


def legal_schedules(name: str) -> list[Schedule]:
    """Schedules of random shapes; the library says itself which shapes are legal."""
    rng = random.Random(name)
    takes_chunks = next(entry.takes_chunks for entry in list_schedules() if entry.name == name)
    found: list[Schedule] = []
    for _ in range(TRIES):
        ranks = rng.randint(1, 8)
        # Multiples of the ranks are drawn often: many families need them.
        microbatches = rng.choice((rng.randint(1, 24), ranks * rng.randint(1, 3)))
        chunks = rng.choice((None, 1, 2, 3)) if takes_chunks else None
        try:
            found.append(
                build_schedule(name, ranks=ranks, microbatches=microbatches, chunks=chunks)
            )
        except ScheduleError:
            continue
        if len(found) == SHAPES_EACH:
            return found
    raise AssertionError(f"{name} refused nearly all of {TRIES} shapes")


@pytest.mark.parametrize("name", NAMES)
def test_it_verifies_as_it_is_and_lowered(name: str) -> None:
    for schedule in legal_schedules(name):
        report = verify(schedule)
        assert report.ok, f"{schedule!r}\n{report}"
        program = lower(schedule)
        report = verify(program, sends="blocking", channel="all")
        assert report.ok, f"{program!r}\n{report}"
        if sum(map(len, program.actions)) < 250:
            assert find_fault(schedule) is None
            assert find_fault(program) is None
