"""Chains, two chains and skip connections."""

from __future__ import annotations

import pytest

from pipeloom.errors import ScheduleError
from pipeloom.ir.topology import Topology


def test_a_chain() -> None:
    chain = Topology.chain(4)
    assert [chain.successors(s) for s in range(4)] == [(1,), (2,), (3,), ()]
    assert [chain.predecessors(s) for s in range(4)] == [(), (0,), (1,), (2,)]
    assert (chain.first_stages, chain.last_stages) == ((0,), (3,))
    assert chain.is_chain
    assert chain.copies_of(2) == (2,)
    assert chain.microbatches_of(3, 8) == range(8)


def test_two_chains() -> None:
    both = Topology.bidirectional(3)
    assert both.successors(2) == ()
    assert both.successors(3) == (4,)
    assert both.predecessors(3) == ()
    assert (both.first_stages, both.last_stages) == ((0, 3), (2, 5))
    assert both.copies_of(1) == both.copies_of(4) == (1, 4)
    assert not both.is_chain


@pytest.mark.parametrize("num_microbatches", range(1, 10))
@pytest.mark.parametrize("topology", [Topology.chain(2), Topology.bidirectional(2)])
def test_every_microbatch_takes_one_chain(topology: Topology, num_microbatches: int) -> None:
    shares = [
        list(topology.microbatches_of_chain(chain, num_microbatches))
        for chain in range(len(topology.chains))
    ]
    assert [microbatch for share in shares for microbatch in share] == list(range(num_microbatches))
    for chain, share in enumerate(shares):
        for microbatch in share:
            assert topology.chain_of_microbatch(microbatch, num_microbatches) == chain


def test_a_microbatch_that_is_none_has_no_chain() -> None:
    with pytest.raises(ScheduleError, match="microbatch 8 is not one of the 8"):
        Topology.chain(2).chain_of_microbatch(8, 8)


def test_skip_connections() -> None:
    skip = Topology.chain(4).with_edges((0, 3), (0, 2))
    assert skip.successors(0) == (1, 3, 2)
    assert skip.predecessors(3) == (0, 2)
    assert not skip.is_chain
    assert skip != Topology.chain(4)


def test_stages_of_a_chain_need_not_be_in_order() -> None:
    odd = Topology(((2, 0, 1),))
    assert odd.successors(2) == (0,)
    assert (odd.first_stages, odd.last_stages) == ((2,), (1,))
    assert not odd.is_chain


def test_topologies_are_values() -> None:
    assert Topology.chain(3) == Topology(((0, 1, 2),))
    assert hash(Topology.chain(3)) == hash(Topology(((0, 1, 2),)))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Topology(()), "at least one stage"),
        (lambda: Topology(((0,), ())), "at least one stage"),
        (lambda: Topology(((0, 2),)), "each of the stages 0..1 once"),
        (lambda: Topology(((0, 1), (1, 2))), "each of the stages 0..3 once"),
        (lambda: Topology.chain(3).with_edges((0, 7)), "0→7 names a stage that is in no chain"),
        (lambda: Topology.chain(3).with_edges((2, 0)), "2→0 does not lead forward"),
        (lambda: Topology.chain(3).with_edges((1, 1)), "1→1 does not lead forward"),
        (lambda: Topology.chain(3).with_edges((0, 1)), "0→1 is there twice"),
        (lambda: Topology.chain(3).with_edges((0, 2), (0, 2)), "0→2 is there twice"),
        (lambda: Topology.bidirectional(2).with_edges((0, 3)), "within one chain"),
        (lambda: Topology(((0, 1),), (), ((0, 0),)), "at most once"),
        (lambda: Topology(((0, 1),), (), ((0, 5),)), "known stages"),
    ],
)
def test_what_is_no_topology(make, why: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ScheduleError, match=why):
        make()


def test_all_problems_are_named_together() -> None:
    with pytest.raises(ScheduleError) as caught:
        Topology.chain(3).with_edges((2, 0), (0, 1))
    assert "2→0" in str(caught.value)
    assert "0→1" in str(caught.value)
