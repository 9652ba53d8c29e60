"""The table, row by row, against the words of the schedule language.

Stages 0 → 1 → 2 → 3 with a skip 0 → 2; stages 1 and 2 share a rank.
"""

from __future__ import annotations

import pytest

from pipeloom.errors import ScheduleError
from pipeloom.ir.action import Kind
from pipeloom.ir.dependencies import (
    RULES,
    Dependencies,
    Role,
)
from pipeloom.ir.notation import parse_action
from pipeloom.ir.placement import Placement
from pipeloom.ir.questions import (
    halves_of,
    is_backward,
    is_communication,
    is_compute,
    role_of,
    whole_of,
)
from pipeloom.ir.topology import Topology

TOPOLOGY = Topology.chain(4).with_edges((0, 2))
PLACEMENT = Placement((0, 1, 1, 0), 2)


def make_table(
    *, has_communication: bool = False, has_backward: bool = True, num_microbatches: int = 2
) -> Dependencies:
    return Dependencies(
        TOPOLOGY,
        PLACEMENT,
        num_microbatches=num_microbatches,
        has_communication=has_communication,
        has_backward=has_backward,
    )


def words(products: tuple[tuple[str, int, int | None, int | None], ...]) -> list[str]:
    """("received output", 1, 0, 0) as "received output 1 0<0"."""
    return [
        f"{what} {stage}"
        + ("" if microbatch is None else f" {microbatch}")
        + ("" if other is None else f" with {other}")
        for what, stage, microbatch, other in products
    ]


@pytest.mark.parametrize(
    ("text", "compute_only", "with_communication"),
    [
        ("0F1", [], []),
        ("1F1", ["output 0 1"], ["received output 1 1 with 0"]),
        (
            "2F1",
            ["output 0 1", "output 1 1"],
            ["received output 2 1 with 0", "output 1 1"],
        ),
        ("3F1", ["output 2 1"], ["received output 3 1 with 2"]),
        ("3B1", ["output 3 1"], ["output 3 1"]),
        (
            "0I1",
            ["output 0 1", "input gradient 1 1", "input gradient 2 1"],
            [
                "output 0 1",
                "received gradient 0 1 with 1",
                "received gradient 0 1 with 2",
            ],
        ),
        ("1B1", ["output 1 1", "input gradient 2 1"], ["output 1 1", "input gradient 2 1"]),
        ("2W1", ["pending weights 2 1"], ["pending weights 2 1"]),
        ("2SEND_F1", ["output 2 1"], ["output 2 1"]),
        ("0SEND_F1>2", ["output 0 1"], ["output 0 1"]),
        ("3RECV_F1", ["sent output 2 1 with 3"], ["sent output 2 1 with 3"]),
        ("2RECV_F1<0", ["sent output 0 1 with 2"], ["sent output 0 1 with 2"]),
        ("2SEND_B1>0", ["input gradient 2 1"], ["input gradient 2 1"]),
        ("0RECV_B1<2", ["sent gradient 2 1 with 0"], ["sent gradient 2 1 with 0"]),
        ("1UNSHARD", [], []),
        ("1RESHARD", [], []),
        (
            "1REDUCE_GRAD",
            ["weight gradient 1 0", "weight gradient 1 1"],
            ["weight gradient 1 0", "weight gradient 1 1"],
        ),
        ("(0F1;3B0)OVERLAP_F_B", ["output 3 0"], ["output 3 0"]),
    ],
)
def test_what_an_action_waits_for(
    text: str, compute_only: list[str], with_communication: list[str]
) -> None:
    action = parse_action(text)
    # The order in which needs are named is no promise.
    assert sorted(words(make_table().needs(action))) == sorted(compute_only)
    table = make_table(has_communication=True)
    assert sorted(words(table.needs(action))) == sorted(with_communication)


@pytest.mark.parametrize(
    ("text", "produces"),
    [
        ("1F1", ["output 1 1"]),
        ("1B1", ["input gradient 1 1", "weight gradient 1 1"]),
        ("1I1", ["input gradient 1 1", "pending weights 1 1"]),
        ("1W1", ["weight gradient 1 1"]),
        ("2SEND_F1", ["sent output 2 1 with 3"]),
        ("3RECV_F1", ["received output 3 1 with 2"]),
        ("3SEND_B1", ["sent gradient 3 1 with 2"]),
        ("2RECV_B1", ["received gradient 2 1 with 3"]),
        ("1UNSHARD", []),
        ("1REDUCE_GRAD", ["reduced gradient 1"]),
        ("(0F1;3B0)OVERLAP_F_B", ["output 0 1", "input gradient 3 0", "weight gradient 3 0"]),
    ],
)
def test_what_an_action_produces(text: str, produces: list[str]) -> None:
    assert words(make_table().produces(parse_action(text))) == produces


def test_full_and_split_backward_come_to_the_same() -> None:
    table = make_table()
    full = set(table.produces(parse_action("1B0")))
    split = {*table.produces(parse_action("1I0")), *table.produces(parse_action("1W0"))}
    assert split - full == {("pending weights", 1, 0, None)}
    assert full < split


@pytest.mark.parametrize("steps", [["B"], ["I", "W"]])
@pytest.mark.parametrize("stage", range(4))
def test_all_that_a_microbatch_allocates_is_freed(stage: int, steps: list[str]) -> None:
    table = make_table(has_communication=True)
    alive: set[object] = set()
    receives = {0: ["0RECV_B0<1", "0RECV_B0<2"], 1: ["1RECV_F0"], 2: ["2RECV_F0<0", "2RECV_B0"]}
    receives[3] = ["3RECV_F0"]
    for text in [*receives[stage], f"{stage}F0", *(f"{stage}{step}0" for step in steps)]:
        action = parse_action(text)
        gone = set(table.frees(action))
        assert gone <= alive | set(table.allocates(action))
        alive = (alive | set(table.allocates(action))) - gone
    assert alive == set()


def test_a_forward_only_program_frees_at_once() -> None:
    table = make_table(has_communication=True, has_backward=False)
    action = parse_action("1F0")
    assert words(table.frees(action)) == ["activation 1 0", "received output 1 0 with 0"]
    assert words(make_table(has_communication=True).frees(action)) == []


def test_what_stays_between_the_halves_of_a_backward() -> None:
    table = make_table(has_communication=True)
    assert words(table.frees(parse_action("2I0"))) == [
        "activation 2 0",
        "received gradient 2 0 with 3",
    ]
    assert words(table.allocates(parse_action("2I0"))) == ["retained 2 0"]
    assert words(table.frees(parse_action("2W0"))) == [
        "retained 2 0",
        "received output 2 0 with 0",
    ]


def test_parameters_are_held_between_gathering_and_release() -> None:
    table = make_table()
    assert words(table.allocates(parse_action("1UNSHARD"))) == ["gathered parameters 1"]
    assert words(table.frees(parse_action("1RESHARD"))) == ["gathered parameters 1"]


@pytest.mark.parametrize(
    ("send", "receive", "ranks"),
    [
        ("0SEND_F1>1", "1RECV_F1", (0, 1)),
        ("0SEND_F1>2", "2RECV_F1<0", (0, 1)),
        ("2SEND_F1", "3RECV_F1", (1, 0)),
        ("3SEND_B1", "2RECV_B1", (0, 1)),
        ("2SEND_B1>0", "0RECV_B1<2", (1, 0)),
        ("1SEND_B1", "0RECV_B1<1", (1, 0)),
    ],
)
def test_both_ends_of_a_message(send: str, receive: str, ranks: tuple[int, int]) -> None:
    table = make_table(has_communication=True)
    message = table.message_of(parse_action(send))
    assert message == table.message_of(parse_action(receive))
    assert table.ranks_of_message(message) == ranks
    (product,) = table.needs(parse_action(send))
    assert table.make_message(product, table.peer_of(parse_action(send))) == (
        parse_action(send),
        parse_action(receive),
    )


def test_peers() -> None:
    table = make_table()
    assert table.peer_of(parse_action("1SEND_F0")) == 2
    assert table.peer_of(parse_action("1SEND_F0>2")) == 2, "said although it is plain"
    assert sorted(table.peers_of(parse_action("2RECV_F0"))) == [0, 1]
    for wrong in ("0SEND_F0", "0SEND_F0>3", "3SEND_F0", "0SEND_B0", "2RECV_F0", "3RECV_B0"):
        with pytest.raises(ScheduleError, match=f"{wrong} does not name an edge"):
            table.peer_of(parse_action(wrong))


def test_remote_consumers() -> None:
    table = make_table()
    assert sorted(table.remote_consumers(("output", 0, 0, None))) == [1, 2]
    assert table.remote_consumers(("output", 1, 0, None)) == []
    assert table.remote_consumers(("input gradient", 2, 0, None)) == [0]
    assert table.remote_consumers(("weight gradient", 2, 0, None)) == []


def test_required_products() -> None:
    required = list(make_table().required_products())
    assert len(required) == len(set(required)) == 4 * 2 * 3
    forward_only = list(make_table(has_backward=False).required_products())
    assert {what for what, *_ in forward_only} == {"output"}
    both = Dependencies(Topology.bidirectional(2), PLACEMENT, num_microbatches=4)
    outputs = [(stage, m) for what, stage, m, _ in both.required_products() if what == "output"]
    assert outputs == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 2), (2, 3), (3, 2), (3, 3)]


def test_partners() -> None:
    both = Dependencies(Topology.bidirectional(2), PLACEMENT, num_microbatches=4)
    assert both.partners_of(parse_action("1REDUCE_GRAD")) == (parse_action("3REDUCE_GRAD"),)
    assert both.partners_of(parse_action("1F0")) == ()
    assert make_table().partners_of(parse_action("1REDUCE_GRAD")) == ()


def test_every_kind_has_a_row_and_a_role() -> None:
    assert set(RULES) == set(Kind)
    assert {kind.value for kind in Kind if RULES[kind].lane == "compute"} == {
        "F",
        "B",
        "I",
        "W",
        "OVERLAP_F_B",
    }
    assert role_of(parse_action("1RECV_F0")) is Role.RECEIVE
    assert is_communication(parse_action("1SEND_B0"))
    assert not is_communication(parse_action("1UNSHARD"))
    assert is_compute(parse_action("(0F1;1B0)OVERLAP_F_B"))
    assert is_backward(parse_action("(0F1;1I0)OVERLAP_F_B"))
    assert not is_backward(parse_action("1SEND_B0"))


def test_halves_and_wholes() -> None:
    halves = halves_of(parse_action("2B3"))
    assert halves is not None
    assert whole_of(*halves) == parse_action("2B3")
    assert halves_of(parse_action("2F3")) is None
    assert whole_of(parse_action("2I3"), parse_action("2W4")) is None
    assert whole_of(parse_action("2W3"), parse_action("2I3")) is None
