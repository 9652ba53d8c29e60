"""Four irregular schedules that no family of the library makes, as text and as Python.

They are what people write by hand: stages dealt unevenly, weights in an order of their own,
communication reordered. Everything that takes a schedule must take these.

    V_SHAPED()                        2 ranks, stages 0,3 | 1,2
    UNBALANCED()                      2 ranks, stages 0,1,4 | 2,3
    SEPARATE_WEIGHTS()                2 ranks, stages 0,2 | 1,3; I and W apart, W out of order
    REORDERED_WITH_COMMUNICATION()    2 ranks; both forwards, both receives, then backwards 0, 1

Each is a function that makes the schedule in Python; ``TEXTS[name]`` is the same as CSV text.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

from pipeloom.ir.action import Action, Kind
from pipeloom.ir.placement import Placement
from pipeloom.ir.schedule import Schedule, make_schedule
from pipeloom.ir.topology import Topology

V_SHAPED_TEXT = """\
0F0,0F1,3F0,3B0,3F1,3B1,0B0,0B1
1F0,2F0,1F1,2F1,2B0,1B0,2B1,1B1
"""

UNBALANCED_TEXT = """\
0F0,1F0,0F1,1F1,4F0,4B0,4F1,4B1,1B0,0B0,1B1,0B1
2F0,3F0,2F1,3F1,3B0,2B0,3B1,2B1
"""

SEPARATE_WEIGHTS_TEXT = """\
0F0,0F1,2F0,2F1,2I0,2W0,2I1,0I0,0W0,0I1,2W1,0W1
1F0,1F1,3F0,3I0,3F1,3I1,3W1,1I0,1I1,1W1,3W0,1W0
"""

REORDERED_WITH_COMMUNICATION_TEXT = """\
0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0RECV_B1,0B0,0B1
1RECV_F0,1RECV_F1,1F0,1F1,1B0,1SEND_B0,1B1,1SEND_B1
"""


def _F(stage: int, microbatch: int) -> Action:
    return Action(Kind.F, stage, microbatch)


def _B(stage: int, microbatch: int) -> Action:
    return Action(Kind.B, stage, microbatch)


def _I(stage: int, microbatch: int) -> Action:
    return Action(Kind.I, stage, microbatch)


def _W(stage: int, microbatch: int) -> Action:
    return Action(Kind.W, stage, microbatch)


def V_SHAPED() -> Schedule:
    rows = [
        [_F(0, 0), _F(0, 1), _F(3, 0), _B(3, 0), _F(3, 1), _B(3, 1), _B(0, 0), _B(0, 1)],
        [_F(1, 0), _F(2, 0), _F(1, 1), _F(2, 1), _B(2, 0), _B(1, 0), _B(2, 1), _B(1, 1)],
    ]
    return make_schedule(rows, name="v_shaped")


def UNBALANCED() -> Schedule:
    fill = [_F(0, 0), _F(1, 0), _F(0, 1), _F(1, 1)]
    turn = [_F(4, 0), _B(4, 0), _F(4, 1), _B(4, 1)]
    drain = [_B(1, 0), _B(0, 0), _B(1, 1), _B(0, 1)]
    rows = [
        fill + turn + drain,
        [_F(2, 0), _F(3, 0), _F(2, 1), _F(3, 1), _B(3, 0), _B(2, 0), _B(3, 1), _B(2, 1)],
    ]
    return make_schedule(rows, name="unbalanced")


def SEPARATE_WEIGHTS() -> Schedule:
    fill_even = (_F(0, 0), _F(0, 1), _F(2, 0), _F(2, 1))
    rest_even = (_I(2, 0), _W(2, 0), _I(2, 1), _I(0, 0), _W(0, 0), _I(0, 1), _W(2, 1), _W(0, 1))
    fill_odd = (_F(1, 0), _F(1, 1), _F(3, 0), _I(3, 0), _F(3, 1), _I(3, 1))
    rest_odd = (_W(3, 1), _I(1, 0), _I(1, 1), _W(1, 1), _W(3, 0), _W(1, 0))
    return Schedule(
        placement=Placement.loop(2, 2),
        topology=Topology.chain(4),
        num_microbatches=2,
        actions=(fill_even + rest_even, fill_odd + rest_odd),
        name="separate_weights",
    )


def REORDERED_WITH_COMMUNICATION() -> Schedule:
    def send_F(microbatch: int) -> Action:
        return Action(Kind.SEND_F, 0, microbatch)

    def receive_F(microbatch: int) -> Action:
        return Action(Kind.RECV_F, 1, microbatch)

    def send_B(microbatch: int) -> Action:
        return Action(Kind.SEND_B, 1, microbatch)

    def receive_B(microbatch: int) -> Action:
        return Action(Kind.RECV_B, 0, microbatch)

    rows = [
        [_F(0, 0), send_F(0), _F(0, 1), send_F(1), receive_B(0), receive_B(1), _B(0, 0), _B(0, 1)],
        [receive_F(0), receive_F(1), _F(1, 0), _F(1, 1), _B(1, 0), send_B(0), _B(1, 1), send_B(1)],
    ]
    return make_schedule(rows, name="reordered_with_communication")


#: Name → the function that makes it, for tests that go through all of them.
ZOO: MappingProxyType[str, Callable[[], Schedule]] = MappingProxyType(
    {
        "V_SHAPED": V_SHAPED,
        "UNBALANCED": UNBALANCED,
        "SEPARATE_WEIGHTS": SEPARATE_WEIGHTS,
        "REORDERED_WITH_COMMUNICATION": REORDERED_WITH_COMMUNICATION,
    }
)

#: Name → the same schedule as CSV text.
TEXTS: MappingProxyType[str, str] = MappingProxyType(
    {
        "V_SHAPED": V_SHAPED_TEXT,
        "UNBALANCED": UNBALANCED_TEXT,
        "SEPARATE_WEIGHTS": SEPARATE_WEIGHTS_TEXT,
        "REORDERED_WITH_COMMUNICATION": REORDERED_WITH_COMMUNICATION_TEXT,
    }
)
