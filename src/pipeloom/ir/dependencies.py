"""THE dependency table: what every kind of action waits for, produces, holds and frees.

Passes, verifier, simulator, views and runtime ask here and nowhere else. A new kind of action is
one row in :data:`RULES` (besides its cost, its colour and its handler).

::

                       needs                          produces              memory
    F(s,m)             output of every predecessor    output                + activation
    I(s,m)             output, gradients of successors input gradient        activation → retained
    W(s,m)             pending weights of I(s,m)      weight gradient       − retained
    B(s,m)             as I                           as I and W            − activation
    SEND_F(s,m>t)      output                         sent output
    RECV_F(t,m<s)      sent output (other rank)       received output       + buffer
    SEND_B(t,m>s)      input gradient                 sent gradient
    RECV_B(s,m<t)      sent gradient (other rank)     received gradient     + buffer
    UNSHARD(s)                                        (stage gathered)        + parameters
    RESHARD(s)                                        (stage sharded)         − parameters
    REDUCE_GRAD(s)     weight gradient of every m     reduced gradient

Facts are spelled as *products*, plain tuples (what, stage, microbatch, other stage). An action may
run when all it needs has been produced. In a compute-only schedule F and B need the products of
their neighbours directly, wherever those are; in a program with communication a product of
another rank must have been received.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum
from typing import NamedTuple, TypeAlias

from pipeloom.errors import ScheduleError
from pipeloom.ir.action import Action, Kind
from pipeloom.ir.placement import Placement
from pipeloom.ir.products import (
    ACTIVATION,
    GATHERED,
    INPUT_GRADIENT,
    OUTPUT,
    PENDING_WEIGHTS,
    RECEIVED_GRADIENT,
    RECEIVED_OUTPUT,
    REDUCED_GRADIENT,
    RETAINED,
    SENT_GRADIENT,
    SENT_OUTPUT,
    WEIGHT_GRADIENT,
    Product,
)
from pipeloom.ir.topology import Topology


class Role(Enum):
    """How an action takes part; tools ask for the role, not for the kind."""

    COMPUTE = "compute"
    SEND = "send"
    RECEIVE = "receive"
    SHARDING = "sharding"
    REDUCE = "reduce"
    FUSED = "fused"

    __hash__ = object.__hash__


Rows: TypeAlias = Callable[["Dependencies", Action], tuple[Product, ...]]


def _nothing(_table: Dependencies, _action: Action) -> tuple[Product, ...]:
    return ()


class Rule(NamedTuple):
    """One row of the table."""

    role: Role
    #: The lane of a timeline: "compute", "send", "receive" or "gather".
    lane: str
    meaning: str
    needs: Rows = _nothing
    produces: Rows = _nothing
    allocates: Rows = _nothing
    frees: Rows = _nothing
    has_microbatch: bool = True
    #: Of messages: True for an output on its way forward, False for a gradient on its way back.
    moves_forward: bool = False
    #: Of sharding actions: True if the stage's parameters are whole afterwards.
    gathers: bool = False


class Dependencies:
    """The table, bound to one schedule's shape.

    >>> table = Dependencies(Topology.chain(2), Placement.loop(2), num_microbatches=1)
    >>> table.needs(Action(Kind.B, 0, 0))
    (('output', 0, 0, None), ('input gradient', 1, 0, None))
    """

    def __init__(
        self,
        topology: Topology,
        placement: Placement,
        *,
        num_microbatches: int,
        has_communication: bool = False,
        has_backward: bool = True,
    ) -> None:
        self.topology = topology
        self.placement = placement
        self.num_microbatches = num_microbatches
        self.has_communication = has_communication
        self.has_backward = has_backward
        #: What `peer_of` has found: the same for all microbatches, and asked for every message.
        self._peers: dict[tuple[Kind, int | None, int | None], int] = {}
        stages = range(topology.num_stages)
        ranks = placement.ranks

        def source(stage: int, other: int, local: str, received: str) -> _Source:
            if has_communication and ranks[stage] != ranks[other]:
                return (received, stage, other)
            return (local, other, None)

        self._output_sources: list[tuple[_Source, ...]] = [
            tuple(source(s, p, OUTPUT, RECEIVED_OUTPUT) for p in topology.predecessors(s))
            for s in stages
        ]
        self._gradient_sources: list[tuple[_Source, ...]] = [
            tuple(source(s, t, INPUT_GRADIENT, RECEIVED_GRADIENT) for t in topology.successors(s))
            for s in stages
        ]

    # ── the four questions ───────────────────────────────────────────────────────────────────

    def needs(self, action: Action) -> tuple[Product, ...]:
        """What must have been produced before the action may run."""
        return RULES[action[0]].needs(self, action)

    def produces(self, action: Action) -> tuple[Product, ...]:
        """What others may use once the action has run."""
        return RULES[action[0]].produces(self, action)

    def allocates(self, action: Action) -> tuple[Product, ...]:
        """What begins to take memory on the action's rank: at its start, or, for what a
        computation leaves behind in place of something it frees, at its end."""
        return RULES[action[0]].allocates(self, action)

    def frees(self, action: Action) -> tuple[Product, ...]:
        """What no longer takes memory once the action has ended."""
        return RULES[action[0]].frees(self, action)

    # ── messages ─────────────────────────────────────────────────────────────────────────────

    def peer_of(self, action: Action) -> int:
        """The other stage of a send or receive, also where the action leaves it unsaid."""
        edge = (action[0], action[1], action[4])
        peer = self._peers.get(edge)
        if peer is None:
            peer = self._peers[edge] = self._find_peer(action)
        return peer

    def _find_peer(self, action: Action) -> int:
        candidates = self.peers_of(action)
        if action.peer is not None:
            if action.peer in candidates:
                return action.peer
        elif len(candidates) == 1:
            return candidates[0]
        raise ScheduleError(
            f"{action} does not name an edge of the topology; "
            f"the stages at the other end may be {list(candidates)}"
        )

    def peers_of(self, action: Action) -> tuple[int, ...]:
        """The stages a send or receive of this kind could exchange with."""
        rule = RULES[action.kind]
        assert action.stage is not None
        downstream = rule.moves_forward == (rule.role is Role.SEND)
        if downstream:
            return self.topology.successors(action.stage)
        return self.topology.predecessors(action.stage)

    def message_of(self, action: Action) -> Product:
        """The product that travels: the same for a send and for its receive."""
        rule = RULES[action.kind]
        if rule.role is Role.SEND:
            return rule.produces(self, action)[0]
        return rule.needs(self, action)[0]

    def ranks_of_message(self, message: Product) -> tuple[int, int]:
        """(sending rank, receiving rank): the directed edge the message travels on."""
        _, sender, _, receiver = message
        assert receiver is not None
        return self.placement.rank_of(sender), self.placement.rank_of(receiver)

    def make_message(self, product: Product, to_stage: int) -> tuple[Action, Action]:
        """The send and the receive that bring an output or input gradient to another stage.

        The peer is said only where the edge is not the only one.
        """
        what, stage, microbatch, _ = product
        send, receive = _CARRIERS[what]
        forward = RULES[send].moves_forward
        topology = self.topology
        ahead = topology.successors if forward else topology.predecessors
        behind = topology.predecessors if forward else topology.successors
        return (
            Action(send, stage, microbatch, (), to_stage if len(ahead(stage)) > 1 else None),
            Action(receive, to_stage, microbatch, (), stage if len(behind(to_stage)) > 1 else None),
        )

    def partners_of(self, action: Action) -> tuple[Action, ...]:
        """The actions of other ranks that run together with this one, as one collective: the
        REDUCE_GRAD of the other stages that hold the same part of the model."""
        if RULES[action.kind].role is not Role.REDUCE or action.stage is None:
            return ()
        return tuple(
            action._replace(stage=copy)
            for copy in self.topology.copies_of(action.stage)
            if copy != action.stage
        )

    # ── what a whole program must contain ────────────────────────────────────────────────────

    def required_products(self) -> Iterator[Product]:
        """What a complete program produces, each exactly once, whatever its schedule."""
        whats = (OUTPUT, INPUT_GRADIENT, WEIGHT_GRADIENT) if self.has_backward else (OUTPUT,)
        for stage in range(self.topology.num_stages):
            for microbatch in self.topology.microbatches_of(stage, self.num_microbatches):
                for what in whats:
                    yield (what, stage, microbatch, None)

    def remote_consumers(self, product: Product) -> list[int]:
        """The stages on other ranks that use an output or an input gradient."""
        what, stage, _, _ = product
        if what not in _CARRIERS:
            return []
        forward = what == OUTPUT
        near = self.topology.successors(stage) if forward else self.topology.predecessors(stage)
        ranks = self.placement.ranks
        return [other for other in near if ranks[other] != ranks[stage]]


_Source: TypeAlias = tuple[str, int, int | None]


# ── the rows ─────────────────────────────────────────────────────────────────────────────────────


def _own(what: str) -> Rows:
    """The action's own stage and microbatch."""

    def row(_table: Dependencies, action: Action) -> tuple[Product, ...]:
        return ((what, action[1], action[2], None),)  # type: ignore[return-value]

    return row


def _both(*rows: Rows) -> Rows:
    def row(table: Dependencies, action: Action) -> tuple[Product, ...]:
        return sum((part(table, action) for part in rows), ())

    return row


def _outputs_of_predecessors(table: Dependencies, action: Action) -> tuple[Product, ...]:
    _, stage, microbatch, _, _ = action
    assert stage is not None
    return tuple([(what, s, microbatch, other) for what, s, other in table._output_sources[stage]])


def _output_and_gradients(table: Dependencies, action: Action) -> tuple[Product, ...]:
    _, stage, microbatch, _, _ = action
    assert stage is not None
    return (
        (OUTPUT, stage, microbatch, None),
        *[(what, s, microbatch, other) for what, s, other in table._gradient_sources[stage]],
    )


def _message_out(what: str) -> Rows:
    def row(table: Dependencies, action: Action) -> tuple[Product, ...]:
        return ((what, action[1], action[2], table.peer_of(action)),)  # type: ignore[return-value]

    return row


def _message_in(what: str) -> Rows:
    def row(table: Dependencies, action: Action) -> tuple[Product, ...]:
        return ((what, table.peer_of(action), action[2], action[1]),)

    return row


def _received(sources_of: Callable[[Dependencies], list[tuple[_Source, ...]]]) -> Rows:
    """The receive buffers behind what a computation used."""

    def row(table: Dependencies, action: Action) -> tuple[Product, ...]:
        _, stage, microbatch, _, _ = action
        sources = sources_of(table)[stage]  # type: ignore[index]
        return tuple(
            [(what, s, microbatch, other) for what, s, other in sources if other is not None]
        )

    return row


def _unless_backward(row_without_backward: Rows) -> Rows:
    """In a forward-only program nobody comes later to free what F holds: F does it itself."""

    def row(table: Dependencies, action: Action) -> tuple[Product, ...]:
        return () if table.has_backward else row_without_backward(table, action)

    return row


def _every_weight_gradient(table: Dependencies, action: Action) -> tuple[Product, ...]:
    stage = action.stage
    assert stage is not None
    return tuple(
        (WEIGHT_GRADIENT, stage, microbatch, None)
        for microbatch in table.topology.microbatches_of(stage, table.num_microbatches)
    )


def _reduced(_table: Dependencies, action: Action) -> tuple[Product, ...]:
    return ((REDUCED_GRADIENT, action[1], None, None),)  # type: ignore[return-value]


def _of_parts(question: Callable[[Dependencies, Action], tuple[Product, ...]]) -> Rows:
    def row(table: Dependencies, action: Action) -> tuple[Product, ...]:
        return sum((question(table, part) for part in action[3]), ())

    return row


_input_buffers = _received(lambda table: table._output_sources)
_gradient_buffers = _received(lambda table: table._gradient_sources)

RULES: dict[Kind, Rule] = {
    Kind.F: Rule(
        Role.COMPUTE,
        "compute",
        "forward",
        needs=_outputs_of_predecessors,
        produces=_own(OUTPUT),
        allocates=_own(ACTIVATION),
        frees=_unless_backward(_both(_own(ACTIVATION), _input_buffers)),
    ),
    Kind.B: Rule(
        Role.COMPUTE,
        "compute",
        "full backward: gradients of inputs and weights",
        needs=_output_and_gradients,
        produces=_both(_own(INPUT_GRADIENT), _own(WEIGHT_GRADIENT)),
        frees=_both(_own(ACTIVATION), _input_buffers, _gradient_buffers),
    ),
    Kind.I: Rule(
        Role.COMPUTE,
        "compute",
        "backward of inputs",
        needs=_output_and_gradients,
        produces=_both(_own(INPUT_GRADIENT), _own(PENDING_WEIGHTS)),
        allocates=_own(RETAINED),
        frees=_both(_own(ACTIVATION), _gradient_buffers),
    ),
    Kind.W: Rule(
        Role.COMPUTE,
        "compute",
        "backward of weights",
        needs=_own(PENDING_WEIGHTS),
        produces=_own(WEIGHT_GRADIENT),
        frees=_both(_own(RETAINED), _input_buffers),
    ),
    Kind.SEND_F: Rule(
        Role.SEND,
        "send",
        "send the output to a successor",
        needs=_own(OUTPUT),
        produces=_message_out(SENT_OUTPUT),
        moves_forward=True,
    ),
    Kind.RECV_F: Rule(
        Role.RECEIVE,
        "receive",
        "receive the output of a predecessor",
        needs=_message_in(SENT_OUTPUT),
        produces=_message_out(RECEIVED_OUTPUT),
        allocates=_message_out(RECEIVED_OUTPUT),
        moves_forward=True,
    ),
    Kind.SEND_B: Rule(
        Role.SEND,
        "send",
        "send the gradient of the input to a predecessor",
        needs=_own(INPUT_GRADIENT),
        produces=_message_out(SENT_GRADIENT),
    ),
    Kind.RECV_B: Rule(
        Role.RECEIVE,
        "receive",
        "receive the gradient of the output from a successor",
        needs=_message_in(SENT_GRADIENT),
        produces=_message_out(RECEIVED_GRADIENT),
        allocates=_message_out(RECEIVED_GRADIENT),
    ),
    Kind.UNSHARD: Rule(
        Role.SHARDING,
        "gather",
        "gather the stage's data-parallel shards",
        allocates=_own(GATHERED),
        has_microbatch=False,
        gathers=True,
    ),
    Kind.RESHARD: Rule(
        Role.SHARDING,
        "gather",
        "release the gathered parameters",
        frees=_own(GATHERED),
        has_microbatch=False,
    ),
    Kind.REDUCE_GRAD: Rule(
        Role.REDUCE,
        "gather",
        "reduce the gradients over data-parallel shards and over copies of the stage",
        needs=_every_weight_gradient,
        produces=_reduced,
        has_microbatch=False,
    ),
    Kind.OVERLAP_F_B: Rule(
        Role.FUSED,
        "compute",
        "a forward and a backward that overlap",
        needs=_of_parts(Dependencies.needs),
        produces=_of_parts(Dependencies.produces),
        allocates=_of_parts(Dependencies.allocates),
        frees=_of_parts(Dependencies.frees),
        has_microbatch=False,
    ),
}

#: Which messages carry a product to another rank.
_CARRIERS = {OUTPUT: (Kind.SEND_F, Kind.RECV_F), INPUT_GRADIENT: (Kind.SEND_B, Kind.RECV_B)}
