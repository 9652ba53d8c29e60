"""Does the peak of every rank stay within a limit?

::

    limit 2     0F0 0F1 0F2 0B0 …
                 1   2   3             MEMORY_LIMIT at 0F2: three activations are alive
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

from pipeloom.errors import ScheduleError
from pipeloom.ir.occupancy import walk_occupancy
from pipeloom.verify.program import Program, describe_product
from pipeloom.verify.report import Violation

if TYPE_CHECKING:
    from pipeloom.cost.model import CostModel

#: In the costs' memory unit, or a text such as "40GiB"; one for all ranks, or one for each.
MemoryLimit: TypeAlias = float | str | Sequence[float | str]

_MOST_NAMED = 6


def check_memory(
    program: Program, costs: CostModel, limits: Sequence[float]
) -> Iterator[Violation]:
    """The peak of every rank, with what its stages hold all the time, against its limit."""
    bound = costs.bind(program.whole)
    unit = f" {bound.memory_unit}" if bound.memory_unit else ""
    for rank, (row, limit) in enumerate(zip(program.rows, limits, strict=True)):
        static = math.fsum(bound.static_memory[rank].values())
        occupancy = walk_occupancy(program.table, row, bound.size_of)
        peak = static + occupancy.peak
        if peak <= limit + 1e-9 * abs(limit):
            continue
        alive = [
            f"{describe_product(product)} ({size:g})" for product, size in occupancy.alive_at_peak
        ]
        named = ", ".join(alive[:_MOST_NAMED])
        if len(alive) > _MOST_NAMED:
            named += f" and {len(alive) - _MOST_NAMED} more"
        held = [f"static {static:g}"] if static else []
        held += [f"{occupancy.peak:g} in {len(alive)} pieces: {named}"] if alive else []
        place = (
            (rank,)
            if occupancy.peak_position is None
            else program.place_of(program.starts[rank] + occupancy.peak_position)
        )
        yield Violation(
            "MEMORY_LIMIT",
            f"rank {rank} holds {peak:g}{unit} here, {peak - limit:g}{unit} over the limit of "
            f"{limit:g}{unit} ({'; '.join(held)})",
            "choose a schedule with fewer microbatches in flight, or raise the limit",
            *place,
        )


def limit_per_rank(memory: MemoryLimit, num_ranks: int, unit: str) -> list[float]:
    """The limit of each rank, in the costs' unit; one limit holds for all of them.

    >>> limit_per_rank("1GiB", 2, "MiB")
    [1024.0, 1024.0]
    """
    from pipeloom.cost.units import parse_memory

    limits = [memory] * num_ranks if isinstance(memory, (int, float, str)) else list(memory)
    if len(limits) != num_ranks:
        raise ScheduleError(
            f"memory has {len(limits)} limits, but there are {num_ranks} ranks; "
            "give one limit, or one for each rank"
        )
    return [parse_memory(limit, unit) for limit in limits]
