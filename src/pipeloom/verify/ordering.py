"""Does everything that an action needs from its own rank come earlier?

::

    rank 0   0B0 0F0           0B0 needs what 0F0 makes: BACKWARD_BEFORE_FORWARD
    rank 1   1F0 1RECV_F0      1F0 needs what 1RECV_F0 brings: COMPUTE_BEFORE_RECEIVE
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeloom.ir.action import Action
from pipeloom.ir.dependencies import Role
from pipeloom.ir.products import (
    INPUT_GRADIENT,
    OUTPUT,
    PENDING_WEIGHTS,
    RECEIVED_GRADIENT,
    RECEIVED_OUTPUT,
    WEIGHT_GRADIENT,
    Product,
)
from pipeloom.ir.questions import (
    is_backward,
    role_of,
    simple_actions,
)
from pipeloom.verify.program import Program, describe_product
from pipeloom.verify.report import Violation

_RECEIVED = (RECEIVED_OUTPUT, RECEIVED_GRADIENT)


def check_order(program: Program) -> Iterator[Violation]:
    """What is made on the same rank, but not earlier; and what is made nowhere."""
    for location, product, maker in program.late:
        place, later = program.place_of(location), program.place_of(maker)
        if location == maker:
            yield Violation(
                "OVERLAP_WITH_ITSELF",
                f"one part of it needs the {describe_product(product)}, which another part makes",
                "fuse only actions that do not depend on each other",
                *place,
            )
            continue
        yield Violation(
            _code_of(place.action, product),
            f"it needs the {describe_product(product)}, "
            f"which {later.action} makes only later, at position {later.position}",
            f"move {later.action} before {place.action}",
            *place,
            related=(later,),
        )
    yield from _find_never_made(program)


def _code_of(action: Action, product: Product) -> str:
    what, stage, _, _ = product
    role = role_of(action)
    if role is Role.SEND:
        return "SEND_BEFORE_COMPUTE"
    if role is Role.REDUCE:
        return "REDUCE_BEFORE_BACKWARD"
    if what in _RECEIVED:
        return "COMPUTE_BEFORE_RECEIVE"
    if what == PENDING_WEIGHTS:
        return "WEIGHT_BEFORE_INPUT"
    if what == INPUT_GRADIENT:
        return "BACKWARD_BEFORE_BACKWARD"
    same_stage = any(part.stage == stage and is_backward(part) for part in simple_actions(action))
    return "BACKWARD_BEFORE_FORWARD" if same_stage else "FORWARD_BEFORE_FORWARD"


def _find_never_made(program: Program) -> Iterator[Violation]:
    """What is needed and made nowhere, unless its absence is reported for itself."""
    table = program.table
    for location, product in program.missing:
        what, _, microbatch, other = product
        place = program.place_of(location)
        if what in _RECEIVED:
            yield Violation(
                "MISSING_RECEIVE",
                f"it needs what stage {other} on {_rank_of(program, other)} makes for "
                f"microbatch {microbatch}, and rank {place.rank} never receives that",
                "add the receive before it, or let lower() insert the messages",
                *place,
            )
        elif what in (OUTPUT, INPUT_GRADIENT, WEIGHT_GRADIENT):
            if table.has_backward or what == OUTPUT:
                continue  # a required product: completeness reports it
            yield Violation(
                "NEVER_MADE",
                f"it needs the {describe_product(product)}, and the program has no backward",
                "remove it, or add the backward to every stage",
                *place,
            )


def _rank_of(program: Program, stage: int | None) -> str:
    assert stage is not None
    rank = program.table.placement.ranks[stage]
    return "no rank" if rank is None else f"rank {rank}"
