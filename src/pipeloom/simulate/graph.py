"""The program as a graph of events: who must have ended before what can start.

::

    rank 0   0F0 ──────▶ 0F1 ─────▶ …            a row: one computation after the other
              ╲
               SEND ─▶ latency ─▶ RECV            a message: occupies its edge, then travels
                                    ╲
    rank 1                           1F0 ─▶ …     an input: the last one to come decides

Every rule of the dependency table, of channels and of sends becomes edges between nodes that have
a duration. Simulating is then a longest-path walk, finding a deadlock is finding a cycle, and the
slack of an action is the same walk backwards. Each is linear in the number of actions.

The first nodes are the actions, rank by rank; what stands behind them has no action of its own:
a message on the wire (in a compute-only schedule nobody writes SEND), its latency, and the
meeting of ranks that reduce together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal, TypeAlias

from pipeloom.cost.model import ScheduleCosts
from pipeloom.ir.action import Action
from pipeloom.ir.dependencies import RULES, Dependencies, Product, Role, simple_actions
from pipeloom.ir.schedule import Schedule

Sends: TypeAlias = Literal["buffered", "rendezvous", "blocking"]
Channel: TypeAlias = Literal["edge", "pair", "all"]
Communication: TypeAlias = Literal["overlapped", "serialised"]

#: A node that is nothing.
NONE = -1


class CannotProceed(Exception):
    """The program has a hole, a twin or a cycle; the verifier knows how to tell it."""


@dataclass
class EventGraph:
    """Nodes with a duration and the nodes before them."""

    schedule: Schedule
    #: The first node of every rank, and, last, the number of actions.
    first_nodes: list[int]
    actions: list[Action]
    weights: list[float]
    before: list[list[int]]
    #: Per action: the node whose end is the moment the rank comes to it.
    issued_after: list[int]
    #: Of receives, wires and arrivals: the computation whose product travels.
    origins: dict[int, int] = field(default_factory=dict)
    #: Of receives: the send.
    send_of: dict[int, int] = field(default_factory=dict)
    #: Of wires that hold their rank: the send that nobody wrote.
    unwritten_sends: dict[int, Action] = field(default_factory=dict)

    @property
    def num_actions(self) -> int:
        return self.first_nodes[-1]

    def nodes_of(self, rank: int) -> range:
        """The nodes of a rank's actions, in order."""
        return range(self.first_nodes[rank], self.first_nodes[rank + 1])

    def rank_of(self, node: int) -> int:
        """The rank of an action's node."""
        first_nodes = self.first_nodes
        low, high = 0, len(first_nodes) - 1
        while low + 1 < high:
            middle = (low + high) // 2
            if first_nodes[middle] <= node:
                low = middle
            else:
                high = middle
        return low

    def action_of(self, node: int) -> Action | None:
        """The action of a node; ``None`` behind the actions."""
        return self.actions[node] if 0 <= node < len(self.actions) else None


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
        # In this table a computation needs what was received, also where nobody writes the
        # receive: the messages are then drawn here, behind their producer.
        self.table = Dependencies(
            schedule.topology,
            schedule.placement,
            num_microbatches=schedule.num_microbatches,
            has_communication=True,
            has_backward=schedule.has_backward,
        )
        rows = schedule.actions
        self.actions = [action for row in rows for action in row]
        count = len(self.actions)
        self.graph = EventGraph(
            schedule=schedule,
            first_nodes=[0, *accumulate(map(len, rows))],
            actions=self.actions,
            weights=[0.0] * count,
            before=[[] for _ in range(count)],
            issued_after=[NONE] * count,
        )
        self.producer: dict[Product, int] = {}
        #: What holds the rank after a computation: sends that nobody wrote, when serialised.
        self.held_after: dict[int, int] = {}
        self.edge_free: dict[tuple[int, int], int] = {}
        self.messages_of: dict[tuple[str, int], list[tuple[Product, Product]]] = {}
        self.meetings: dict[tuple[Action, ...], int] = {}
        self.arrived: dict[tuple[Action, ...], int] = {}
        #: (receive, the node after which its rank posts it, the one before it in its queue)
        self.receives: list[tuple[int, int, int]] = []

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

    # ── who produces what ────────────────────────────────────────────────────────────────────

    def _name_products(self, rank: int) -> None:
        graph, producer, table = self.graph, self.producer, self.table
        durations = self.costs.durations
        actions, weights = self.actions, graph.weights
        has_messages = not self.schedule.has_communication
        for node in graph.nodes_of(rank):
            action = actions[node]
            kind, stage, _, parts, _ = action
            rule = RULES[kind]
            products = rule.produces(table, action)
            for product in products:
                if product in producer:
                    raise CannotProceed
                producer[product] = node
            role = rule.role
            if role is Role.SEND:
                occupied, latency = self.costs.transfer_of(products[0])
                weights[node] = occupied + latency if self.holds else occupied
                if latency and not self.holds:
                    producer[products[0]] = self._add(latency, [node], origin=NONE)
            elif role is not Role.RECEIVE:
                weights[node] = (
                    self.costs.duration_of(action) if parts else durations[kind][stage]  # type: ignore[index]
                )
                if has_messages:
                    self._send_unwritten(rank, node, products)

    def _send_unwritten(self, rank: int, node: int, products: tuple[Product, ...]) -> None:
        """Let the products of a computation travel in a schedule without communication."""
        for product in products:
            what, stage, microbatch, _ = product
            messages = self.messages_of.get((what, stage))
            if messages is None:
                messages = self._find_messages(product)
                self.messages_of[what, stage] = messages
            for sent, received in messages:
                occupied, latency = self.costs.transfer_of(sent)
                last = node
                if self.holds:
                    last = self.held_after.get(node, node)
                    last = self._add(occupied + latency, [last], origin=node)
                    self.held_after[node] = last
                    send, _ = self.table.make_message(product, received[1])
                    self.graph.unwritten_sends[last] = send
                else:
                    edge = self.table.ranks_of_message(sent)
                    ahead = self.edge_free.get(edge, NONE)
                    # Nothing overtakes on an edge, however small it is.
                    if occupied or ahead != NONE:
                        queue = [node] if ahead == NONE else [node, ahead]
                        last = self.edge_free[edge] = self._add(occupied, queue, origin=node)
                    if latency:
                        last = self._add(latency, [last], origin=node)
                self.producer[received[0], received[1], microbatch, received[3]] = last

    def _find_messages(self, product: Product) -> list[tuple[Product, Product]]:
        table = self.table
        messages = []
        for consumer in table.remote_consumers(product):
            send, receive = table.make_message(product, consumer)
            messages.append((table.message_of(send), table.produces(receive)[0]))
        return messages

    def _add(self, weight: float, before: list[int], *, origin: int) -> int:
        node = len(self.graph.weights)
        self.graph.weights.append(weight)
        self.graph.before.append(before)
        if origin != NONE:
            self.graph.origins[node] = origin
        return node

    # ── who waits for whom ───────────────────────────────────────────────────────────────────

    def _draw_row(self, rank: int) -> None:
        graph, producer, table, holds = self.graph, self.producer, self.table, self.holds
        actions, before, issued_after = self.actions, graph.before, graph.issued_after
        held_after = self.held_after
        sharded = self.schedule.sharded_stages
        gathered: dict[int | None, int] = {}
        clock = gather = NONE
        queues: dict[object, int] = {}
        compute, fused, send, receive = Role.COMPUTE, Role.FUSED, Role.SEND, Role.RECEIVE
        for node in graph.nodes_of(rank):
            action = actions[node]
            rule = RULES[action[0]]
            role = rule.role
            issued_after[node] = clock
            inputs = before[node]
            if clock != NONE:
                inputs.append(clock)
            try:
                inputs += [producer[product] for product in rule.needs(table, action)]
            except KeyError:
                raise CannotProceed from None
            if role is compute or role is fused:
                if sharded:
                    for part in simple_actions(action):
                        if part.stage in sharded:
                            if part.stage not in gathered:
                                raise CannotProceed
                            inputs.append(gathered[part.stage])
                clock = held_after.get(node, node)
            elif role is send or role is receive:
                if holds:
                    if role is receive:
                        self._note_receive(node, action, issued_after[node], NONE)
                    clock = node
                    continue
                sender, receiver = table.ranks_of_message(table.message_of(action))
                key = self._queue_of(sender, receiver, rank)
                ahead = queues.get(key, NONE)
                if ahead != NONE:
                    inputs.append(ahead)
                queues[key] = node
                if role is receive:
                    self._note_receive(node, action, clock, ahead)
            else:
                if gather != NONE:
                    inputs.append(gather)
                if role is Role.SHARDING:
                    if rule.gathers:
                        gathered[action.stage] = node
                    else:
                        gathered.pop(action.stage, None)
                else:
                    clock = self._meet_partners(node, action, rank, clock)
                gather = node
                if holds:
                    clock = node

    def _queue_of(self, sender: int, receiver: int, rank: int) -> object:
        if self.channel == "edge":
            return sender, receiver
        if self.channel == "pair":
            return receiver if rank == sender else sender
        return None

    def _note_receive(self, node: int, action: Action, clock: int, ahead: int) -> None:
        table, graph = self.table, self.graph
        message = table.message_of(action)
        sender = self.producer[message]
        if sender >= len(self.actions):  # the latency behind the send
            (sender,) = graph.before[sender]
        graph.send_of[node] = sender
        carried = table.needs(self.actions[sender])[0]
        origin = self.producer.get(carried)
        if origin is None:
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
            edge = self.table.ranks_of_message(self.table.message_of(self.actions[node]))
            # What a receiver takes in another order than it is sent, the verifier must explain.
            if sender < last_of_edge.get(edge, NONE):
                raise CannotProceed
            last_of_edge[edge] = sender
            if self.meets:
                if clock != NONE:
                    graph.before[sender].append(clock)
                if ahead != NONE and self.channel != "edge":
                    graph.before[sender].append(ahead)
        num_sends = sum(1 for action in self.actions if RULES[action[0]].role is Role.SEND)
        if num_sends != len(self.receives):
            raise CannotProceed

    def _meet_partners(self, node: int, action: Action, rank: int, clock: int) -> int:
        """Copies of a stage reduce together: the ranks wait for each other. Returns the node at
        whose end this rank goes on."""
        placement = self.schedule.placement
        partners = [
            partner
            for partner in self.table.partners_of(action)
            if partner.stage is not None and placement.rank_of(partner.stage) != rank
        ]
        if not partners:
            return clock
        group = tuple(sorted([action, *partners], key=str))
        meeting = self.meetings.get(group)
        if meeting is None:
            meeting = self.meetings[group] = self._add(0.0, [], origin=NONE)
            self.arrived[group] = 0
        self.arrived[group] += 1
        graph = self.graph
        graph.before[meeting] += graph.before[node]
        graph.before[node] = [meeting]
        return meeting


def find_times(
    graph: EventGraph, fill: Callable[[int, float], float] | None = None
) -> tuple[list[float], list[float], list[int]]:
    """Walk the graph: (start of every node, end of every node, an order that respects it).

    ``fill(node, start)`` may give another start (a measured one) than the end of what lies before.
    """
    before, weights = graph.before, graph.weights
    count = len(weights)
    missing = [0] * count
    after: list[list[int]] = [[] for _ in range(count)]
    for node, earlier in enumerate(before):
        missing[node] = len(earlier)
        for other in earlier:
            after[other].append(node)
    starts, ends = [0.0] * count, [0.0] * count
    order = [node for node in range(count) if not missing[node]]
    for node in order:
        start = starts[node]
        if fill is not None:
            start = starts[node] = fill(node, start)
        end = ends[node] = start + weights[node]
        for other in after[node]:
            if end > starts[other]:
                starts[other] = end
            missing[other] -= 1
            if not missing[other]:
                order.append(other)
    if len(order) != count:
        raise CannotProceed
    return starts, ends, order
