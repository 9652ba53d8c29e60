"""CSV files go both ways between torch and us, with communication and without."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeloom.ir.serialization import load_schedule
from pipeloom.passes.pipeline import lower
from pipeloom.schedules.registry import build_schedule
from pipeloom.verify.deadlock import CHANNELS, SENDS
from pipeloom.verify.verifier import verify
from tests.unit.schedules.torch_peer import TORCH_CLASSES, V_SHAPED, make_torch_schedule

pytest.importorskip("torch")

RANKS, MICROBATCHES = 3, 6
FORMATS = ("compute_only", "compute_comms")


def make_both(name: str):  # type: ignore[no-untyped-def]
    chunks = 2 if name in V_SHAPED else 3
    shape = {"ranks": RANKS, "microbatches": MICROBATCHES, "chunks": chunks}
    return make_torch_schedule(name, **shape), build_schedule(name, **shape)


@pytest.mark.parametrize("name", TORCH_CLASSES)
def test_what_torch_dumps_is_loaded(name: str, tmp_path: Path) -> None:
    theirs, ours = make_both(name)
    path = tmp_path / "order.csv"
    theirs._dump_csv(path, format="compute_only")
    assert load_schedule(path) == ours

    theirs._dump_csv(path, format="compute_comms")
    program = load_schedule(path)
    assert program.has_communication
    assert program.sharded_stages == frozenset(range(ours.num_stages))
    for sends in SENDS:
        for channel in CHANNELS:
            verify(program, sends=sends, channel=channel).raise_for_errors()


@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize("name", TORCH_CLASSES)
def test_what_we_save_is_loaded_by_torch(name: str, shard: bool, tmp_path: Path) -> None:
    theirs, ours = make_both(name)
    path, again = tmp_path / "ours.csv", tmp_path / "again.csv"
    for schedule, form in zip((ours, lower(ours, shard=shard)), FORMATS, strict=True):
        schedule.save(path)
        theirs._load_csv(path, format=form)
        theirs._dump_csv(again, format=form)
        assert again.read_bytes() == path.read_bytes()
