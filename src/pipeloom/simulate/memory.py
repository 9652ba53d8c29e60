"""What every rank holds, when, and who is alive at the peak.

::

    4 ┤        ┌──┐  ┌──
    3 ┤     ┌──┘  └──┘        a step where an action begins to hold or lets go:
    2 ┤  ┌──┘                 the order says what, the spans say when
    1 ┤──┘
       0F0 0F1 0F2 0F3 0B0 0F4
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import merge
from itertools import islice
from operator import itemgetter
from typing import NamedTuple, TypeAlias

from pipeloom.cost.model import ScheduleCosts
from pipeloom.ir.action import Action
from pipeloom.ir.dependencies import Role
from pipeloom.ir.questions import role_of
from pipeloom.ir.timeline import MemoryCurve, PeakMemory
from pipeloom.simulate.footprint import Footprint
from pipeloom.simulate.graph import NONE, EventGraph

#: A sum must exceed the peak by more than rounding to be a new one.
ROUNDING = 1e-12

#: (time, order within that time, node, whether the node ends then).
_Event: TypeAlias = tuple[float, int, int, bool]
_by_time = itemgetter(0, 1, 2)
#: At a time, what has lasted until then ends before anything begins.
LASTED, AT_ONCE = 0, 1


class RankMemory(NamedTuple):
    """One rank's curve and its peak."""

    curve: MemoryCurve
    peak: PeakMemory


def find_memory(
    costs: ScheduleCosts, graph: EventGraph, starts: list[float], ends: list[float]
) -> list[RankMemory]:
    """The memory of every rank over time."""
    ranks = range(costs.schedule.num_ranks)
    return [_Walk(costs, graph, starts, ends, rank).run() for rank in ranks]


class _Walk:
    """Follows what one rank begins to hold and lets go.

    The order has run, so nothing is freed that is not there: what an action changes is the same
    for every microbatch, and only sums have to be kept. Who is alive is worked out for the peak.
    """

    def __init__(
        self,
        costs: ScheduleCosts,
        graph: EventGraph,
        starts: list[float],
        ends: list[float],
        rank: int,
    ) -> None:
        self.graph, self.starts, self.ends, self.rank = graph, starts, ends, rank
        sharded = costs.schedule.sharded_stages
        self.is_sharded = any(s in sharded for s in costs.schedule.placement.stages_on(rank))
        static = costs.static_memory[rank]
        self.static = {name: size for name, size in static.items() if size}
        self.now: dict[str, float] = dict(self.static)
        self.total = sum(self.static.values())
        self.peak, self.peak_time, self.peak_node = self.total, 0.0, NONE
        self.peak_event = NONE
        self.peak_categories = dict(self.static)
        self.times: list[float] = [0.0]
        self.totals: list[float] = [self.total]
        #: Per category: (index in ``times``, amount from there on).
        self.changes: dict[str, list[tuple[int, float]]] = {
            name: [(0, size)] for name, size in self.static.items()
        }

    def run(self) -> RankMemory:
        footprints = self.graph.footprints
        for index, (now, _, node, is_end) in enumerate(self._events()):
            footprint = footprints[node]
            for own in (footprint,) if isinstance(footprint, Footprint) else footprint:
                if is_end:
                    self._change(now, own.ended, -1)
                    self._change(now, own.left_behind, 1)
                else:
                    self._change(now, own.begun, 1)
            if not is_end and self.total > self.peak + ROUNDING * self.peak:
                self.peak, self.peak_time, self.peak_node = self.total, now, node
                self.peak_event = index
                self.peak_categories = dict(self.now)
        return RankMemory(MemoryCurve(self.rank, *self._curve()), self._describe_peak())

    def _events(self) -> Iterator[_Event]:
        """What begins and ends, in order of time: gathering goes on beside the rest."""
        graph = self.graph
        nodes = graph.nodes_of(self.rank)
        if not self.is_sharded:
            return self._find_events(nodes)
        lanes: tuple[list[int], list[int]] = ([], [])
        for node in nodes:
            lanes[role_of(graph.actions[node]) is Role.SHARDING].append(node)
        return merge(*map(self._find_events, lanes), key=_by_time)

    def _find_events(self, nodes: Iterable[int]) -> Iterator[_Event]:
        graph, starts, ends = self.graph, self.starts, self.ends
        footprints, issued_after, send_of = graph.footprints, graph.issued_after, graph.send_of
        now = 0.0
        for node in nodes:
            footprint = footprints[node]
            if isinstance(footprint, Footprint):
                begins, lets_go = footprint.begun, footprint.lets_go
            else:
                begins = sum((own.begun for own in footprint), ())
                lets_go = any(own.lets_go for own in footprint)
            start = starts[node]
            if begins:
                if node in send_of:
                    # What a rank only posts takes memory from when the rank comes to it.
                    clock = issued_after[node]
                    start = 0.0 if clock == NONE else ends[clock]
                if start > now:
                    now = start
                yield now, AT_ONCE, node, False
            if lets_go:
                end = ends[node]
                order = LASTED if end > start and end > now else AT_ONCE
                if end > now:
                    now = end
                yield now, order, node, True

    def _change(self, time: float, changes: _Changes, sign: int) -> None:
        if not changes:
            return
        times, totals, now = self.times, self.totals, self.now
        if times[-1] != time:
            times.append(time)
            totals.append(0.0)
        index = len(times) - 1
        for _, category, size in changes:
            self.total += sign * size
            amount = now[category] = now.get(category, 0.0) + sign * size
            history = self.changes.setdefault(category, [])
            if history and history[-1][0] == index:
                history[-1] = (index, amount)
            else:
                history.append((index, amount))
        totals[index] = self.total

    def _curve(self) -> tuple[tuple[float, ...], tuple[float, ...], dict[str, tuple[float, ...]]]:
        categories = {}
        for category, changes in self.changes.items():
            values: list[float] = []
            amount = 0.0
            for index, after in changes:
                if index > len(values):
                    values += [amount] * (index - len(values))
                amount = after
            values += [amount] * (len(self.times) - len(values))
            categories[category] = tuple(values)
        return tuple(self.times), tuple(self.totals), categories

    def _describe_peak(self) -> PeakMemory:
        alive = [(f"{name} of rank {self.rank}", size) for name, size in self.static.items()]
        alive += self._find_alive()
        alive.sort(key=lambda item: -item[1])
        return PeakMemory(
            rank=self.rank,
            total=self.peak,
            time=self.peak_time,
            action=self.graph.action_of(self.peak_node),
            categories=self.peak_categories,
            alive=tuple(alive),
        )

    def _find_alive(self) -> list[tuple[str, float]]:
        """Who is alive at the peak: the events once more, up to there."""
        if self.peak_node == NONE:
            return []
        alive: dict[int, tuple[str, Action, float]] = {}
        for _, _, node, is_end in islice(self._events(), self.peak_event + 1):
            for part, footprint in self._parts_of(node):
                microbatch = part[2] or 0
                if is_end:
                    for place, _, _ in footprint.ended:
                        alive.pop(place + microbatch, None)
                for place, category, size in footprint.left_behind if is_end else footprint.begun:
                    alive[place + microbatch] = (category, part, size)
        return [(f"{category} {part}", size) for category, part, size in alive.values()]

    def _parts_of(self, node: int) -> Iterator[tuple[Action, Footprint]]:
        action, footprint = self.graph.actions[node], self.graph.footprints[node]
        if isinstance(footprint, Footprint):
            yield action, footprint
        else:
            yield from zip(action.parts, footprint, strict=True)


_Changes = tuple[tuple[int, str, float], ...]
