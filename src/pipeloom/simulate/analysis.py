"""The figures of a timeline: of a simulated one as it is made, of a measured one afterwards.

::

    measured spans ─┐
    schedule ───────┼─ analyse ─▶ Timeline with figures: the same names, the same meaning
    costs (maybe) ──┘
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from pipeloom.cost.constant import UniformCosts
from pipeloom.cost.model import CostModel, ScheduleCosts
from pipeloom.cost.network import Network
from pipeloom.errors import ScheduleError
from pipeloom.ir.action import Action
from pipeloom.ir.schedule import Schedule
from pipeloom.ir.timeline import Figures, Span, Timeline
from pipeloom.simulate.bounds import find_lower_bounds
from pipeloom.simulate.build_graph import build_graph
from pipeloom.simulate.critical_path import find_critical_nodes, find_slack
from pipeloom.simulate.graph import NONE, CannotProceed, EventGraph, find_times
from pipeloom.simulate.idle_time import find_idle_spans
from pipeloom.simulate.memory import find_memory
from pipeloom.simulate.metrics import find_metrics


def analyse(
    timeline: Timeline | Schedule,
    spans: Iterable[Span] | None = None,
    *,
    costs: CostModel | None = None,
) -> Timeline:
    """Fill in the figures of a timeline, or of a schedule and the spans that were measured.

    Without ``costs`` there are no bounds, and memory is counted in activations of one microbatch
    on one rank, unless the timeline brings curves of its own.
    """
    if isinstance(timeline, Schedule):
        timeline = Timeline(timeline, (), source="measured", clock="measured")
    schedule = timeline.schedule
    chosen = timeline.spans if spans is None else spans
    timeline = replace(
        timeline, spans=tuple(sorted(chosen, key=lambda span: (span.start, span.rank)))
    )
    bound = (NO_COSTS if costs is None else costs).bind(schedule)
    try:
        graph = build_graph(_without_times(bound))
        _, _, order = find_times(graph)
    except CannotProceed:
        from pipeloom.verify.verifier import verify

        verify(schedule).raise_for_errors()
        raise ScheduleError(f"schedule {schedule.name!r} cannot be analysed") from None
    measured = _match_spans(graph, timeline.spans)
    for node, (_, start, end) in measured.items():
        graph.weights[node] = end - start
    starts, ends, _ = find_times(
        graph, lambda node, start: measured[node][1] if node in measured else start
    )
    node_of_span: list[int] = [NONE] * len(timeline.spans)
    for node, (index, _, _) in measured.items():
        node_of_span[index] = node
    known = bound if costs is not None else None
    return _finish(timeline, known, bound, graph, starts, ends, order, node_of_span)


#: Durations that are not known, and an activation of 1 per microbatch and rank.
NO_COSTS = UniformCosts(forward=0.0, input=0.0, weight=0.0)


def _without_times(costs: ScheduleCosts) -> ScheduleCosts:
    """What the same costs say of sizes: how long things took was measured."""
    nothing = (0.0,) * costs.schedule.num_stages
    times = ("forward", "input", "weight", "full", "unshard", "reshard", "reduce_grad")
    changed: dict[str, Any] = dict.fromkeys(times, nothing)
    return replace(costs, network=Network(), **changed)


def analyse_graph(
    timeline: Timeline,
    costs: ScheduleCosts,
    graph: EventGraph,
    starts: list[float],
    ends: list[float],
    order: list[int],
    node_of_span: list[int],
) -> Timeline:
    """Fill in the figures of a timeline that was just simulated."""
    return _finish(timeline, costs, costs, graph, starts, ends, order, node_of_span)


def _finish(
    timeline: Timeline,
    bound_costs: ScheduleCosts | None,
    memory_costs: ScheduleCosts,
    graph: EventGraph,
    starts: list[float],
    ends: list[float],
    order: list[int],
    node_of_span: list[int],
) -> Timeline:
    metrics = find_metrics(timeline.spans, timeline.num_ranks)
    slack = find_slack(graph, ends, order, metrics.makespan)
    critical = find_critical_nodes(graph, starts, ends, timeline.source == "simulated")
    on_path = set(critical)
    span_of_node = {
        node: timeline.spans[index] for index, node in enumerate(node_of_span) if node in on_path
    }
    memory = find_memory(memory_costs, graph, starts, ends)
    bounds: dict[str, float] = {}
    if bound_costs is not None:
        # A limit that the order does not keep does not bound it either.
        limit = timeline.memory_limit
        if limit is not None and any(rank.peak.total > limit * (1 + 1e-9) for rank in memory):
            limit = None
        bounds = find_lower_bounds(bound_costs, limit)
    figures = Figures(
        makespan=metrics.makespan,
        span=metrics.span,
        bubble=metrics.bubble,
        bubble_makespan=metrics.bubble_makespan,
        idle_fraction=metrics.idle_fraction,
        work=metrics.work,
        bubble_of_rank=metrics.bubble_of_rank,
        idle_causes=find_idle_spans(graph, starts, ends, metrics.makespan),
        peaks=tuple(rank.peak for rank in memory),
        critical_path=tuple(span_of_node[node] for node in critical if node in span_of_node),
        slack=tuple([0.0 if node == NONE else slack[node] for node in node_of_span]),
        bounds=bounds,
    )
    curves = timeline.memory or tuple(rank.curve for rank in memory)
    return replace(timeline, memory=curves, figures=figures)


def _match_spans(graph: EventGraph, spans: tuple[Span, ...]) -> dict[int, tuple[int, float, float]]:
    """node → (index of its span, start, end); the k-th span of an action is its k-th in the row."""
    waiting: dict[tuple[int, Action], deque[int]] = defaultdict(deque)
    for rank in range(graph.schedule.num_ranks):
        for node in graph.nodes_of(rank):
            waiting[rank, graph.actions[node]].append(node)
    found = {}
    for index, (rank, _, start, end, action) in enumerate(spans):
        nodes = waiting.get((rank, action))
        if nodes:
            found[nodes.popleft()] = (index, start, end)
    return found
