"""Are parameters whole when they are used, and gradients reduced once, after the last of them?

::

    0UNSHARD 0F0 0B0 0REDUCE_GRAD 0RESHARD        right
    0F0 0UNSHARD …                                COMPUTE_ON_SHARDED
    0UNSHARD 0UNSHARD …                           DOUBLE_UNSHARD
    0UNSHARD 0F0 0B0 0RESHARD                     MISSING_REDUCE

A stage is sharded if the program has an UNSHARD or RESHARD of it, and starts resharded. Releasing
what is released already changes nothing and is no violation.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from pipeloom.ir.dependencies import RULES, Role
from pipeloom.ir.products import REDUCED_GRADIENT, WEIGHT_GRADIENT
from pipeloom.ir.questions import is_compute, simple_actions
from pipeloom.verify.program import NOWHERE, Program
from pipeloom.verify.report import Violation


def check_sharding(program: Program) -> Iterator[Violation]:
    """Gathered before use, and one reduction a sharded stage."""
    sharded = {
        action.stage
        for row in program.rows
        for action in row
        if RULES[action[0]].role is Role.SHARDING
    }
    if sharded:
        for rank in range(len(program.rows)):
            yield from _walk_rank(program, rank, sharded)
        yield from _find_missing_reductions(program, sharded)
    yield from _find_lonely_copies(program)


def _walk_rank(program: Program, rank: int, sharded: set[int | None]) -> Iterator[Violation]:
    """Follow which stages are whole along one rank's order."""
    gathered_by: dict[int | None, int] = {}
    for location, action in enumerate(program.rows[rank], program.starts[rank]):
        rule = RULES[action[0]]
        if rule.role is Role.SHARDING:
            stage = action.stage
            if not rule.gathers:
                gathered_by.pop(stage, None)
            elif stage in gathered_by:
                earlier = program.place_of(gathered_by[stage])
                yield Violation(
                    "DOUBLE_UNSHARD",
                    f"stage {stage} is gathered already, since position {earlier.position}",
                    f"remove it, or release stage {stage} in between",
                    *program.place_of(location),
                    related=(earlier,),
                )
            else:
                gathered_by[stage] = location
        elif rule.lane == "compute":
            for part in simple_actions(action):
                if part[1] in sharded and part[1] not in gathered_by:
                    yield Violation(
                        "COMPUTE_ON_SHARDED",
                        f"the parameters of stage {part[1]} are not gathered here",
                        f"put {part[1]}UNSHARD before it",
                        *program.place_of(location),
                    )


def _find_missing_reductions(program: Program, sharded: set[int | None]) -> Iterator[Violation]:
    lacking = [
        stage
        for stage in sorted(stage for stage in sharded if stage is not None)
        if _is_trained(program, stage)
        and program.maker_of((REDUCED_GRADIENT, stage, None, None)) == NOWHERE
    ]
    last_of = _find_last_computations(program) if lacking else {}
    for stage in lacking:
        yield Violation(
            "MISSING_REDUCE",
            f"stage {stage} is sharded, and its gradients are never reduced",
            f"add {stage}REDUCE_GRAD after it",
            *program.place_of(last_of[stage]),
        )


def _is_trained(program: Program, stage: int) -> bool:
    microbatches = program.table.topology.microbatches_of(stage, program.table.num_microbatches)
    return any(
        program.maker_of((WEIGHT_GRADIENT, stage, microbatch, None)) != NOWHERE
        for microbatch in microbatches
    )


def _find_last_computations(program: Program) -> dict[int | None, int]:
    """Stage → the location of its last computation."""
    return {
        part[1]: location
        for location, action in enumerate(chain.from_iterable(program.rows))
        if is_compute(action)
        for part in simple_actions(action)
    }


def _find_lonely_copies(program: Program) -> Iterator[Violation]:
    """The copies of a stage reduce their gradients together, or none of them does."""
    for location in program.reductions:
        partners = program.table.partners_of(program.action_at(location))
        for partner, found in zip(partners, program.partners_at(location), strict=True):
            if found == NOWHERE:
                place = program.place_of(location)
                yield Violation(
                    "COPY_WITHOUT_REDUCE",
                    f"stage {partner.stage} holds the same part of the model as stage "
                    f"{place.action.stage} and never runs {partner}: the sum waits for it",
                    f"add {partner} to rank {program.home_of(partner)} after its last backward",
                    *place,
                )
