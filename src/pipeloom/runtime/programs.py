"""From what a user asks for to the programs that run: named, loaded or given, complete, verified.

::

    "1f1b", 8 microbatches ──► build ──► lower ──► verify ──► Schedule, kept by microbatches
    eval with 3 ──► forward only, same placement ──► lower ──► verify ──► Schedule, kept as well
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeloom.errors import ScheduleError
from pipeloom.ir.schedule import Schedule
from pipeloom.ir.serialization import load_schedule
from pipeloom.passes.pipeline import lower
from pipeloom.schedules.fill_drain import forward_only_like
from pipeloom.schedules.registry import build_schedule, find_schedule
from pipeloom.verify.verifier import verify

__all__ = ["Programs", "infer_ranks"]

#: Programs are kept for this many numbers of microbatches, the ones used last.
MOST_KEPT = 16

ScheduleLike = str | Path | Schedule


def is_file(request: ScheduleLike) -> bool:
    """True for what names a file: a path, or text with the suffix of one."""
    return isinstance(request, Path) or (
        isinstance(request, str) and request.lower().endswith((".csv", ".json"))
    )


def infer_ranks(request: ScheduleLike, *, num_stages: int, ranks: int | None) -> int:
    """How many ranks a schedule and a number of stages make, where nobody says."""
    if isinstance(request, Schedule):
        return request.num_ranks
    if is_file(request):
        return load_schedule(request).num_ranks
    if ranks is not None:
        return ranks
    entry = find_schedule(str(request))
    if num_stages % entry.default_chunks:
        raise ScheduleError(
            f"{entry.name} places {entry.default_chunks} stages on a rank, and {num_stages} stages "
            "do not divide into that; say ranks=…, or give another number of stages"
        )
    return num_stages // entry.default_chunks


class Programs:
    """Every program that one pipeline runs."""

    def __init__(
        self,
        request: ScheduleLike,
        *,
        num_stages: int,
        ranks: int,
        microbatches: int | None,
        options: Mapping[str, Any],
        sends: str,
        channel: str,
        sharded: Collection[int] = (),
        skip_connections: Sequence[tuple[int, int]] = (),
    ) -> None:
        self._request = request
        self._num_stages = num_stages
        self._ranks = ranks
        self._options = dict(options)
        self._model: dict[str, Any] = {"sends": sends, "channel": channel}
        self._sharded = sharded
        self._skip_connections = tuple(skip_connections)
        self._kept: OrderedDict[tuple[int, bool], Schedule] = OrderedDict()
        self._given: Schedule | None = None
        if isinstance(request, Schedule):
            self._given = request
        elif is_file(request):
            self._given = load_schedule(request)
        if self._given is not None:
            self._given = self._with_skip_connections(self._given)
        self.microbatches = self._find_microbatches(microbatches)
        #: What was asked for, before anything was added to it.
        self.source = self._given or self._build(self.microbatches)

    def _find_microbatches(self, microbatches: int | None) -> int:
        if self._given is not None:
            own = self._given.num_microbatches
            if microbatches not in (None, own):
                raise ScheduleError(
                    f"the schedule {self._given.name!r} is for {own} microbatches, not "
                    f"{microbatches}; leave microbatches out, or give the schedule by name"
                )
            if self._given.num_ranks != self._ranks:
                raise ScheduleError(
                    f"the schedule {self._given.name!r} is for {self._given.num_ranks} ranks, but "
                    f"there are {self._ranks}"
                )
            return own
        if microbatches is None:
            raise ScheduleError(
                f"how many microbatches? say microbatches=… for the schedule {self._request!r}"
            )
        return microbatches

    def _build(self, microbatches: int) -> Schedule:
        entry = find_schedule(str(self._request))
        chunks = None
        if entry.takes_chunks and self._num_stages % self._ranks == 0:
            chunks = self._num_stages // self._ranks
        schedule = build_schedule(
            entry.name,
            ranks=self._ranks,
            microbatches=microbatches,
            chunks=chunks,
            **self._options,
        )
        return self._with_skip_connections(schedule)

    def _with_skip_connections(self, schedule: Schedule) -> Schedule:
        """Every chain gets the edges, which are said for the first one."""
        if not self._skip_connections:
            return schedule
        if schedule.has_communication:
            raise ScheduleError(
                f"the schedule {schedule.name!r} has its communication already; skip connections "
                "must be part of its topology: save it as JSON"
            )
        first = schedule.topology.chains[0]
        place = {stage: position for position, stage in enumerate(first)}
        unknown = [edge for edge in self._skip_connections if not place.keys() >= set(edge)]
        if unknown:
            raise ScheduleError(
                f"the skip connections {unknown} name stages that are not among {list(first)}"
            )
        edges = [
            (chain[place[before]], chain[place[after]])
            for chain in schedule.topology.chains
            for before, after in self._skip_connections
        ]
        return replace(schedule, topology=schedule.topology.with_edges(*edges))

    def training(self, microbatches: int | None = None) -> Schedule:
        """The complete program of a training step."""
        return self._find(self.microbatches if microbatches is None else microbatches, True)

    def forward_only(self, microbatches: int | None = None) -> Schedule:
        """The complete program of an evaluation, for any number of microbatches."""
        return self._find(self.microbatches if microbatches is None else microbatches, False)

    def _find(self, microbatches: int, training: bool) -> Schedule:
        key = (microbatches, training)
        program = self._kept.get(key)
        if program is None:
            program = self._kept[key] = self._complete(self._make(microbatches, training))
            if len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return program

    def _make(self, microbatches: int, training: bool) -> Schedule:
        if not training:
            return forward_only_like(self.source, microbatches)
        if microbatches == self.microbatches:
            return self.source
        if self._given is not None:
            raise ScheduleError(
                f"the schedule {self._given.name!r} is for {self.microbatches} microbatches, not "
                f"{microbatches}; only a schedule given by name can change that from step to step"
            )
        return self._build(microbatches)

    def _complete(self, schedule: Schedule) -> Schedule:
        """Add what is missing, and prove that it works on this transport."""
        if not schedule.has_communication:
            # A program that does not run is told so on what the user gave, not on what became of it
            verify(schedule, **self._model).raise_for_errors()
            shard = bool(self._sharded) and not schedule.sharded_stages
            # Early: a message travels once its receive is posted, so it does while the receiver
            # still computes. One computation ahead is one buffer more per edge, whatever M is.
            schedule = lower(
                schedule,
                shard=self._sharded if shard else False,
                receives="early",
                receive_lookahead=1,
                **self._model,
            )
        verify(schedule, **self._model).raise_for_errors()
        return schedule
