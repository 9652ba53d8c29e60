"""Which rank holds which stage.

::

    loop(4, 2)      rank 0: 0 4    rank 1: 1 5    rank 2: 2 6    rank 3: 3 7
    vee(4)          rank 0: 0 7    rank 1: 1 6    rank 2: 2 5    rank 3: 3 4
    zigzag(2, 2)    rank 0: 0 3 4 7    rank 1: 1 2 5 6          (a V, again and again)
    mirrored(4)     rank 0: 0 7    rank 1: 1 6    rank 2: 2 5    rank 3: 3 4
                    as vee, where 0..3 and 4..7 are two chains in opposite directions
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from pipeloom.errors import ScheduleError


@dataclass(frozen=True)
class Placement:
    """``ranks[stage]`` is the rank that holds the stage; ``None`` where no rank does (which only
    a schedule read from a broken file can have, and the verifier reports).

    >>> Placement.vee(4).stages_on(1)
    (1, 6)
    """

    ranks: tuple[int | None, ...]
    num_ranks: int

    def __post_init__(self) -> None:
        wrong = [
            f"stage {stage} on rank {rank}"
            for stage, rank in enumerate(self.ranks)
            if rank is not None and not 0 <= rank < self.num_ranks
        ]
        if wrong:
            raise ScheduleError(
                f"not a placement: {', '.join(wrong)}, but the ranks are 0..{self.num_ranks - 1}"
            )

    @classmethod
    def loop(cls, num_ranks: int, chunks: int = 1) -> Placement:
        """Stage s on rank s mod num_ranks."""
        return cls(tuple(range(num_ranks)) * chunks, num_ranks)

    @classmethod
    def zigzag(cls, num_ranks: int, chunks: int) -> Placement:
        """Down the ranks, up again, and so on: neighbours at a turn share a rank."""
        down = tuple(range(num_ranks))
        ranks: tuple[int, ...] = ()
        for chunk in range(chunks):
            ranks += down if chunk % 2 == 0 else down[::-1]
        return cls(ranks, num_ranks)

    @classmethod
    def vee(cls, num_ranks: int) -> Placement:
        """The zigzag of two chunks: first and last stage on rank 0."""
        return cls.zigzag(num_ranks, 2)

    #: For two chains in opposite directions the stages lie as in a V.
    mirrored = vee

    @classmethod
    def of_rows(
        cls, rows: Mapping[int, Iterable[int]] | Iterable[Iterable[int]], num_stages: int
    ) -> Placement:
        """From the stages that each rank holds. A stage named twice stays where it was first.

        >>> Placement.of_rows([(0, 3), (1, 2)], 4).ranks
        (0, 1, 1, 0)
        """
        items = list(rows.items() if isinstance(rows, Mapping) else enumerate(rows))
        ranks: list[int | None] = [None] * num_stages
        for rank, stages in items:
            for stage in stages:
                if ranks[stage] is None:
                    ranks[stage] = rank
        return cls(tuple(ranks), max((rank for rank, _ in items), default=-1) + 1)

    @property
    def num_stages(self) -> int:
        return len(self.ranks)

    def rank_of(self, stage: int) -> int:
        """The rank that holds a stage."""
        rank = self.ranks[stage]
        if rank is None:
            raise ScheduleError(f"stage {stage} is on no rank; verify the schedule to see why")
        return rank

    @cached_property
    def _stages_by_rank(self) -> tuple[tuple[int, ...], ...]:
        rows: list[list[int]] = [[] for _ in range(self.num_ranks)]
        for stage, rank in enumerate(self.ranks):
            if rank is not None:
                rows[rank].append(stage)
        return tuple(map(tuple, rows))

    def stages_on(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank holds, in ascending order."""
        return self._stages_by_rank[rank]
