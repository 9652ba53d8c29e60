"""Draws the event graph of a schedule: every rule becomes edges between nodes.

::

    first walk     who produces what              0F0 ─▶ "output 0F0"      place → node
    second walk    who waits for whom             1F0 ◀─ what it needs, the computation before it,
                                                         the operation before it in its queue
    at the end     sends meet receives            a send starts once its receive is posted
"""

from __future__ import annotations

from itertools import accumulate
from typing import Literal, TypeAlias

from pipeloom.cost.model import ScheduleCosts
from pipeloom.ir.action import Action
from pipeloom.ir.dependencies import Role
from pipeloom.ir.questions import simple_actions
from pipeloom.simulate.footprint import Footprint, Footprints
from pipeloom.simulate.graph import NONE, CannotProceed, EventGraph

Sends: TypeAlias = Literal["buffered", "rendezvous", "blocking"]
Channel: TypeAlias = Literal["edge", "pair", "all"]
Communication: TypeAlias = Literal["overlapped", "serialised"]


def build_graph(
    costs: ScheduleCosts,
    *,
    sends: Sends = "buffered",
    channel: Channel = "edge",
    communication: Communication = "overlapped",
) -> EventGraph:
    """Turn a schedule and its costs into the graph; raise CannotProceed where it is broken."""
    return _Builder(costs, sends, channel, communication).build()


class _Builder:
    """Two walks: the first names who produces what, the second draws the edges."""

    def __init__(
        self, costs: ScheduleCosts, sends: Sends, channel: Channel, communication: Communication
    ) -> None:
        schedule = costs.schedule
        self.costs = costs
        self.meets = sends != "buffered"
        self.holds = communication == "serialised" or sends == "blocking"
        self.channel = channel
        self.schedule = schedule
        self.find_footprint = Footprints(costs)
        rows = schedule.actions
        self.actions = [action for row in rows for action in row]
        count = len(self.actions)
        self.graph = EventGraph(
            schedule=schedule,
            first_nodes=[0, *accumulate(map(len, rows))],
            actions=self.actions,
            footprints=self._find_footprints(),
            weights=[0.0] * count,
            before=[],
            issued_after=[NONE] * count,
        )
        self.graph.before = [[] for _ in range(count)]
        #: Place of a product → the node at whose end it is there.
        self.producer = [NONE] * self.find_footprint.num_places
        #: What holds the rank after a computation: sends that nobody wrote, when serialised.
        self.held_after: dict[int, int] = {}
        self.edge_free: dict[tuple[int, int], int] = {}
        self.meetings: dict[tuple[Action, ...], int] = {}
        self.arrived: dict[tuple[Action, ...], int] = {}
        #: (receive, the node after which its rank posts it, the one before it in its queue)
        self.receives: list[tuple[int, int, int]] = []
        self.num_sends = 0

    def build(self) -> EventGraph:
        for rank in range(self.schedule.num_ranks):
            self._name_products(rank)
        for rank in range(self.schedule.num_ranks):
            self._draw_row(rank)
        self._let_sends_meet_receives()
        for group, count in self.arrived.items():
            if count != len(group):
                raise CannotProceed
        return self.graph

    def _find_footprints(self) -> list[Footprint | tuple[Footprint, ...]]:
        find, known = self.find_footprint.find, self.find_footprint.known
        largest = self.find_footprint.num_microbatches
        footprints: list[Footprint | tuple[Footprint, ...]] = []
        for action in self.actions:
            kind, stage, microbatch, parts, peer = action
            if parts:
                footprints.append(tuple(map(find, parts)))
                continue
            if microbatch is not None and not 0 <= microbatch < largest:
                raise CannotProceed
            footprints.append(known.get((kind, stage, peer)) or find(action))
        return footprints

    # ── who produces what ────────────────────────────────────────────────────────────────────

    def _name_products(self, rank: int) -> None:
        graph, producer, holds = self.graph, self.producer, self.holds
        actions, weights, footprints = self.actions, graph.weights, graph.footprints
        send = Role.SEND
        for node in graph.nodes_of(rank):
            footprint = footprints[node]
            if isinstance(footprint, tuple):
                weights[node] = self.costs.duration_of(actions[node])
                for part, own in zip(actions[node].parts, footprint, strict=True):
                    self._name(node, own, part)
                for part, own in zip(actions[node].parts, footprint, strict=True):
                    self._send_unwritten(node, own, part)
                continue
            microbatch = actions[node][2] or 0
            for place in footprint.produces:
                if producer[place + microbatch] != NONE:
                    raise CannotProceed
                producer[place + microbatch] = node
            weights[node] = footprint.duration
            if footprint.role is send:
                self.num_sends += 1
                latency = footprint.latency
                if latency and holds:
                    weights[node] += latency
                elif latency:
                    producer[footprint.produces[0] + microbatch] = self._add(latency, [node])
            elif footprint.messages:
                self._send_unwritten(node, footprint, actions[node])

    def _name(self, node: int, footprint: Footprint, action: Action) -> None:
        microbatch = action[2] or 0
        if not 0 <= microbatch < self.find_footprint.num_microbatches:
            raise CannotProceed
        for place in footprint.produces:
            if self.producer[place + microbatch] != NONE:
                raise CannotProceed
            self.producer[place + microbatch] = node

    def _send_unwritten(self, node: int, footprint: Footprint, action: Action) -> None:
        """Let the products of a computation travel in a schedule without communication."""
        for received, edge, occupied, latency, consumer in footprint.messages:
            last = node
            if self.holds:
                last = self.held_after.get(node, node)
                last = self._add(occupied + latency, [last], origin=node)
                self.held_after[node] = last
                self.graph.unwritten_sends[last] = self._make_send(action, consumer)
            else:
                ahead = self.edge_free.get(edge, NONE)
                # Nothing overtakes on an edge, however small it is.
                if occupied or ahead != NONE:
                    queue = [node] if ahead == NONE else [node, ahead]
                    last = self.edge_free[edge] = self._add(occupied, queue, origin=node)
                if latency:
                    last = self._add(latency, [last], origin=node)
            self.producer[received + (action[2] or 0)] = last

    def _make_send(self, action: Action, consumer: int) -> Action:
        table = self.find_footprint.table
        for product in table.produces(action):
            if consumer in table.remote_consumers(product):
                return table.make_message(product, consumer)[0]
        raise AssertionError(f"{action} sends nothing to stage {consumer}")

    def _add(self, weight: float, before: list[int], *, origin: int = NONE) -> int:
        node = len(self.graph.weights)
        self.graph.weights.append(weight)
        self.graph.before.append(before)
        if origin != NONE:
            self.graph.origins[node] = origin
        return node

    # ── who waits for whom ───────────────────────────────────────────────────────────────────

    def _draw_row(self, rank: int) -> None:
        graph, producer, holds = self.graph, self.producer, self.holds
        actions, before, issued_after = self.actions, graph.before, graph.issued_after
        footprints, held_after = graph.footprints, self.held_after
        sharded = self.schedule.sharded_stages
        gathered: dict[int | None, int] = {}
        clock = gather = NONE
        queues: dict[object, int] = {}
        compute, receive = Role.COMPUTE, Role.RECEIVE
        in_edge_queues = self.channel == "edge"
        for node in graph.nodes_of(rank):
            action, footprint = actions[node], footprints[node]
            issued_after[node] = clock
            if isinstance(footprint, tuple):
                inputs = []
                for part, own in zip(action.parts, footprint, strict=True):
                    inputs += [producer[place + (part[2] or 0)] for place in own.needs]
                role = compute
            else:
                microbatch = action[2] or 0
                inputs = [producer[place + microbatch] for place in footprint.needs]
                role = footprint.role
            if NONE in inputs:
                raise CannotProceed
            if clock != NONE:
                inputs.append(clock)
            before[node] = inputs
            if role is compute:
                if sharded:
                    for part in simple_actions(action):
                        if part.stage in sharded:
                            if part.stage not in gathered:
                                raise CannotProceed
                            inputs.append(gathered[part.stage])
                clock = held_after.get(node, node) if held_after else node
                continue
            assert isinstance(footprint, Footprint)
            if role is receive or role is Role.SEND:
                if role is not receive and inputs[0] > node:
                    raise CannotProceed  # its product is made later, or on another rank
                ahead = NONE
                if not holds:
                    edge = footprint.edge
                    key = edge if in_edge_queues else self._queue_of(edge, rank)
                    ahead = queues.get(key, NONE)
                    if ahead != NONE:
                        inputs.append(ahead)
                    queues[key] = node
                if role is receive:
                    self._note_receive(node, inputs[0], microbatch, clock, ahead)
                if holds:
                    clock = node
                continue
            if gather != NONE:
                inputs.append(gather)
            if role is Role.REDUCE:
                made = self._inputs_of_whole_stage(action)
                if made and max(made) > node:
                    raise CannotProceed
                inputs += made
                clock = self._meet_partners(node, action, rank, clock)
            elif footprint.gathers:
                gathered[action.stage] = node
            else:
                gathered.pop(action.stage, None)
            gather = node
            if holds:
                clock = node

    def _queue_of(self, edge: tuple[int, int], rank: int) -> object:
        if self.channel == "pair":
            return edge[1] if rank == edge[0] else edge[0]
        return None

    def _note_receive(
        self, node: int, sender: int, microbatch: int, clock: int, ahead: int
    ) -> None:
        graph = self.graph
        if sender >= len(self.actions):  # the latency behind the send
            (sender,) = graph.before[sender]
        graph.send_of[node] = sender
        own = graph.footprints[sender]
        assert isinstance(own, Footprint)
        origin = self.producer[own.needs[0] + microbatch]
        if origin == NONE:
            raise CannotProceed
        graph.origins[node] = origin
        self.receives.append((node, clock, ahead))

    def _let_sends_meet_receives(self) -> None:
        """A send that is not buffered starts only once its receive is posted and, where a queue
        holds more than the messages of one direction, at the head of it."""
        graph = self.graph
        last_of_edge: dict[tuple[int, int], int] = {}
        for node, clock, ahead in self.receives:
            sender = graph.send_of[node]
            own = graph.footprints[node]
            assert isinstance(own, Footprint)
            # What a receiver takes in another order than it is sent, the verifier must explain.
            if sender < last_of_edge.get(own.edge, NONE):
                raise CannotProceed
            last_of_edge[own.edge] = sender
            if self.meets:
                if clock != NONE:
                    graph.before[sender].append(clock)
                if ahead != NONE and self.channel != "edge":
                    graph.before[sender].append(ahead)
        if self.num_sends != len(self.receives):
            raise CannotProceed

    def _inputs_of_whole_stage(self, action: Action) -> list[int]:
        find = self.find_footprint
        places = [find.place_of(product) for product in find.table.needs(action)]
        # A product that nobody has named yet has no place in the list: nobody makes it.
        if any(place >= len(self.producer) for place in places):
            raise CannotProceed
        inputs = [self.producer[place] for place in places]
        if NONE in inputs:
            raise CannotProceed
        return inputs

    def _meet_partners(self, node: int, action: Action, rank: int, clock: int) -> int:
        """Copies of a stage reduce together: the ranks wait for each other. Returns the node at
        whose end this rank goes on."""
        placement = self.schedule.placement
        partners = [
            partner
            for partner in self.find_footprint.table.partners_of(action)
            if partner.stage is not None and placement.rank_of(partner.stage) != rank
        ]
        if not partners:
            return clock
        group = tuple(sorted([action, *partners], key=str))
        meeting = self.meetings.get(group)
        if meeting is None:
            meeting = self.meetings[group] = self._add(0.0, [])
            self.arrived[group] = 0
        self.arrived[group] += 1
        graph = self.graph
        graph.before[meeting] += graph.before[node]
        graph.before[node] = [meeting]
        return meeting
