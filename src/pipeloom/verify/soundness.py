"""Is every action one that this program can have at all? The other checks see only those.

::

    2 ranks, stages 0 1, 2 microbatches

    0F0  0F7  5F0      0F7: UNKNOWN_MICROBATCH, 5F0: UNKNOWN_STAGE
    1F0  0B0           0B0: WRONG_RANK, and stage 0 is then on two ranks: STAGE_ON_TWO_RANKS
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pipeloom.ir.action import Action, Kind
from pipeloom.ir.dependencies import RULES, Dependencies
from pipeloom.ir.placement import Placement
from pipeloom.ir.questions import (
    find_malformed,
    is_communication,
    is_compute,
    simple_actions,
)
from pipeloom.ir.schedule import Schedule
from pipeloom.verify.report import Place, Violation, runs_of

#: More microbatches times stages than this are checked only where there are actions for them.
MOST_PRODUCTS = 4_000_000


class SoundRows(NamedTuple):
    """What is left of a program without the actions that make no sense in it."""

    #: As many rows as the placement has ranks.
    rows: tuple[tuple[Action, ...], ...]
    #: For each rank the original positions of its actions; ``None`` where none was left out.
    positions: tuple[tuple[int, ...] | None, ...]
    #: The placement, with an entry for every stage of the topology.
    placement: Placement
    num_microbatches: int
    has_communication: bool
    #: Ranks that hold stages and have no actions at all: what they miss is said once.
    absent_ranks: frozenset[int]
    violations: list[Violation]


def is_misshapen(schedule: Schedule) -> bool:
    """True if a schedule's parts are made for different shapes, which those who count ranks, stages
    and microbatches cannot even begin to walk. The verifier says what is wrong with it.

    >>> from pipeloom.ir.notation import parse_grid
    >>> is_misshapen(parse_grid("0F0\\n1F0"))
    False
    """
    return (
        len(schedule.actions) != schedule.num_ranks
        or schedule.placement.num_stages != schedule.num_stages
        or schedule.num_microbatches < 1
        or has_too_few_actions(schedule)
    )


def has_too_few_actions(schedule: Schedule) -> bool:
    """True for a number of microbatches that no machine could list, and that the few actions cannot
    reach by far."""
    num_actions = sum(map(len, schedule.actions))
    return schedule.num_microbatches * schedule.num_stages > max(MOST_PRODUCTS, 10 * num_actions)


def find_sound_actions(schedule: Schedule) -> SoundRows:
    """Sort out the actions that no program of this shape can have."""
    return _Sorter(schedule).sort()


class _Sorter:
    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.topology = schedule.topology
        self.violations: list[Violation] = []
        num_stages = self.topology.num_stages
        known = schedule.placement.ranks[:num_stages]
        self.placement = Placement(
            known + (None,) * (num_stages - len(known)), schedule.placement.num_ranks
        )
        self.num_microbatches = self.find_num_microbatches()
        self.table = Dependencies(
            self.topology, self.placement, num_microbatches=self.num_microbatches
        )
        #: (kind, stage, peer) → (microbatches it may have, rank of the stage).
        self.known: dict[
            tuple[Kind, int | None, int | None], tuple[Sequence[int | None], int | None]
        ] = {}
        #: Computations away from the rank of their stage: stage → places.
        self.strays: dict[int, list[Place]] = {}
        self.first_message: Place | None = None

    def find_num_microbatches(self) -> int:
        """The number to check against. One that is far too large is reported and cut down."""
        claimed, num_stages = self.schedule.num_microbatches, self.topology.num_stages
        if not has_too_few_actions(self.schedule):
            return max(claimed, 0)
        num_actions = sum(map(len, self.schedule.actions))
        self.report(
            "TOO_FEW_ACTIONS",
            f"{num_actions} actions cannot run {claimed} microbatches through {num_stages} stages",
            "correct the number of microbatches",
        )
        return num_actions // num_stages + 1

    def sort(self) -> SoundRows:
        schedule = self.schedule
        num_ranks = self.placement.num_ranks
        self.check_shape()
        rows: list[tuple[Action, ...]] = []
        positions: list[tuple[int, ...] | None] = []
        known = self.known
        for rank, row in enumerate(schedule.actions[:num_ranks]):
            refused: set[int] = set()
            for position, action in enumerate(row):
                # Nearly every action is like one that was looked at before, but for its microbatch.
                try:
                    if type(action) is Action and not action[3]:
                        verdict = known.get((action[0], action[1], action[4]))
                        if verdict is not None and verdict[1] == rank and action[2] in verdict[0]:
                            continue
                except TypeError:
                    pass  # it holds what cannot even be hashed
                if not self.look_at(rank, position, action):
                    refused.add(position)
            if refused:
                kept = tuple(position for position in range(len(row)) if position not in refused)
                rows.append(tuple(row[position] for position in kept))
                positions.append(kept)
            else:
                rows.append(tuple(row))
                positions.append(None)
        rows += [()] * (num_ranks - len(rows))
        positions += [None] * (num_ranks - len(positions))
        self.report_two_ranks(rows)
        if self.first_message is not None and not schedule.has_communication:
            self.report(
                "UNDECLARED_COMMUNICATION",
                "the schedule says that it is compute-only, yet it sends or receives",
                "make it with has_communication=True, or leave the messages to lower()",
                self.first_message,
            )
        absent = frozenset(
            rank
            for rank in range(num_ranks)
            if self.placement.stages_on(rank)
            and (rank >= len(schedule.actions) or not schedule.actions[rank])
        )
        for rank in sorted(absent):
            stages = ", ".join(map(str, self.placement.stages_on(rank)))
            self.violations.append(
                Violation(
                    "MISSING_RANK",
                    f"rank {rank} holds stage {stages} and has no actions",
                    f"give rank {rank} its row, or place its stages elsewhere",
                    rank,
                )
            )
        idle = [r for r in range(len(schedule.actions), num_ranks) if r not in absent]
        for first, last in runs_of(idle):
            ranks = f"rank {first}" if first == last else f"ranks {first}..{last}"
            self.report(
                "MISSING_RANK",
                f"the placement has {ranks}, for which there is no row",
                "give a rank without stages an empty row, or make the placement for fewer ranks",
            )
        return SoundRows(
            tuple(rows),
            tuple(positions),
            self.placement,
            self.num_microbatches,
            schedule.has_communication or self.first_message is not None,
            absent,
            self.violations,
        )

    def check_shape(self) -> None:
        """What is wrong before any action is looked at."""
        schedule, num_stages = self.schedule, self.topology.num_stages
        num_ranks = self.placement.num_ranks
        if schedule.num_microbatches < 1:
            self.report(
                "NO_MICROBATCHES",
                f"the schedule has {schedule.num_microbatches} microbatches, so it trains nothing",
                "build it for at least one microbatch",
            )
        nowhere = [stage for stage, rank in enumerate(self.placement.ranks) if rank is None]
        for first, last in runs_of(nowhere):
            stages = f"stage {first} is" if first == last else f"stages {first}..{last} are"
            self.report(
                "STAGE_ON_NO_RANK",
                f"{stages} on no rank, so nothing of it ever runs",
                "is a row missing? give a rank the stage's actions, "
                "or number the stages without a gap",
            )
        for stage in range(num_stages, len(schedule.placement.ranks)):
            self.violations.append(
                Violation(
                    "UNKNOWN_STAGE",
                    f"the placement has stage {stage}, the topology only 0..{num_stages - 1}",
                    "make placement and topology for the same number of stages",
                    schedule.placement.ranks[stage],
                )
            )
        for rank in range(num_ranks, len(schedule.actions)):
            self.violations.append(
                Violation(
                    "UNKNOWN_RANK",
                    f"there are actions for rank {rank}, the placement has only "
                    f"ranks 0..{num_ranks - 1}",
                    "remove the row, or make the placement for as many ranks as there are rows",
                    rank,
                )
            )

    def look_at(self, rank: int, position: int, action: Action) -> bool:
        """Report what is wrong with an action; false if it makes no sense at all."""
        place = Place(rank, position, action)
        problem = self.find_problem(action)
        if problem is not None:
            # Without microbatches every action is unknown; that was said once.
            if problem[0] != "UNKNOWN_MICROBATCH" or self.num_microbatches:
                self.report(*problem, place)
            return False
        for part in simple_actions(action):
            home = self.remember(part)
            if home != rank:
                self.report_stray(part, home, place)
        if is_communication(action):
            self.first_message = self.first_message or place
        return True

    def remember(self, action: Action) -> int | None:
        """Note for the next microbatch that this kind of action is right at this stage, and where.
        The home of the stage."""
        _, stage, _, _, peer = action
        assert stage is not None
        microbatches = self.topology.microbatches_of(stage, self.num_microbatches)
        home = self.placement.ranks[stage]
        self.known[action.kind, stage, peer] = (
            microbatches if RULES[action.kind].has_microbatch else (None,),
            home,
        )
        return home

    def find_problem(self, action: Action) -> tuple[str, str, str] | None:
        """(code, why, hint) of what makes an action impossible here."""
        if type(action) is not Action:
            return (
                "MALFORMED_ACTION",
                f"{action!r} is no Action but a {type(action).__name__}",
                "make actions with parse_action('2F0') or Action(Kind.F, 2, 0)",
            )
        malformed = find_malformed(action)
        if malformed is not None:
            return (
                "MALFORMED_ACTION",
                malformed,
                "write it as in the table of the schedule language, for example 2F0 or 1SEND_F0",
            )
        for part in simple_actions(action):
            problem = self.find_problem_of_shape(part)
            if problem is not None:
                return problem
        return None

    def find_problem_of_shape(self, action: Action) -> tuple[str, str, str] | None:
        topology, num_microbatches = self.topology, self.num_microbatches
        _, stage, microbatch, _, peer = action
        assert stage is not None
        if stage >= topology.num_stages:
            return (
                "UNKNOWN_STAGE",
                f"there is no stage {stage}; the stages are 0..{topology.num_stages - 1}",
                "correct the stage, or make the topology for more stages",
            )
        microbatches = topology.microbatches_of(stage, num_microbatches)
        if microbatch is not None and microbatch not in microbatches:
            if len(topology.chains) > 1 and microbatch < num_microbatches:
                why = (
                    f"microbatch {microbatch} does not pass through stage {stage}, "
                    f"whose chain has the microbatches {_span(microbatches)}"
                )
            else:
                why = (
                    f"there is no microbatch {microbatch}; "
                    f"the microbatches are {_span(microbatches)}"
                )
            return (
                "UNKNOWN_MICROBATCH",
                why,
                "correct the number, or make the schedule for more microbatches",
            )
        if is_communication(action):
            return self.find_problem_of_edge(action, stage, peer)
        return None

    def find_problem_of_edge(
        self, action: Action, stage: int, peer: int | None
    ) -> tuple[str, str, str] | None:
        candidates = self.table.peers_of(action)
        names = " or ".join(map(str, candidates)) or "none"
        if peer is None and len(candidates) > 1:
            return (
                "AMBIGUOUS_PEER",
                f"stage {stage} could exchange this with stage {names}, and it does not say which",
                f"name the stage, as in {action._replace(peer=candidates[0])}",
            )
        if peer is None and not candidates:
            return (
                "NO_SUCH_EDGE",
                f"stage {stage} has no stage to exchange this with",
                "remove it: nothing travels beyond the ends of a chain",
            )
        if peer is not None and peer not in candidates:
            return (
                "NO_SUCH_EDGE",
                f"no edge leads between stage {stage} and stage {peer} in this direction; "
                f"possible here: {names}",
                "correct the stage, or add the edge to the topology",
            )
        other = candidates[0] if peer is None else peer
        rank = self.placement.ranks[stage]
        if rank is not None and rank == self.placement.ranks[other]:
            return (
                "MESSAGE_WITHIN_RANK",
                f"stages {stage} and {other} are both on rank {rank}",
                "remove the send and its receive: within a rank nothing needs to travel",
            )
        return None

    def report_stray(self, part: Action, home: int | None, place: Place) -> None:
        where = "no rank" if home is None else f"rank {home}"
        hint = f"place the stage on rank {place.rank}"
        self.report(
            "WRONG_RANK",
            f"stage {part.stage} is on {where}, not on rank {place.rank}",
            hint if home is None else f"move the action to {where}, or {hint}",
            place,
        )
        if is_compute(part):
            assert part.stage is not None
            self.strays.setdefault(part.stage, []).append(place)

    def report_two_ranks(self, rows: list[tuple[Action, ...]]) -> None:
        """Of the stages with computations away from home: those that have some at home too."""
        at_home = {
            part.stage
            for rank, row in enumerate(rows if self.strays else ())
            for action in row
            if is_compute(action)
            for part in simple_actions(action)
            if part.stage in self.strays and self.placement.ranks[part.stage] == rank
        }
        for stage, places in self.strays.items():
            if stage in at_home:
                others = " and ".join(map(str, sorted({place.rank for place in places})))
                self.violations.append(
                    Violation(
                        "STAGE_ON_TWO_RANKS",
                        f"stage {stage} is on rank {self.placement.ranks[stage]}, and rank "
                        f"{others} computes it too",
                        "keep all actions of a stage on one rank: its parameters are nowhere else",
                        *places[0],
                        related=tuple(places[1:]),
                    )
                )

    def report(self, code: str, why: str, hint: str, place: Place | None = None) -> None:
        self.violations.append(Violation(code, why, hint, *(place or ())))


def _span(numbers: range) -> str:
    return f"{numbers[0]}..{numbers[-1]}" if numbers else "none"
