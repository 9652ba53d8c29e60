"""Costs from a recorded run: what every stage took, the middle of its microbatches.

::

    rank 0   |0F0 |0F1|0F2 | …        forward[0] = the median of 0F0, 0F1, 0F2, …
    rank 1        |1F0|1F1| …         forward[1] = …

The median, because the first microbatch of a run warms caches up and a few others are disturbed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from statistics import median

from pipeloom.cost.constant import StageCosts
from pipeloom.errors import CostFileError
from pipeloom.ir.action import Kind
from pipeloom.ir.dependencies import RULES, Role
from pipeloom.ir.timeline import Timeline

#: The field that a kind's measured duration goes to.
_FIELD_OF_KIND = {
    Kind.F: "forward",
    Kind.I: "input",
    Kind.W: "weight",
    Kind.B: "full",
    Kind.UNSHARD: "unshard",
    Kind.RESHARD: "reshard",
    Kind.REDUCE_GRAD: "reduce_grad",
}


def costs_from_timelines(
    timelines: Timeline | Iterable[Timeline], *, input_share: float = 0.5
) -> StageCosts:
    """StageCosts from one recorded timeline, or from several of the same stages.

    Where a run had full backwards only, ``input_share`` of each counts as the gradient of inputs;
    where it had split backwards only, the full one is their sum. Fused actions are not counted:
    nobody measures their parts. The latency is the median time by which a receive that was
    already waited for ended after its send.
    """
    if isinstance(timelines, Timeline):
        timelines = [timelines]
    timelines = list(timelines)
    if not timelines:
        raise CostFileError("costs are read off at least one timeline")
    num_stages = timelines[0].schedule.num_stages
    units = {timeline.time_unit for timeline in timelines}
    if any(t.schedule.num_stages != num_stages for t in timelines) or len(units) > 1:
        raise CostFileError("timelines of other stages or other units cannot be put together")
    durations: dict[tuple[str, int], list[float]] = defaultdict(list)
    for timeline in timelines:
        for span in timeline.spans:
            name = _FIELD_OF_KIND.get(span.action.kind)
            if name is not None and span.action.stage is not None:
                durations[name, span.action.stage].append(span.duration)
    middle = {key: median(times) for key, times in durations.items()}
    missing = []

    def measured(name: str, stage: int) -> float | None:
        return middle.get((name, stage))

    columns: dict[str, list[float]] = {name: [] for name in _FIELD_OF_KIND.values()}
    for stage in range(num_stages):
        forward = measured("forward", stage)
        full = measured("full", stage)
        input_, weight = measured("input", stage), measured("weight", stage)
        has_halves = input_ is not None and weight is not None
        if forward is None or (full is None and not has_halves):
            what = "forward" if forward is None else "backward"
            missing.append(f"stage {stage} has no {what} that ran alone")
            continue
        if full is None:
            assert input_ is not None
            assert weight is not None
            full = input_ + weight
        columns["forward"].append(forward)
        columns["full"].append(full)
        columns["input"].append(full * input_share if input_ is None else input_)
        columns["weight"].append(full * (1 - input_share) if weight is None else weight)
        for name in ("unshard", "reshard", "reduce_grad"):
            columns[name].append(measured(name, stage) or 0.0)
    if missing:
        raise CostFileError("the timeline does not say all costs: " + "; ".join(missing))
    return StageCosts(
        forward=columns["forward"],
        input=columns["input"],
        weight=columns["weight"],
        full=columns["full"],
        latency=_measure_latency(timelines),
        unshard=columns["unshard"],
        reshard=columns["reshard"],
        reduce_grad=columns["reduce_grad"],
        time_unit=units.pop(),
    )


def _measure_latency(timelines: Iterable[Timeline]) -> float:
    delays = []
    for timeline in timelines:
        table = timeline.schedule.dependencies
        sends: dict[object, tuple[float, float]] = {}
        receives: dict[object, tuple[float, float]] = {}
        for _, _, start, end, action in timeline.spans:
            role = RULES[action.kind].role
            if role is Role.SEND:
                sends[table.message_of(action)] = (start, end)
            elif role is Role.RECEIVE:
                receives[table.message_of(action)] = (start, end)
        for message, (posted, arrived) in receives.items():
            if message in sends:
                sent, _ = sends[message]
                if posted <= sent <= arrived:
                    delays.append(arrived - sent)
    return median(delays) if delays else 0.0
