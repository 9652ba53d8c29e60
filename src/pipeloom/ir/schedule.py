"""A schedule: for every rank, the actions it runs, in order. Data, nothing else.

::

    1f1b, 2 ranks, 3 microbatches

    rank 0   0F0 0F1 0B0 0F2 0B1 0B2
    rank 1   1F0 1B0 1F1 1B1 1F2 1B2

There are no bubbles in it: when an action runs, and who waits for whom, is what a Timeline shows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from pipeloom.errors import ScheduleError
from pipeloom.ir.action import Action
from pipeloom.ir.dependencies import RULES, Dependencies
from pipeloom.ir.placement import Placement
from pipeloom.ir.questions import (
    is_backward,
    is_communication,
    is_compute,
    simple_actions,
)
from pipeloom.ir.topology import Topology


@dataclass(frozen=True)
class Schedule:
    """Per-rank tuples of actions, and what is needed to read them.

    Two schedules are equal when everything but the name is.
    """

    placement: Placement
    topology: Topology
    num_microbatches: int
    #: ``actions[rank]`` is what the rank runs, in order.
    actions: tuple[tuple[Action, ...], ...]
    #: True if sends and receives are part of the program.
    has_communication: bool = False

    # `name` comes last because it alone has no part in equality.
    name: str = "custom"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schedule):
            return NotImplemented
        return self is other or self._identity == other._identity

    def __hash__(self) -> int:
        return self._hash

    @property
    def _identity(self) -> tuple[object, ...]:
        return (
            self.placement,
            self.topology,
            self.num_microbatches,
            self.has_communication,
            self.actions,
        )

    @cached_property
    def _hash(self) -> int:
        return hash(self._identity)

    def __getstate__(self) -> dict[str, Any]:
        # Without the cached properties: hashes of strings and kinds differ between processes.
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def num_ranks(self) -> int:
        return self.placement.num_ranks

    @property
    def num_stages(self) -> int:
        return self.topology.num_stages

    @cached_property
    def has_backward(self) -> bool:
        """False for a forward-only program."""
        return any(is_backward(action) for action in self.all_actions())

    @cached_property
    def sharded_stages(self) -> frozenset[int]:
        """The stages whose parameters the program gathers and releases."""
        sharding = {kind for kind, rule in RULES.items() if rule.role.value == "sharding"}
        return frozenset(
            action.stage
            for action in self.all_actions()
            if action.kind in sharding and action.stage is not None
        )

    @cached_property
    def dependencies(self) -> Dependencies:
        """The dependency table, bound to this schedule's shape."""
        return Dependencies(
            self.topology,
            self.placement,
            num_microbatches=self.num_microbatches,
            has_communication=self.has_communication,
            has_backward=self.has_backward,
        )

    def all_actions(self) -> Iterable[Action]:
        """Every action of every rank, rank by rank."""
        return chain.from_iterable(self.actions)

    def fingerprint(self) -> str:
        """A short text that is the same in every process for equal schedules and no others.

        Ranks exchange it to make sure that they run the same program.
        """
        digest = hashlib.sha256()
        shape = (self.placement, self.topology, self.num_microbatches, self.has_communication)
        digest.update(repr(shape).encode())
        for row in self.actions:
            digest.update(";".join(map(str, row)).encode())
            digest.update(b"\n")
        return digest.hexdigest()[:16]

    def with_actions(
        self, actions: Iterable[Iterable[Action]], *, has_communication: bool | None = None
    ) -> Schedule:
        """The same schedule with another program; this is how passes make theirs."""
        rows = tuple(tuple(row) for row in actions)
        if has_communication is None:
            has_communication = self.has_communication
        return replace(self, actions=rows, has_communication=has_communication)

    def renamed(self, name: str) -> Schedule:
        """The same schedule under another name."""
        return replace(self, name=name)

    def __str__(self) -> str:
        from pipeloom.ir.notation import format_grid

        return format_grid(self)

    def __repr__(self) -> str:
        return (
            f"<Schedule {self.name}: {self.num_ranks} ranks, {self.num_stages} stages, "
            f"{self.num_microbatches} microbatches, {sum(map(len, self.actions))} actions"
            f"{', with communication' if self.has_communication else ''}>"
        )

    def _repr_html_(self) -> str:
        from pipeloom.ir.renderers import load_notebook_renderer

        return str(load_notebook_renderer().render_schedule(self))

    def save(self, path: str | Path) -> Path:
        """Write the schedule to a ``.csv`` or ``.json`` file.

        A CSV does not say the topology; for anything but a chain a warning tells how to load it.
        """
        from pipeloom.ir.serialization import save_schedule

        return save_schedule(self, Path(path))


def make_schedule(
    rows: Iterable[Iterable[Action]],
    *,
    name: str = "custom",
    topology: Topology | None = None,
    num_microbatches: int | None = None,
) -> Schedule:
    """Make a schedule of per-rank actions; what is not said is read off the actions.

    >>> from pipeloom.ir.notation import parse_action
    >>> rows = [["0F0", "0B0"], ["1F0", "1B0"]]
    >>> make_schedule([map(parse_action, row) for row in rows]).placement.ranks
    (0, 1)
    """
    actions = tuple(tuple(row) for row in rows)
    #: A stage is where it is computed; messages and the like only count where nothing else does,
    #: so that one misplaced message does not move a whole stage.
    computed: list[dict[int, None]] = []
    mentioned: list[dict[int, None]] = []
    largest_microbatch = -1
    has_communication = False
    for row in actions:
        computed.append({})
        mentioned.append({})
        for action in row:
            if not isinstance(action, Action):
                raise ScheduleError(
                    f"a schedule is made of actions, not of {action!r}; "
                    "parse_action makes one of a text"
                )
            if is_compute(action):
                stages = computed[-1]
            else:
                stages = mentioned[-1]
                has_communication = has_communication or is_communication(action)
            for _, stage, microbatch, _, _ in simple_actions(action):
                if stage is not None:
                    stages[stage] = None
                if microbatch is not None and microbatch > largest_microbatch:
                    largest_microbatch = microbatch
    if topology is None:
        largest_stage = max((max(stages, default=0) for stages in computed + mentioned), default=0)
        topology = Topology.chain(largest_stage + 1)
    num_stages = topology.num_stages
    ranks: list[int | None] = [None] * num_stages
    for stages_of_rank in (computed, mentioned):
        for rank, stages in enumerate(stages_of_rank):
            for stage in stages:
                if 0 <= stage < num_stages and ranks[stage] is None:
                    ranks[stage] = rank
    return Schedule(
        placement=Placement(tuple(ranks), len(actions)),
        topology=topology,
        num_microbatches=largest_microbatch + 1 if num_microbatches is None else num_microbatches,
        actions=actions,
        has_communication=has_communication,
        name=name,
    )
