"""Schedule files: whole or not at all, and every fault named."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from pipeloom.errors import ParseError, ScheduleError
from pipeloom.ir.notation import parse_grid
from pipeloom.ir.placement import Placement
from pipeloom.ir.schedule import Schedule
from pipeloom.ir.serialization import load_schedule, schedule_from_json, schedule_to_json
from pipeloom.ir.topology import Topology
from pipeloom.passes.pipeline import lower
from pipeloom.schedules.registry import build_schedule

CHAIN = parse_grid("0F0 0F1 0B0 0B1 \n 1F0 1B0 1F1 1B1", name="chain")
TWO_CHAINS = parse_grid(
    "0F0 3F1 3B1 0B0 \n 2F1 1F0 1B0 2B1", name="two", topology=Topology.bidirectional(2)
)
SKIP = parse_grid(
    "0F0 0SEND_F0>1 0SEND_F0>2 \n 1RECV_F0 1F0 1SEND_F0 \n 2RECV_F0<0 2RECV_F0<1 2F0",
    name="skip",
    topology=Topology.chain(3).with_edges((0, 2)),
)
UNPLACED = Schedule(Placement((0, None), 2), Topology.chain(2), 1, (CHAIN.actions[0], ()))


@pytest.mark.parametrize("schedule", [CHAIN, TWO_CHAINS, SKIP, UNPLACED], ids=lambda s: s.name)
def test_json_carries_everything(schedule: Schedule, tmp_path: Path) -> None:
    again = load_schedule(schedule.save(tmp_path / "it.json"))
    assert again == schedule
    assert again.name == schedule.name
    assert schedule_to_json(again) == schedule_to_json(schedule)


def test_the_json_text() -> None:
    data = json.loads(schedule_to_json(TWO_CHAINS))
    assert data == {
        "pipeloom": "schedule",
        "version": 1,
        "name": "two",
        "microbatches": 2,
        "placement": {"ranks": 2, "rank_of_stage": [0, 1, 1, 0]},
        "topology": {
            "chains": [[0, 1], [2, 3]],
            "extra_edges": [],
            "replicas": [[0, 2], [1, 3]],
        },
        "communication": False,
        "actions": [["0F0", "3F1", "3B1", "0B0"], ["2F1", "1F0", "1B0", "2B1"]],
    }


def test_csv_of_a_chain(tmp_path: Path) -> None:
    path = tmp_path / "it.CSV"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert CHAIN.save(path) == path
    assert path.read_bytes() == b"0F0,0F1,0B0,0B1\r\n1F0,1B0,1F1,1B1\r\n"
    loaded = load_schedule(path)
    assert loaded == CHAIN
    assert loaded.name == "it"


def test_csv_of_anything_else_warns_and_says_how_to_load_it(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="load it with topology='bidirectional'"):
        path = TWO_CHAINS.save(tmp_path / "two.csv")
    assert load_schedule(path, topology="bidirectional") == TWO_CHAINS
    with pytest.warns(UserWarning, match=r"save it as \.json"):
        path = SKIP.save(tmp_path / "skip.csv")
    assert load_schedule(path, topology=SKIP.topology) == SKIP


def test_a_bidirectional_csv_taken_for_a_chain_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "two.csv"
    for name in ("chimera", "dualpipe"):
        for lowered in (False, True):
            two = build_schedule(name, ranks=4, microbatches=8)
            two = lower(two) if lowered else two
            with pytest.warns(UserWarning, match="does not say the topology"):
                two.save(path)
            with pytest.warns(UserWarning, match="if it is one, say topology bidirectional"):
                load_schedule(path)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                assert load_schedule(path, topology="bidirectional") == two
                load_schedule(path, topology="chain")


def test_communication_is_recognised(tmp_path: Path) -> None:
    path = tmp_path / "it.csv"
    path.write_text("0F0,0SEND_F0\n1RECV_F0,1F0\n")
    assert load_schedule(path).has_communication
    path.write_text("0F0\n1F0\n")
    assert not load_schedule(path).has_communication


def test_what_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(ParseError, match=r"ends in \.csv or \.json"):
        load_schedule(tmp_path / "it.txt")
    with pytest.raises(ParseError, match="cannot be read: No such file"):
        load_schedule(tmp_path / "none.csv")
    path = tmp_path / "it.csv"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ParseError, match="not a text file"):
        load_schedule(path)
    path.write_text("0F0,0B0,bad\n")
    with pytest.raises(ParseError, match=r"it\.csv is not a schedule, a bad cell:"):
        load_schedule(path)
    path.write_text("0F0,0B0\n1F0,1B0\n2F0,2B0\n")
    with pytest.raises(ScheduleError, match="even number of stages, this one has 3"):
        load_schedule(path, topology="bidirectional")
    with pytest.raises(ScheduleError, match="not 'ring'"):
        load_schedule(path, topology="ring")  # type: ignore[arg-type]
    path = CHAIN.save(tmp_path / "it.json")
    with pytest.raises(ScheduleError, match="carries its topology"):
        load_schedule(path, topology="chain")


def test_an_unknown_suffix_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match="simulate it and save the timeline"):
        CHAIN.save(tmp_path / "it.png")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    path = tmp_path / "none" / "it.csv"
    with pytest.raises(FileNotFoundError) as caught:
        CHAIN.save(path)
    assert str(caught.value) == f"[Errno 2] No such file or directory: {str(path)!r}"
    folder = tmp_path / "it.csv"
    folder.mkdir()
    with pytest.raises(OSError, match="directory") as caught_too:
        CHAIN.save(folder)
    assert str(caught_too.value).endswith(f": {str(folder)!r}")
    assert list(tmp_path.iterdir()) == [folder]


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = CHAIN.save(tmp_path / "it.json")
    SKIP.save(path)
    assert load_schedule(path) == SKIP
    assert list(tmp_path.iterdir()) == [path]


def changed(**fields: Any) -> str:
    data = json.loads(schedule_to_json(CHAIN))
    data.update(fields)
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("1" * 10_000, "is not JSON"),
        ("[]", "is not a schedule"),
        ('{"pipeloom": "timeline"}', 'does not say "pipeloom": "schedule"'),
        (changed(version=99), "has version 99, this pipeloom reads version 1"),
        (changed(version=None), "has version None"),
        (changed(microbatches="2"), '"microbatches" must be int'),
        (changed(microbatches=True), '"microbatches" must be int'),
        (changed(microbatches=-1), '"microbatches" must be a number from 0'),
        (changed(microbatches=10**12), '"microbatches" must be a number from 0 to 1000000'),
        (changed(name=3), '"name" must be str'),
        (changed(name="\ud800"), r"must be text that can be written, not '\ud800'"),
        (changed(placement=None), '"placement" must be an object'),
        (changed(placement={"ranks": 2, "rank_of_stage": [0, -1]}), '"rank_of_stage" must be'),
        (changed(placement={"ranks": 1, "rank_of_stage": [0, 1]}), "stage 1 on rank 1"),
        (changed(topology={"chains": [[0, 0]]}), "each of the stages"),
        (changed(topology={"chains": [[0, "1"]]}), '"chains" must be a list of numbers'),
        (changed(topology={"chains": [[0, 1]], "extra_edges": [[0]]}), "pairs of stages"),
        (changed(actions="0F0"), '"actions" must be a list of lists of texts'),
        (changed(actions=[["0F0", 3]]), '"actions" must be a list of lists of texts'),
        (changed(actions=[["0F0"], ["1Fx"]]), "row 2, column 1"),
    ],
)
def test_bad_json(text: str, why: str) -> None:
    with pytest.raises(ParseError) as caught:
        schedule_from_json(text, source="my.json")
    assert "my.json" in str(caught.value)
    assert why in str(caught.value)


def test_all_bad_fields_are_named_together() -> None:
    text = changed(microbatches=None, name=3, placement={"ranks": "2", "rank_of_stage": 0})
    with pytest.raises(ParseError) as caught:
        schedule_from_json(text)
    for field in ("microbatches", "name", "ranks", "rank_of_stage"):
        assert f'"{field}"' in str(caught.value)


def test_ranks_without_actions_are_kept() -> None:
    schedule = Schedule(
        Placement((0,), 3), Topology.chain(1), 1, (parse_grid("0F0").actions[0], (), ())
    )
    assert schedule_from_json(schedule_to_json(schedule)) == schedule
