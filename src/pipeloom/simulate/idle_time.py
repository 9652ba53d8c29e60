"""Why a rank computes nothing: every idle span has exactly one cause.

::

    rank 0   ├0F0┤├0F1┤·············├0B0┤···│
                        │        │     ╰ drain: nothing left to do
                        │        ╰ communication: 1B0 has ended, its gradient is on the way
                        ╰ waiting: for 1B0 of rank 1
    rank 1   ····├1F0┤├1B0┤├1F1┤├1B1┤·······
              ╰ warm-up: until the first computation

The spans of one rank and its computations fill the time from 0 to the makespan without overlap,
so the causes add up to all idle time.
"""

from __future__ import annotations

from pipeloom.ir.action import Action
from pipeloom.ir.timeline import IdleSpan
from pipeloom.simulate.graph import NONE, EventGraph

WARM_UP = "warm-up"
WAITING = "waiting"
COMMUNICATION = "communication"
DRAIN = "drain"
#: Measured only: all inputs were there and the rank still did not compute.
OVERHEAD = "overhead"


def find_idle_spans(
    graph: EventGraph, starts: list[float], ends: list[float], makespan: float
) -> tuple[IdleSpan, ...]:
    """Every idle span of every rank, rank by rank in order of time."""
    found: list[IdleSpan] = []
    for rank in range(graph.schedule.num_ranks):
        found += _Row(graph, starts, ends, rank).explain(makespan)
    return tuple(span for span in found if span.end > span.start)


class _Row:
    def __init__(
        self, graph: EventGraph, starts: list[float], ends: list[float], rank: int
    ) -> None:
        self.graph = graph
        self.starts = starts
        self.ends = ends
        self.rank = rank
        self.found: list[IdleSpan] = []

    def explain(self, makespan: float) -> list[IdleSpan]:
        graph = self.graph
        starts, ends = self.starts, self.ends
        cursor, previous = 0.0, NONE
        for node in graph.nodes_of(self.rank):
            if not graph.is_compute(node):
                continue
            start = starts[node]
            if start > cursor:
                if previous == NONE:
                    cause = self._binding_input(node)
                    origin = NONE if cause == NONE else graph.origins.get(cause, cause)
                    self._add(0.0, start, WARM_UP, origin, node)
                else:
                    self._explain_gap(cursor, previous, node)
            cursor, previous = max(cursor, ends[node]), node
        self._add(cursor, makespan, DRAIN, NONE, NONE)
        return self.found

    def _explain_gap(self, cursor: float, previous: int, node: int) -> None:
        """The time between two computations of a rank."""
        ends, start = self.ends, self.starts[node]
        for holder in self._holders(previous, node):
            cursor = self._explain_piece(cursor, min(ends[holder], start), holder, node)
        if start <= cursor:
            return
        binding = self._binding_input(node)
        if binding == NONE or ends[binding] <= cursor:
            self._add(cursor, start, OVERHEAD, NONE, node)
            return
        self._explain_piece(cursor, start, binding, node)

    def _explain_piece(self, cursor: float, end: float, cause: int, node: int) -> float:
        """Split the time until something came: until its origin had ended, and after that."""
        if end <= cursor:
            return cursor
        graph, ends = self.graph, self.ends
        origin = graph.origins.get(cause, NONE)
        if origin == NONE and graph.is_compute(cause):
            origin = cause
        if origin != NONE and graph.rank_of(origin) != self.rank:
            middle = min(max(cursor, ends[origin]), end)
            self._add(cursor, middle, WAITING, origin, node)
            self._add(middle, end, COMMUNICATION, origin, node)
        elif origin != NONE and cause == origin:
            middle = min(max(cursor, ends[origin]), end)
            self._add(cursor, middle, WAITING, origin, node)
            self._add(middle, end, OVERHEAD, NONE, node)
        else:
            self._add(cursor, end, COMMUNICATION, cause, node)
        return end

    def _holders(self, previous: int, node: int) -> list[int]:
        """What held the rank between two computations, in order: messages that it had to stay
        for, and meetings with other ranks."""
        graph = self.graph
        holders = []
        clock = graph.issued_after[node]
        while clock not in (NONE, previous):
            holders.append(clock)
            if clock < graph.num_actions:
                clock = graph.issued_after[clock]
            else:
                clock = self._before_holder(clock)
        return holders[::-1]

    def _before_holder(self, holder: int) -> int:
        """What the rank did before a node without an action held it: the last of its own that
        the node comes after."""
        graph = self.graph
        own = graph.nodes_of(self.rank)
        seen = {holder}
        pending = list(graph.before[holder])
        best = NONE
        while pending:
            node = pending.pop()
            if node in seen:
                continue
            seen.add(node)
            if node in own:
                best = max(best, node)
            elif node >= graph.num_actions and graph.origins.get(node, NONE) in own:
                pending += graph.before[node]
        return best

    def _binding_input(self, node: int) -> int:
        """The input that came last (of several, the one whose origin ended last); ``NONE`` if
        there is nothing but the computation before."""
        graph = self.graph
        clock = graph.issued_after[node]
        inputs = [earlier for earlier in graph.before[node] if earlier != clock]
        return max(inputs, key=self._when_it_came, default=NONE)

    def _when_it_came(self, node: int) -> tuple[float, float]:
        origin = self.graph.origins.get(node, NONE)
        if origin == NONE and self.graph.is_compute(node):
            origin = node
        return self.ends[node], -1.0 if origin == NONE else self.ends[origin]

    def _add(self, start: float, end: float, cause: str, awaited: int, node: int) -> None:
        graph = self.graph
        action = graph.action_of(awaited)
        rank = graph.rank_of(awaited) if action is not None else None
        before: Action | None = graph.action_of(node)
        self.found.append(IdleSpan(self.rank, start, end, cause, action, rank, before))
