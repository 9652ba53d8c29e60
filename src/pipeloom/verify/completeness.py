"""Is everything there, and nothing twice? Asked in products, so that B and I W count the same.

::

    0F0 0F0 0B0 0B1      output of 0 for 0 twice: DUPLICATE_FORWARD
                         output of 0 for 1 never: MISSING_FORWARD
    1F0 1I0 1F1 1B1      weight gradient of 1 for 0 never, though 1I0 ran: INPUT_WITHOUT_WEIGHT
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeloom.ir.products import (
    INPUT_GRADIENT,
    OUTPUT,
    PENDING_WEIGHTS,
    RECEIVED_GRADIENT,
    RECEIVED_OUTPUT,
    REDUCED_GRADIENT,
    SENT_GRADIENT,
    SENT_OUTPUT,
    WEIGHT_GRADIENT,
)
from pipeloom.verify.program import NOWHERE, Program, describe_product
from pipeloom.verify.report import Violation, runs_of

_CODES_OF_DUPLICATES = {
    OUTPUT: "DUPLICATE_FORWARD",
    INPUT_GRADIENT: "DUPLICATE_BACKWARD",
    WEIGHT_GRADIENT: "DUPLICATE_WEIGHT",
    SENT_OUTPUT: "DUPLICATE_SEND",
    SENT_GRADIENT: "DUPLICATE_SEND",
    RECEIVED_OUTPUT: "DUPLICATE_RECEIVE",
    RECEIVED_GRADIENT: "DUPLICATE_RECEIVE",
    REDUCED_GRADIENT: "DUPLICATE_REDUCE",
}


def check_completeness(program: Program) -> Iterator[Violation]:
    """Every required product exactly once."""
    yield from _find_duplicates(program)
    yield from _find_missing(program)
    yield from _find_weights_without_input(program)


def _find_duplicates(program: Program) -> Iterator[Violation]:
    reported: set[tuple[int, int]] = set()
    for location, product in program.made_again:
        first = program.maker_of(product)
        # A full backward makes two products; doubled, it is still one mistake. What I leaves for
        # W comes always together with the gradient of its input.
        if (location, first) in reported or product[0] == PENDING_WEIGHTS:
            continue
        reported.add((location, first))
        earlier, again = program.place_of(first), program.place_of(location)
        yield Violation(
            _CODES_OF_DUPLICATES[product[0]],
            f"the {describe_product(product)} is made twice, first by {earlier}",
            "remove one of the two, or correct the microbatch if another one is missing",
            *again,
            related=(earlier,),
        )


def _find_missing(program: Program) -> Iterator[Violation]:
    """What is required and made nowhere; for consecutive microbatches it is said once."""
    table = program.table
    ranks = table.placement.ranks
    unheard = program.sound.absent_ranks | {None}  # the lack of a rank is said for itself
    missing: dict[tuple[str, int], list[int]] = {}
    for product in table.required_products():
        if program.maker_of(product) == NOWHERE:
            what, stage, microbatch, _ = product
            if ranks[stage] not in unheard and microbatch is not None:
                missing.setdefault((what, stage), []).append(microbatch)
    for (what, stage), microbatches in missing.items():
        if what == WEIGHT_GRADIENT:
            for microbatch in microbatches:
                yield from _find_input_without_weight(program, stage, microbatch)
            continue
        if what == INPUT_GRADIENT:
            # A W without its I is found where W looks for it.
            microbatches = [
                microbatch
                for microbatch in microbatches
                if program.maker_of((WEIGHT_GRADIENT, stage, microbatch, None)) == NOWHERE
            ]
        for first, last in runs_of(microbatches):
            yield _missing(what, stage, ranks[stage], first, last)


def _missing(what: str, stage: int, rank: int | None, first: int, last: int) -> Violation:
    which = f"microbatch {first}" if first == last else f"microbatches {first}..{last}"
    several = "" if first == last else " and so on"
    if what == OUTPUT:
        return Violation(
            "MISSING_FORWARD",
            f"stage {stage} never runs the forward of {which}",
            f"add {stage}F{first}{several} to rank {rank}",
            rank,
        )
    return Violation(
        "MISSING_BACKWARD",
        f"stage {stage} never runs the backward of {which}",
        f"add {stage}B{first}, or {stage}I{first} and {stage}W{first},{several} to rank {rank}",
        rank,
    )


def _find_input_without_weight(
    program: Program, stage: int, microbatch: int
) -> Iterator[Violation]:
    maker = program.maker_of((PENDING_WEIGHTS, stage, microbatch, None))
    if maker != NOWHERE:
        yield Violation(
            "INPUT_WITHOUT_WEIGHT",
            f"the gradients of the weights of stage {stage} for microbatch {microbatch} "
            "are left for later and never computed",
            f"add {stage}W{microbatch} after it, or make it {stage}B{microbatch}",
            *program.place_of(maker),
        )


def _find_weights_without_input(program: Program) -> Iterator[Violation]:
    for location, product in program.missing:
        if product[0] == PENDING_WEIGHTS:
            _, stage, microbatch, _ = product
            yield Violation(
                "WEIGHT_WITHOUT_INPUT",
                f"no backward of inputs of stage {stage} for microbatch {microbatch} "
                "leaves anything for it to do",
                f"add {stage}I{microbatch} before it, or make it {stage}B{microbatch}",
                *program.place_of(location),
            )
