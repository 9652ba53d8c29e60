"""From a schedule and its costs to a Timeline.

::

    schedule ─┐
              ├─ build_graph ─▶ EventGraph ─ find_times ─▶ spans ─ analyse ─▶ Timeline
    costs ────┘

Exact for the given order: a rank runs its actions one after the other and waits where it must.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import repeat

from pipeloom.cost.constant import UniformCosts, expand_speeds
from pipeloom.cost.model import CostModel, ScheduleCosts
from pipeloom.cost.units import parse_memory
from pipeloom.errors import ScheduleError
from pipeloom.ir.action import Kind
from pipeloom.ir.dependencies import RULES
from pipeloom.ir.garbage import paused_garbage_collection
from pipeloom.ir.schedule import Schedule
from pipeloom.ir.timeline import Span, Timeline
from pipeloom.simulate.analysis import analyse_graph
from pipeloom.simulate.build_graph import Channel, Communication, Sends, build_graph
from pipeloom.simulate.graph import NONE, CannotProceed, EventGraph, find_times
from pipeloom.verify.soundness import is_misshapen


def simulate(
    schedule: Schedule,
    costs: CostModel | None = None,
    *,
    sends: Sends = "buffered",
    channel: Channel = "edge",
    communication: Communication = "overlapped",
    speeds: Sequence[float] | Mapping[int, float] | None = None,
    memory: float | str | None = None,
) -> Timeline:
    """Predict a schedule's Timeline; costs are 1 for each of F, I and W unless given.

    ``sends`` and ``channel`` are the communication models of the verifier. ``communication``
    ``"serialised"`` holds a rank while it sends and receives. ``speeds`` says how fast ranks
    compute, in place of what the costs say. ``memory`` is a limit to measure against: a number in
    the costs' memory unit, or a text such as ``"40GiB"``.

    An order that cannot proceed raises the verifier's report.

    >>> from pipeloom.ir.notation import parse_grid
    >>> timeline = simulate(parse_grid('''
    ...     0F0 0F1 0B0 0B1
    ...     1F0 1B0 1F1 1B1'''))
    >>> timeline.makespan, timeline.span, timeline.bubble_makespan
    (9.0, 9.0, 0.33333333333333337)
    """
    _refuse_misshapen(schedule)
    bound = bind_costs(schedule, costs, speeds)
    limit = None if memory is None else parse_memory(memory, bound.memory_unit)
    with paused_garbage_collection():
        return _simulate(bound, costs, limit, sends, channel, communication)


def _simulate(
    bound: ScheduleCosts,
    costs: CostModel | None,
    limit: float | None,
    sends: Sends,
    channel: Channel,
    communication: Communication,
) -> Timeline:
    schedule = bound.schedule
    graph, starts, ends, order = _walk(bound, sends, channel, communication)
    spans, node_of_span = _collect_spans(graph, starts, ends)
    timeline = Timeline(
        schedule=schedule,
        spans=tuple(spans),
        time_unit=bound.time_unit,
        memory_unit=bound.memory_unit,
        memory_limit=limit,
        rank_offsets=(0.0,) * schedule.num_ranks,
        metadata={
            "sends": sends,
            "channel": channel,
            "communication": communication,
            "costs": repr(costs if costs is not None else UNIT_COSTS),
        },
    )
    return analyse_graph(timeline, bound, graph, starts, ends, order, node_of_span)


def find_makespan(
    schedule: Schedule,
    costs: CostModel | None = None,
    *,
    sends: Sends = "buffered",
    channel: Channel = "edge",
    communication: Communication = "overlapped",
) -> float:
    """The makespan alone: several times as fast as :func:`simulate`, for searching."""
    _refuse_misshapen(schedule)
    bound = bind_costs(schedule, costs)
    with paused_garbage_collection():
        graph, _, ends, _ = _walk(bound, sends, channel, communication)
    return max(ends[: graph.num_actions], default=0.0)


FUSED_LANE = RULES[Kind.OVERLAP_F_B].lane

UNIT_COSTS = UniformCosts(forward=1.0, input=1.0, weight=1.0)


def bind_costs(
    schedule: Schedule,
    costs: CostModel | None = None,
    speeds: Sequence[float] | Mapping[int, float] | None = None,
) -> ScheduleCosts:
    """The costs at the shape of a schedule; 1 for each of F, I and W where none are given."""
    bound = (UNIT_COSTS if costs is None else costs).bind(schedule)
    if speeds is not None:
        # Checked as the costs' own speeds are.
        checked = replace(UNIT_COSTS, speeds=speeds).speeds
        bound = replace(bound, speeds=expand_speeds(checked, schedule.num_ranks))
    return bound


def _refuse_misshapen(schedule: Schedule) -> None:
    from pipeloom.verify.verifier import verify

    if is_misshapen(schedule):
        verify(schedule).raise_for_errors()


def _walk(
    bound: ScheduleCosts, sends: Sends, channel: Channel, communication: Communication
) -> tuple[EventGraph, list[float], list[float], list[int]]:
    for name, value, known in (
        ("sends", sends, ("buffered", "rendezvous", "blocking")),
        ("channel", channel, ("edge", "pair", "all")),
        ("communication", communication, ("overlapped", "serialised")),
    ):
        if value not in known:
            raise ScheduleError(f"{name} must be one of {', '.join(known)}, not {value!r}")
    try:
        graph = build_graph(bound, sends=sends, channel=channel, communication=communication)
        return graph, *find_times(graph)
    except (CannotProceed, ScheduleError, LookupError, TypeError) as error:
        _explain(bound.schedule, sends, channel, communication, error)
        raise


def _explain(
    schedule: Schedule,
    sends: Sends,
    channel: Channel,
    communication: Communication,
    error: Exception,
) -> None:
    """Raise the verifier's report on a schedule that the engine could not walk."""
    from pipeloom.verify.verifier import verify

    if communication == "serialised" and sends == "rendezvous":
        sends = "blocking"
    verify(schedule, sends=sends, channel=channel).raise_for_errors()
    # What the verifier lets pass but no clock can: the strictest model tells why.
    verify(schedule, sends="blocking", channel="all").raise_for_errors()
    if isinstance(error, CannotProceed):
        raise ScheduleError(
            f"schedule {schedule.name!r} cannot be simulated: it waits for something that it "
            "never makes, or makes something twice"
        ) from None


def _collect_spans(
    graph: EventGraph, starts: list[float], ends: list[float]
) -> tuple[list[Span], list[int]]:
    """(the spans by start and rank, the node of each)"""
    num_actions, num_ranks = graph.num_actions, graph.schedule.num_ranks
    shown = starts[:num_actions]
    issued_after = graph.issued_after
    for node, send in graph.send_of.items():
        # On its way since the send began, waited for since the rank came to it.
        clock = issued_after[node]
        posted = 0.0 if clock == NONE else ends[clock]
        shown[node] = min(ends[node], max(posted, starts[send]))
    lanes = [
        FUSED_LANE if isinstance(footprint, tuple) else footprint.lane
        for footprint in graph.footprints
    ]
    ranks = [rank for rank in range(num_ranks) for _ in graph.nodes_of(rank)]
    # As Span(...), without the cost of a call for each of a million spans.
    columns = zip(ranks, lanes, shown, ends, graph.actions, strict=False)
    spans: list[Span] = list(map(tuple.__new__, repeat(Span), columns))
    if not graph.unwritten_sends:
        # Rank by rank already, and sorting keeps what is equal in order.
        nodes = sorted(range(num_actions), key=shown.__getitem__)
        return [spans[node] for node in nodes], nodes
    placement = graph.schedule.placement
    for node, action in graph.unwritten_sends.items():
        assert action.stage is not None
        rank = placement.rank_of(action.stage)
        spans.append(Span(rank, RULES[action.kind].lane, starts[node], ends[node], action))
    nodes = [*range(num_actions), *graph.unwritten_sends]
    by_start = sorted(range(len(spans)), key=lambda index: (spans[index][2], spans[index][0]))
    return [spans[index] for index in by_start], [nodes[index] for index in by_start]
