"""What every rank holds, when, and who is alive at the peak.

::

    4 ┤        ┌──┐  ┌──
    3 ┤     ┌──┘  └──┘        a step where an action begins to hold or lets go:
    2 ┤  ┌──┘                 the order says what, the spans say when
    1 ┤──┘
       0F0 0F1 0F2 0F3 0B0 0F4
"""

from __future__ import annotations

from typing import NamedTuple

from pipeloom.cost.model import ScheduleCosts
from pipeloom.ir.action import Action
from pipeloom.ir.dependencies import RULES, Dependencies, Product, Role, simple_actions
from pipeloom.ir.occupancy import walk_changes
from pipeloom.ir.timeline import MemoryCurve, PeakMemory
from pipeloom.simulate.graph import NONE, EventGraph

#: A sum must exceed the peak by more than rounding to be a new one.
ROUNDING = 1e-12


class RankMemory(NamedTuple):
    """One rank's curve and its peak."""

    curve: MemoryCurve
    peak: PeakMemory


def find_memory(
    costs: ScheduleCosts, graph: EventGraph, starts: list[float], ends: list[float]
) -> list[RankMemory]:
    """The memory of every rank over time."""
    return [
        _walk_rank(costs, graph, starts, ends, rank) for rank in range(costs.schedule.num_ranks)
    ]


def _walk_rank(
    costs: ScheduleCosts, graph: EventGraph, starts: list[float], ends: list[float], rank: int
) -> RankMemory:
    table, size_of = costs.schedule.dependencies, costs.size_of
    nodes = graph.nodes_of(rank)
    row = graph.actions[nodes.start : nodes.stop]
    static = {name: size for name, size in costs.static_memory[rank].items() if size}
    recorder = _Recorder(static)
    now = 0.0
    for node, change in zip(nodes, walk_changes(table, row, size_of), strict=True):
        action = row[node - nodes.start]
        if not (change.begun or change.ended or change.left_behind):
            continue
        # What a rank only posts takes memory from the moment the rank comes to it.
        begin = starts[node]
        if RULES[action[0]].role is Role.RECEIVE:
            clock = graph.issued_after[node]
            begin = 0.0 if clock == NONE else ends[clock]
        now = max(now, begin)
        recorder.begin(now, action, change.begun)
        now = max(now, ends[node]) if change.ended or change.left_behind else now
        recorder.end(now, action, change.ended, change.left_behind)
    curve = MemoryCurve(rank, *recorder.curve())
    alive = [(f"{name} of rank {rank}", size) for name, size in static.items()]
    alive += [(_describe(table, product, by), size) for product, size, by in recorder.at_peak()]
    alive.sort(key=lambda item: -item[1])
    return RankMemory(
        curve,
        PeakMemory(
            rank=rank,
            total=recorder.peak,
            time=recorder.peak_time,
            action=recorder.peak_action,
            categories=recorder.peak_categories,
            alive=tuple(alive),
        ),
    )


class _Recorder:
    """Follows the changes of one rank and remembers the largest sum."""

    def __init__(self, static: dict[str, float]) -> None:
        self.static_total = sum(static.values())
        self.now: dict[str, float] = dict(static)
        self.total = self.static_total
        self.times: list[float] = [0.0]
        self.totals: list[float] = [self.total]
        #: Per category: (index in ``times``, amount from there on).
        self.changes: dict[str, list[tuple[int, float]]] = {
            name: [(0, size)] for name, size in static.items()
        }
        self.peak, self.peak_time = self.total, 0.0
        self.peak_action: Action | None = None
        self.peak_categories: dict[str, float] = dict(static)
        self.alive: dict[Product, tuple[float, Action]] = {}
        self._alive_at_peak: dict[Product, tuple[float, Action]] | None = None

    def begin(self, time: float, action: Action, begun: tuple[tuple[Product, float], ...]) -> None:
        for product, size in begun:
            self.alive[product] = (size, action)
            self._change(product[0], size)
        self._note(time, begun)
        if self.total > self.peak + ROUNDING * abs(self.peak):
            self.peak, self.peak_time, self.peak_action = self.total, time, action
            self.peak_categories = dict(self.now)
            self._alive_at_peak = None

    def end(
        self,
        time: float,
        action: Action,
        ended: tuple[tuple[Product, float], ...],
        left_behind: tuple[tuple[Product, float], ...],
    ) -> None:
        if ended and self._alive_at_peak is None:
            # Only now can what is alive shrink; copying at every new peak would be quadratic.
            self._alive_at_peak = dict(self.alive)
        for product, size in ended:
            self.alive.pop(product, None)
            self._change(product[0], -size)
        for product, size in left_behind:
            self.alive[product] = (size, action)
            self._change(product[0], size)
        self._note(time, (*ended, *left_behind))

    def _change(self, category: str, size: float) -> None:
        self.total += size
        self.now[category] = self.now.get(category, 0.0) + size

    def _note(self, time: float, changed: tuple[tuple[Product, float], ...]) -> None:
        if not changed:
            return
        if self.times[-1] != time:
            self.times.append(time)
            self.totals.append(self.total)
        else:
            self.totals[-1] = self.total
        index = len(self.times) - 1
        for category in {product[0] for product, _ in changed}:
            self.changes.setdefault(category, []).append((index, self.now[category]))

    def curve(self) -> tuple[tuple[float, ...], tuple[float, ...], dict[str, tuple[float, ...]]]:
        categories = {}
        for category, changes in self.changes.items():
            values = [0.0] * len(self.times)
            position, amount = 0, 0.0
            for index, after in [*changes, (len(self.times), 0.0)]:
                values[position:index] = [amount] * (index - position)
                position, amount = index, after
            if any(values):
                categories[category] = tuple(values)
        return tuple(self.times), tuple(self.totals), categories

    def at_peak(self) -> list[tuple[Product, float, Action]]:
        """(product, size, what made it) of everything alive at the peak."""
        alive = self.alive if self._alive_at_peak is None else self._alive_at_peak
        return [(product, size, by) for product, (size, by) in alive.items() if size]


def _describe(table: Dependencies, product: Product, made_by: Action) -> str:
    for part in simple_actions(made_by):
        if product in table.allocates(part):
            return f"{product[0]} {part}"
    return f"{product[0]} {made_by}"
