"""What decides the makespan, and how much everything else could wait.

::

    rank 0   0F0─┐        ┌─0B0
    rank 1       └1F0─1B0─┘           the critical path: each begins when the one before it ends

    slack of an action: how much later it could end with the makespan as it is
"""

from __future__ import annotations

from pipeloom.simulate.graph import NONE, EventGraph

#: Times closer than this share of the makespan are the same: sums in another order differ by it.
ROUNDING = 1e-9


def find_slack(
    graph: EventGraph, ends: list[float], order: list[int], horizon: float
) -> list[float]:
    """Per node: the latest end that harms nothing, minus the end."""
    weights, before = graph.weights, graph.before
    latest = [horizon] * len(weights)
    for node in reversed(order):
        limit = latest[node] - weights[node]
        for earlier in before[node]:
            if limit < latest[earlier]:
                latest[earlier] = limit
    tolerance = ROUNDING * horizon
    return [
        0.0 if late - end <= tolerance else late - end
        for late, end in zip(latest, ends, strict=True)
    ]


def find_critical_nodes(
    graph: EventGraph, starts: list[float], ends: list[float], is_exact: bool
) -> list[int]:
    """The nodes of one longest chain of cause and effect, in order of time.

    From the last end backwards: whatever ended last before a node could start. In a simulated
    timeline it ends exactly then; in a measured one there may be a pause.
    """
    count = graph.num_actions
    if not count:
        return []
    node = max(range(count), key=ends.__getitem__)
    path = []
    seen = set()
    while node not in seen:
        seen.add(node)
        path.append(node)
        binding = NONE
        for earlier in graph.before[node]:
            if binding == NONE or ends[earlier] > ends[binding]:
                binding = earlier
        if binding == NONE or (is_exact and starts[node] <= 0 and ends[binding] <= 0):
            break
        node = binding
    path.reverse()
    return [node for node in path if node < count]
