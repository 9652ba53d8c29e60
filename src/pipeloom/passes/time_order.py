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
from typing import NamedTuple, NoReturn, TypeAlias

from pipeloom.errors import ScheduleError
from pipeloom.ir.action import Action, Kind
from pipeloom.ir.product_numbers import ProductNumbers
from pipeloom.ir.products import (
    INPUT_GRADIENT,
    OUTPUT,
    WEIGHT_GRADIENT,
)
from pipeloom.ir.questions import simple_actions
from pipeloom.ir.schedule import Schedule
from pipeloom.verify.soundness import is_misshapen

_WORK = frozenset({OUTPUT, INPUT_GRADIENT, WEIGHT_GRADIENT})


class Step(NamedTuple):
    """An action in numbers: its needs and products (add the microbatch), and its duration."""

    needs: tuple[int, ...]
    produces: tuple[int, ...]
    duration: int


#: The rank that runs an action, the action, and the action in numbers.
Placed: TypeAlias = tuple[int, Action, Step]


class Instant(NamedTuple):
    """What happens at one point in time: first the ends, then the starts that they allow."""

    #: What takes no time has no end of its own.
    ended: list[Placed]
    started: list[Placed]


def walk_in_time_order(schedule: Schedule) -> Iterator[Instant]:
    """Walk a compute-only schedule from instant to instant, in time linear in its actions.

    A schedule that cannot be carried through raises :class:`ScheduleError`, with the verifier's
    story of who waits for whom.

    >>> from pipeloom.ir.notation import parse_grid
    >>> for instant in walk_in_time_order(parse_grid("0F0 0F1 0B0 0B1\\n1F0 1B0 1F1 1B1")):
    ...     print([action for _, action, _ in instant.ended], [a for _, a, _ in instant.started])
    [] [0F0]
    [0F0] [0F1, 1F0]
    [0F1, 1F0] [1B0]
    [1B0] [1F1, 0B0]
    [1F1] [1B1]
    [0B0] []
    [1B1] [0B1]
    [0B1] []
    """
    if is_misshapen(schedule):
        _raise_invalid(schedule)
    numbers = ProductNumbers(schedule.dependencies)
    rows = [list(_place(schedule, rank, numbers)) for rank in range(schedule.num_ranks)]
    produced = bytearray(numbers.count)
    position = [0] * len(rows)
    waiting: dict[int, list[int]] = {}
    meetings = _Meetings(schedule)
    ending: dict[int, list[Placed]] = {0: []}
    times = [0]
    while times:
        now = heappop(times)
        candidates = [] if now else list(range(len(rows)))
        ended = ending.pop(now)
        for rank, action, step in ended:
            candidates.append(rank)
            shift = action[2] or 0
            for base in step[1]:
                produced[base + shift] = 1
                if base + shift in waiting:
                    candidates += waiting.pop(base + shift)
        started: list[Placed] = []
        # The list grows while it is walked: actions that take no time let others start at once.
        for rank in candidates:
            row = rows[rank]
            if position[rank] == len(row):
                continue
            _, action, step = row[position[rank]]
            shift = action[2] or 0
            for base in step[0]:
                if not produced[base + shift]:
                    waiting.setdefault(base + shift, []).append(rank)
                    break
            else:
                for member in (rank,) if shift else meetings.join(rank, action):
                    placed = rows[member][position[member]]
                    position[member] += 1
                    started.append(placed)
                    _, action, (_, produces, duration) = placed
                    if duration:
                        end = now + duration
                        if end not in ending:
                            ending[end] = []
                            heappush(times, end)
                        ending[end].append(placed)
                    else:
                        candidates.append(member)
                        shift = action[2] or 0
                        for base in produces:
                            produced[base + shift] = 1
                            candidates += waiting.pop(base + shift, ())
        yield Instant(ended, started)
    if any(position[rank] < len(row) for rank, row in enumerate(rows)):
        _raise_stuck(schedule, position)


def _place(schedule: Schedule, rank: int, numbers: ProductNumbers) -> Iterator[Placed]:
    """Put one rank's actions in numbers; refuse what the table cannot be asked about."""
    num_microbatches = schedule.num_microbatches
    known: dict[tuple[Kind, int | None], Step] = {}
    for action in schedule.actions[rank]:
        kind, stage, microbatch, parts, _ = action
        if microbatch is not None and microbatch >= num_microbatches:
            _raise_invalid(schedule)
        step = known.get((kind, stage))
        if step is None:
            step = _make_step(schedule, rank, action, numbers)
            if not parts:
                known[kind, stage] = step
        yield rank, action, step


def _make_step(schedule: Schedule, rank: int, action: Action, numbers: ProductNumbers) -> Step:
    ranks = schedule.placement.ranks
    num_stages = min(schedule.num_stages, len(ranks))
    for _, stage, microbatch, _, _ in simple_actions(action):
        if stage is None or stage >= num_stages or ranks[stage] != rank:
            _raise_invalid(schedule)
        if microbatch is not None and microbatch >= schedule.num_microbatches:
            _raise_invalid(schedule)
    pattern = numbers.pattern_of(action)
    products = schedule.dependencies.produces(action)
    work = sum([product[0] in _WORK for product in products])
    return Step(pattern.needs, pattern.produces, work)


class _Meetings:
    """Ranks that have come to an action which they run together with others."""

    def __init__(self, schedule: Schedule) -> None:
        self.partners_of = schedule.dependencies.partners_of
        self.ranks = schedule.placement.ranks
        self.arrived: dict[tuple[int | None, ...], list[int]] = {}

    def join(self, rank: int, action: Action) -> tuple[int, ...]:
        """The ranks that may go on, now that this one has come; none while some are missing."""
        partners = [partner[1] for partner in self.partners_of(action)]
        stages = [action[1], *(s for s in partners if self.ranks[s] != rank)]  # type: ignore[index]
        if len(stages) == 1:
            return (rank,)
        group = tuple(sorted(stages, key=str))
        arrived = self.arrived.setdefault(group, [])
        arrived.append(rank)
        return tuple(self.arrived.pop(group)) if len(arrived) == len(group) else ()


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
