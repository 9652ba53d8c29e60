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

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field

from pipeloom.ir.action import Action
from pipeloom.ir.dependencies import Role
from pipeloom.ir.schedule import Schedule
from pipeloom.simulate.footprint import Footprint

#: A node that is nothing.
NONE = -1
#: A time that is not known yet.
UNKNOWN = -math.inf


class CannotProceed(Exception):
    """The program has a hole, a twin or a cycle; the verifier knows how to tell it."""


@dataclass
class EventGraph:
    """Nodes with a duration and the nodes before them."""

    schedule: Schedule
    #: The first node of every rank, and, last, the number of actions.
    first_nodes: list[int]
    actions: list[Action]
    #: Per action: what it shares with the others of its kind and stage, per part if it is fused.
    footprints: list[Footprint | tuple[Footprint, ...]]
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

    def is_compute(self, node: int) -> bool:
        """True if the node is an action that computes."""
        if not 0 <= node < len(self.actions):
            return False
        footprint = self.footprints[node]
        return isinstance(footprint, tuple) or footprint.role is Role.COMPUTE

    def nodes_of(self, rank: int) -> range:
        """The nodes of a rank's actions, in order."""
        return range(self.first_nodes[rank], self.first_nodes[rank + 1])

    def rank_of(self, node: int) -> int:
        """The rank of an action's node."""
        return bisect_right(self.first_nodes, node) - 1

    def action_of(self, node: int) -> Action | None:
        """The action of a node; ``None`` behind the actions."""
        return self.actions[node] if 0 <= node < len(self.actions) else None


def find_times(
    graph: EventGraph, fill: Callable[[int, float], float] | None = None
) -> tuple[list[float], list[float], list[int]]:
    """Walk the graph: (start of every node, end of every node, an order that respects it).

    ``fill(node, start)`` may give another start (a measured one) than the end of what lies before.
    """
    before, weights = graph.before, graph.weights
    count = len(weights)
    starts = [0.0] * count
    ends = [UNKNOWN] * count
    is_pending = bytearray(count)
    order: list[int] = []
    for root in range(count):
        if ends[root] != UNKNOWN:
            continue
        is_pending[root] = True
        stack = [root]
        while stack:
            node = stack[-1]
            start = 0.0
            for earlier in before[node]:
                end = ends[earlier]
                if end > start:
                    start = end
                elif end == UNKNOWN:
                    if is_pending[earlier]:
                        raise CannotProceed
                    is_pending[earlier] = True
                    stack.append(earlier)
                    break
            else:
                if fill is not None:
                    start = fill(node, start)
                starts[node] = start
                ends[node] = start + weights[node]
                order.append(node)
                stack.pop()
    return starts, ends, order
