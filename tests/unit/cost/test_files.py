"""Cost files: what is written is read, and every bad field is reported."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeloom import (
    CostFileError,
    Link,
    Network,
    StageCosts,
    UniformCosts,
    load_costs,
    save_costs,
)
from pipeloom.cost.files import costs_from_json, costs_to_json


def test_the_shortest_file() -> None:
    text = (
        '{"forward": 1, "input": 1, "weight": 1, "latency": 0.1, "activation": 1, "retained": 0.5}'
    )
    assert costs_from_json(text) == UniformCosts(1, 1, 1, latency=0.1, retained=0.5)


def test_lists_make_costs_per_stage() -> None:
    costs = costs_from_json('{"forward": [1, 2], "input": 1, "weight": 1}')
    assert costs == StageCosts([1, 2], 1, 1)


FULL = StageCosts(
    [1, 2],
    1,
    [1, 0.5],
    full=3,
    latency=0.1,
    activation=[5, 6],
    retained=[0.5, 1],
    overlap=0.9,
    unshard=1,
    reshard=0.5,
    reduce_grad=[1, 1],
    boundary=0.25,
    weights=[10, 20],
    gradients=3,
    optimizer=4,
    speeds={1: 0.5},
    time_unit="ms",
    memory_unit="GiB",
    network=Network(
        ranks_per_node=2,
        within_node=Link(0.1, 300),
        between_nodes=Link(1),
        edges={(0, 1): Link(2, 3)},
    ),
)


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    path = save_costs(FULL, tmp_path / "costs.json")
    assert load_costs(path) == FULL
    assert [p.name for p in tmp_path.iterdir()] == ["costs.json"]


numbers = st.floats(0, 1e6, allow_nan=False)


@given(st.tuples(numbers, numbers, numbers, numbers), st.floats(0, 1), st.sampled_from([1, "max"]))
def test_any_costs_survive_a_file(
    values: tuple[float, float, float, float], retained: float, overlap: object
) -> None:
    forward, input_, weight, latency = values
    for made in (
        UniformCosts(forward, input_, weight, latency=latency, retained=retained, overlap=overlap),
        StageCosts([forward, 1], input_, weight, latency=latency, retained=[retained, 0]),
    ):
        assert costs_from_json(costs_to_json(made)) == made


def test_every_bad_field_is_reported() -> None:
    with pytest.raises(CostFileError) as caught:
        costs_from_json(
            """{"pipeloom": "costs", "version": 9, "forward": [1, -2, "x"], "input": NaN,
            "latencies": 3, "retained": 2, "bandwidth": 0, "overlap": "mean", "memory_unit": 5,
            "speeds": [1, 0], "unshard": null, "extra_last": 1,
            "network": {"ranks_per_node": 0, "edges": {"0-1": {}, "0>1": {"latency": -1}},
                        "within_node": 3, "nodes": 2, "link": {"speed": 1}}}""",
            source="costs.json",
        )
    lines = str(caught.value).splitlines()
    assert lines[0] == "costs.json is not a cost file:"
    told = "\n".join(lines[1:])
    for part in (
        *('"version" is 9', '"forward[1]"', '"forward[2]"', '"input"', '"weight" is missing'),
        *('"latencies" is no field of a cost file; did you mean "latency"?', "from 0 to 1"),
        *('"bandwidth"', '"overlap"', '"memory_unit"', '"speeds[1]"', '"unshard"'),
        *("where there are lists, say it in the list", '"network.ranks_per_node"'),
        *("an edge between ranks is written", '"network.edges[0>1].latency"'),
        *('"network.within_node" must be an object', '"network.nodes"', '"network.link.speed"'),
    ):
        assert part in told, part


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not JSON"),
        ("[1]", "must be an object"),
        ('{"pipeloom": "schedule"}', "something else"),
        ('{"forward": [1, 2], "input": [1], "weight": 1}', "one number per stage"),
        ('{"forward": [], "input": 1, "weight": 1, "network": 3}', "must be an object"),
        ("[" * 100_000, "is not JSON"),
        ('{"forward": ' + "1" * 5000 + "}", "is not JSON"),
        ('{"forward": 1' + "0" * 400 + ', "input": 1, "weight": 1}', '"forward" must be a number'),
    ],
)
def test_texts_that_are_no_costs(text: str, message: str) -> None:
    with pytest.raises(CostFileError, match=message):
        costs_from_json(text)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(CostFileError, match=r"cannot be read: No such file"):
        load_costs(tmp_path / "none.json")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00\x01\xff")
    with pytest.raises(CostFileError, match="not a text file"):
        load_costs(tmp_path / "bytes.json")
