"""Messages are inserted for the edges between ranks, where they hold up no one."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from pipeloom.errors import ScheduleError, VerificationError
from pipeloom.ir.notation import format_grid, parse_csv, parse_grid
from pipeloom.ir.questions import is_communication
from pipeloom.ir.schedule import Schedule, make_schedule
from pipeloom.ir.topology import Topology
from pipeloom.passes.insert_communication import insert_communication
from pipeloom.passes.strip_communication import strip_communication
from pipeloom.verify.verifier import verify
from unit.passes.blocking_run import edges_of, find_stuck

REFERENCE = Path(__file__).parents[2] / "data" / "reference"
ORDERS = sorted([*(REFERENCE / "orders").glob("*.csv")])

ONE_F_ONE_B = """
rank 0  0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
rank 1  1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3
rank 2  2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3
"""

LOWERED = """\
# 1f1b · 3 ranks · 3 stages · 4 microbatches
 step   rank 0    rank 1    rank 2
    0   0F0       1RECV_F0  2RECV_F0
    1   0SEND_F0  1F0       2F0
    2   0F1       1RECV_F1  2RECV_F1
    3   0SEND_F1  1SEND_F0  2B0
    4   0F2       1F1       2SEND_B0
    5   0SEND_F2  1RECV_F2  2F1
    6   0RECV_B0  1SEND_F1  2B1
    7   0B0       1RECV_B0  2RECV_F2
    8   0F3       1B0       2SEND_B1
    9   0SEND_F3  1SEND_B0  2F2
   10   0RECV_B1  1F2       2B2
   11   0B1       1SEND_F2  2RECV_F3
   12   0RECV_B2  1RECV_B1  2SEND_B2
   13   0B2       1B1       2F3
   14   0RECV_B3  1RECV_F3  2B3
   15   0B3       1SEND_B1  2SEND_B3
   16             1F3
   17             1SEND_F3
   18             1RECV_B2
   19             1B2
   20             1SEND_B2
   21             1RECV_B3
   22             1B3
   23             1SEND_B3"""


def messages_of(schedule: Schedule) -> list[Counter[str]]:
    return [Counter(str(a) for a in row if is_communication(a)) for row in schedule.actions]


def assert_runs_blocking(schedule: Schedule) -> None:
    rows = [map(str, row) for row in schedule.actions]
    assert find_stuck(rows, edges_of(schedule.topology)) == []
    verify(schedule, sends="blocking", channel="all").raise_for_errors()


def test_the_order_of_1f1b() -> None:
    lowered = insert_communication(parse_grid(ONE_F_ONE_B, name="1f1b"))
    assert format_grid(lowered, ranks_as="columns") == LOWERED
    assert_runs_blocking(lowered)


def test_nothing_is_sent_within_a_rank() -> None:
    lowered = insert_communication(parse_grid("0F0 3F0 3B0 0B0\n1F0 2F0 2B0 1B0"))
    assert [sum(row.values()) for row in messages_of(lowered)] == [4, 4]
    assert "1SEND_F0" not in str(lowered)
    assert "2RECV_F0" not in str(lowered)
    assert_runs_blocking(lowered)


def test_one_rank_has_no_messages_but_is_a_complete_program() -> None:
    lowered = insert_communication(parse_grid("0F0 1F0 1B0 0B0"))
    assert lowered.has_communication
    assert str(lowered).splitlines()[1] == "rank 0   0F0  1F0  1B0  0B0"


def test_skip_connections_name_their_peers() -> None:
    rows = parse_csv("0F0,0B0\n1F0,1B0\n2F0,2B0\n")
    lowered = insert_communication(
        make_schedule(rows, topology=Topology.chain(3).with_edges((0, 2)))
    )
    assert messages_of(lowered) == [
        Counter(["0SEND_F0>1", "0SEND_F0>2", "0RECV_B0<1", "0RECV_B0<2"]),
        Counter(["1RECV_F0", "1SEND_F0", "1RECV_B0", "1SEND_B0"]),
        Counter(["2RECV_F0<1", "2RECV_F0<0", "2SEND_B0>1", "2SEND_B0>0"]),
    ]
    assert_runs_blocking(lowered)


def test_two_chains_run_in_opposite_directions() -> None:
    rows = parse_csv("0F0,3F1,3B1,0B0\n2F1,1F0,1B0,2B1\n")
    schedule = make_schedule(rows, topology=Topology.bidirectional(2))
    lowered = insert_communication(schedule)
    assert messages_of(lowered) == [
        Counter(["0SEND_F0", "0RECV_B0", "3RECV_F1", "3SEND_B1"]),
        Counter(["1RECV_F0", "1SEND_B0", "2SEND_F1", "2RECV_B1"]),
    ]
    assert_runs_blocking(lowered)


def test_fused_actions_send_what_each_part_produces() -> None:
    schedule = parse_grid("0F0 (0F1;0B0)OVERLAP_F_B 0B1\n1F0 1B0 1F1 1B1")
    lowered = insert_communication(schedule)
    assert [str(action) for action in lowered.actions[0]] == [
        *("0F0", "0SEND_F0", "0RECV_B0", "(0F1;0B0)OVERLAP_F_B", "0SEND_F1", "0RECV_B1", "0B1")
    ]
    assert_runs_blocking(lowered)


def test_an_exchange_between_copies_is_met_by_both_ranks() -> None:
    rows = parse_csv(
        "0F0,3F1,3B1,3REDUCE_GRAD,0B0,0REDUCE_GRAD\n2F1,1F0,1B0,1REDUCE_GRAD,2B1,2REDUCE_GRAD\n"
    )
    schedule = make_schedule(rows, topology=Topology.bidirectional(2))
    assert_runs_blocking(insert_communication(schedule))


@pytest.mark.parametrize("path", ORDERS, ids=lambda path: path.stem)
def test_torch_inserts_the_same_messages(path: Path) -> None:
    pipelining = pytest.importorskip("torch.distributed.pipelining.schedules")
    schedule = make_schedule(parse_csv(path.read_text()), name=path.stem)
    rank_of = schedule.placement.rank_of
    theirs = pipelining._add_send_recv(
        {
            rank: [pipelining._Action.from_str(str(action)) for action in row]
            for rank, row in enumerate(schedule.actions)
        },
        stage_to_rank=rank_of,
        num_stages=schedule.num_stages,
    )
    lowered = insert_communication(schedule)
    for rank, row in enumerate(messages_of(lowered)):
        messages = Counter(map(str, theirs[rank])) - Counter(map(str, schedule.actions[rank]))
        assert row == messages
    assert strip_communication(lowered) == schedule
    assert_runs_blocking(lowered)


@pytest.mark.parametrize(
    "path", sorted((REFERENCE / "orders_by_reference").glob("*.csv")), ids=lambda path: path.stem
)
def test_published_orders_run_blocking(path: Path) -> None:
    rows = parse_csv(path.read_text())
    two_chains = path.stem.startswith(("Chimera", "DualPipe_"))
    num_stages = make_schedule(rows).num_stages
    topology = Topology.bidirectional(num_stages // 2) if two_chains else None
    lowered = insert_communication(make_schedule(rows, topology=topology, name=path.stem))
    assert find_stuck([map(str, row) for row in lowered.actions], edges_of(lowered.topology)) == []


def test_neighbouring_ranks_take_turns_rather_than_passing_a_wave() -> None:
    """At an instant at which every rank has sent to the next, the pairs 0–1 and 2–3 go first."""
    grid = "\n".join(f"{s}F0 {s}F1 {s}F2 {s}F3" for s in range(4))
    lowered = insert_communication(parse_grid(grid))
    order = [str(a) for a in lowered.actions[1]]
    assert order.index("1RECV_F3") < order.index("1SEND_F2")
    order = [str(a) for a in lowered.actions[2]]
    assert order.index("2SEND_F1") < order.index("2RECV_F2")


def test_a_receive_neither_waits_for_its_consumer_nor_stands_before_other_work() -> None:
    # Rank 1 has nothing to do until 0F0 arrives; 0F1 arrives while 1F0 runs.
    lowered = insert_communication(parse_grid("0F0 0F1\n1F0 1F1"))
    assert list(map(str, lowered.actions[1])) == ["1RECV_F0", "1F0", "1RECV_F1", "1F1"]


def test_a_program_with_communication_is_refused() -> None:
    lowered = insert_communication(parse_grid("0F0 0B0\n1F0 1B0", name="mine"))
    with pytest.raises(ScheduleError, match=r"mine has communication already.*strip_communication"):
        insert_communication(lowered)


def test_what_stands_in_the_wrong_order_is_told() -> None:
    with pytest.raises(VerificationError, match="BACKWARD_BEFORE_FORWARD at rank 0"):
        insert_communication(parse_grid("0B0 0F0\n1F0 1B0"))


def test_ranks_that_wait_for_each_other_are_told() -> None:
    # 0F1 would come after 0B0, which waits for 1B0, which comes after 1F1.
    with pytest.raises(VerificationError) as caught:
        insert_communication(parse_grid("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1"))
    assert "waits at" in str(caught.value)


@pytest.mark.parametrize("grid", ["0F0 0B0\n2F0 2B0", "0F0 1F0\n1B0 0B0"])
def test_what_is_misplaced_is_reported_by_the_verifier(grid: str) -> None:
    with pytest.raises(ScheduleError):
        insert_communication(parse_grid(grid))
