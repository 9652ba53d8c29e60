"""One order of everything that all ranks do, as time would bring it.

::

    rank 0   0F0  0F1  0B0  0B1         time    0    1    2    3    4    5    6    7    8
    rank 1   1F0  1B0  1F1  1B1         rank 0  0F0  0F1  ·    0B0 ──  ·    0B1 ──
                                        rank 1  ·    1F0  1B0 ──  1F1  1B1 ──

Passes that add something in which several ranks take part (a message, an exchange between copies)
insert it for all of them at one instant of this walk. Since every rank's program is then a part of
one common order, no rank can wait for another in a circle, whatever the communication model.

An action takes as many units of time as it completes outputs, input gradients and weight
gradients: F, I and W one, B two, a fused action the sum of its parts, stage-wide actions none.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from typing import NamedTuple, NoReturn

from pipeloom.errors import ScheduleError
from pipeloom.ir.action import Action
from pipeloom.ir.dependencies import (
    INPUT_GRADIENT,
    OUTPUT,
    WEIGHT_GRADIENT,
    Product,
    simple_actions,
)
from pipeloom.ir.schedule import Schedule

_WORK = frozenset({OUTPUT, INPUT_GRADIENT, WEIGHT_GRADIENT})


class Ended(NamedTuple):
    """An action that has just ended on a rank, and what it produced."""

    rank: int
    action: Action
    products: tuple[Product, ...]


class Instant(NamedTuple):
    """What happens at one point in time: first the ends, then the starts that they allow."""

    ended: list[Ended]
    started: list[tuple[int, Action]]


def walk_in_time_order(schedule: Schedule) -> Iterator[Instant]:
    """Walk a compute-only schedule from instant to instant, in time linear in its actions.

    A schedule that cannot be carried through raises :class:`ScheduleError`, with the verifier's
    story of who waits for whom.

    >>> from pipeloom.ir.notation import parse_grid
    >>> for instant in walk_in_time_order(parse_grid("0F0 0F1 0B0 0B1\\n1F0 1B0 1F1 1B1")):
    ...     print([action for _, action, _ in instant.ended], [a for _, a in instant.started])
    [] [0F0]
    [0F0] [0F1, 1F0]
    [0F1, 1F0] [1B0]
    [1B0] [1F1, 0B0]
    [1F1] [1B1]
    [0B0] []
    [1B1] [0B1]
    [0B1] []
    """
    _check_places(schedule)
    table = schedule.dependencies
    rank_of = schedule.placement.ranks
    rows = schedule.actions
    position = [0] * len(rows)
    produced: set[Product] = set()
    waiting: dict[Product, list[int]] = {}
    meeting: dict[tuple[Action, ...], list[int]] = {}
    ending: dict[int, list[Ended]] = {0: []}
    times = [0]
    while times:
        now = heappop(times)
        ended = ending.pop(now)
        candidates = [end.rank for end in ended] if now else list(range(len(rows)))
        for _, _, products in ended:
            for product in products:
                produced.add(product)
                if product in waiting:
                    candidates += waiting.pop(product)
        started: list[tuple[int, Action]] = []
        # The list grows while it is walked: actions that take no time let others start at once.
        for rank in candidates:
            if position[rank] == len(rows[rank]):
                continue
            action = rows[rank][position[rank]]
            for product in table.needs(action):
                if product not in produced:
                    waiting.setdefault(product, []).append(rank)
                    break
            else:
                together = [rank]
                if action[2] is None and not action[3]:
                    partners = [
                        partner
                        for partner in table.partners_of(action)
                        if rank_of[partner[1]] != rank  # type: ignore[index]
                    ]
                    if partners:
                        group = tuple(sorted((action, *partners), key=str))
                        arrived = meeting.setdefault(group, [])
                        arrived.append(rank)
                        if len(arrived) < len(group):
                            continue
                        together = meeting.pop(group)
                for member in together:
                    action = rows[member][position[member]]
                    position[member] += 1
                    started.append((member, action))
                    products = table.produces(action)
                    work = sum([product[0] in _WORK for product in products])
                    if work:
                        end = now + work
                        if end not in ending:
                            ending[end] = []
                            heappush(times, end)
                        ending[end].append(Ended(member, action, products))
                    else:
                        candidates.append(member)
                        for product in products:
                            produced.add(product)
                            candidates += waiting.pop(product, ())
        yield Instant(ended, started)
    if any(position[rank] < len(row) for rank, row in enumerate(rows)):
        _raise_stuck(schedule, position)


def _check_places(schedule: Schedule) -> None:
    """Refuse what the table cannot be asked about; the verifier says what is wrong with it."""
    ranks = schedule.placement.ranks
    num_stages = min(schedule.num_stages, len(ranks))
    for rank, row in enumerate(schedule.actions):
        for action in row:
            for part in simple_actions(action):
                stage = part[1]
                if stage is None or stage >= num_stages or ranks[stage] != rank:
                    _raise_invalid(schedule)
    if None in ranks:
        _raise_invalid(schedule)


def _raise_invalid(schedule: Schedule) -> NoReturn:
    from pipeloom.verify.verifier import verify

    verify(schedule).raise_for_errors()
    raise ScheduleError(f"{schedule.name} has actions of stages that its placement does not name")


def _raise_stuck(schedule: Schedule, position: list[int]) -> NoReturn:
    from pipeloom.verify.verifier import verify

    verify(schedule).raise_for_errors()
    heads = ", ".join(
        f"rank {rank} at {row[position[rank]]}"
        for rank, row in enumerate(schedule.actions)
        if position[rank] < len(row)
    )
    raise ScheduleError(f"{schedule.name} cannot be carried through; what waits: {heads}")
