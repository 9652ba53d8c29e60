"""Which stage feeds which.

::

    chain(4)                  0 → 1 → 2 → 3

    bidirectional(4)          0 → 1 → 2 → 3     chain 0: the first half of the microbatches
                              4 → 5 → 6 → 7     chain 1: the second half
                              replicas: 0=4 1=5 2=6 3=7 (the same part of the model)

    chain(4).with_edges((0, 3))      0 → 1 → 2 → 3
                                     └───────────┘   a skip connection
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from pipeloom.errors import ScheduleError


@dataclass(frozen=True)
class Topology:
    """Chains of stages, extra forward edges, and the stages that hold the same part of the model.

    >>> topology = Topology.chain(3)
    >>> topology.successors(0), topology.predecessors(0), topology.first_stages
    ((1,), (), (0,))
    """

    #: Each chain names its stages in the order in which a microbatch passes them.
    chains: tuple[tuple[int, ...], ...]
    #: Skip connections: (from stage, to stage), both in one chain, forward.
    extra_edges: tuple[tuple[int, int], ...] = ()
    #: Groups of stages that hold the same part of the model.
    replicas: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        problems = list(_find_problems(self))
        if problems:
            raise ScheduleError("not a topology: " + "; ".join(problems))

    @classmethod
    def chain(cls, num_stages: int) -> Topology:
        """One chain: 0 → 1 → … → num_stages − 1."""
        return cls(chains=(tuple(range(num_stages)),))

    @classmethod
    def bidirectional(cls, num_parts: int) -> Topology:
        """Two chains over the same parts of the model; stage num_parts + i repeats stage i."""
        first = tuple(range(num_parts))
        second = tuple(range(num_parts, 2 * num_parts))
        return cls(chains=(first, second), replicas=tuple(zip(first, second, strict=True)))

    def with_edges(self, *edges: tuple[int, int]) -> Topology:
        """The same topology with more skip connections.

        >>> Topology.chain(4).with_edges((0, 3)).successors(0)
        (1, 3)
        """
        return Topology(self.chains, self.extra_edges + edges, self.replicas)

    @cached_property
    def num_stages(self) -> int:
        return sum(map(len, self.chains))

    @cached_property
    def is_chain(self) -> bool:
        """True for the plain chain 0 → 1 → …, which needs no words in a file."""
        return self == Topology.chain(self.num_stages)

    @cached_property
    def first_stages(self) -> tuple[int, ...]:
        """The first stage of each chain: batches enter here."""
        return tuple(chain[0] for chain in self.chains)

    @cached_property
    def last_stages(self) -> tuple[int, ...]:
        """The last stage of each chain: losses arise here."""
        return tuple(chain[-1] for chain in self.chains)

    @cached_property
    def _chain_of_stage(self) -> tuple[int, ...]:
        chain_of = [0] * self.num_stages
        for index, chain in enumerate(self.chains):
            for stage in chain:
                chain_of[stage] = index
        return tuple(chain_of)

    @cached_property
    def _successors(self) -> tuple[tuple[int, ...], ...]:
        following: list[list[int]] = [[] for _ in range(self.num_stages)]
        for chain in self.chains:
            for before, after in pairwise(chain):
                following[before].append(after)
        for before, after in self.extra_edges:
            following[before].append(after)
        return tuple(map(tuple, following))

    @cached_property
    def _predecessors(self) -> tuple[tuple[int, ...], ...]:
        preceding: list[list[int]] = [[] for _ in range(self.num_stages)]
        for stage, following in enumerate(self._successors):
            for after in following:
                preceding[after].append(stage)
        return tuple(map(tuple, preceding))

    def chain_of(self, stage: int) -> int:
        """The chain that a stage belongs to."""
        return self._chain_of_stage[stage]

    def successors(self, stage: int) -> tuple[int, ...]:
        """The stages that take this stage's output, the next of its chain first."""
        return self._successors[stage]

    def predecessors(self, stage: int) -> tuple[int, ...]:
        """The stages whose output this stage takes."""
        return self._predecessors[stage]

    def copies_of(self, stage: int) -> tuple[int, ...]:
        """All stages, this one included, that hold the same part of the model."""
        for group in self.replicas:
            if stage in group:
                return group
        return (stage,)

    def microbatches_of_chain(self, chain: int, num_microbatches: int) -> range:
        """The microbatches that pass through a chain: equal consecutive shares.

        >>> Topology.bidirectional(2).microbatches_of_chain(1, 8)
        range(4, 8)
        """
        num_chains = len(self.chains)
        return range(
            chain * num_microbatches // num_chains, (chain + 1) * num_microbatches // num_chains
        )

    def microbatches_of(self, stage: int, num_microbatches: int) -> range:
        """The microbatches that pass through a stage."""
        return self.microbatches_of_chain(self._chain_of_stage[stage], num_microbatches)

    def chain_of_microbatch(self, microbatch: int, num_microbatches: int) -> int:
        """The chain that a microbatch takes."""
        for chain in range(len(self.chains)):
            if microbatch in self.microbatches_of_chain(chain, num_microbatches):
                return chain
        raise ScheduleError(
            f"microbatch {microbatch} is not one of the {num_microbatches} microbatches"
        )


def _find_problems(topology: Topology) -> Sequence[str]:
    problems = []
    stages = [stage for chain in topology.chains for stage in chain]
    if not stages or not all(topology.chains):
        problems.append("every chain needs at least one stage")
    if sorted(stages) != list(range(len(stages))):
        problems.append(
            f"the chains must name each of the stages 0..{len(stages) - 1} once, not {stages}"
        )
        return problems
    place = {
        stage: (index, position)
        for index, chain in enumerate(topology.chains)
        for position, stage in enumerate(chain)
    }
    seen: set[tuple[int, int]] = set()
    for chain in topology.chains:
        seen.update(pairwise(chain))
    for edge in topology.extra_edges:
        before, after = edge
        if before not in place or after not in place:
            problems.append(f"the edge {before}→{after} names a stage that is in no chain")
        elif place[before][0] != place[after][0] or place[before][1] >= place[after][1]:
            problems.append(f"the edge {before}→{after} does not lead forward within one chain")
        elif edge in seen:
            problems.append(f"the edge {before}→{after} is there twice")
        seen.add(edge)
    grouped = [stage for group in topology.replicas for stage in group]
    if len(set(grouped)) != len(grouped) or not set(grouped) <= set(stages):
        problems.append(f"replicas must name known stages, each at most once, not {grouped}")
    return problems
