"""Is everything there, and nothing twice? Asked in products, so that B and I W count the same.

::

    0F0 0F0 0B0 0B1      output of 0 for 0 twice: DUPLICATE_FORWARD
                         output of 0 for 1 never: MISSING_FORWARD
    1F0 1I0 1F1 1B1      weight gradient of 1 for 0 never, though 1I0 ran: INPUT_WITHOUT_WEIGHT
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeloom.ir.dependencies import (
    INPUT_GRADIENT,
    OUTPUT,
    PENDING_WEIGHTS,
    RECEIVED_GRADIENT,
    RECEIVED_OUTPUT,
    REDUCED_GRADIENT,
    SENT_GRADIENT,
    SENT_OUTPUT,
    WEIGHT_GRADIENT,
    Product,
)
from pipeloom.verify.program import NOWHERE, Program, describe_product
from pipeloom.verify.report import Violation

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
        first = program.makers[product]
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
    makers, table = program.makers, program.table
    ranks = table.placement.ranks
    unheard = program.sound.absent_ranks | {None}
    for product in table.required_products():
        if product in makers:
            continue
        what, stage, microbatch, _ = product
        rank = ranks[stage]
        if rank in unheard:
            continue  # its rank, or the lack of one, is a violation of its own
        if what == OUTPUT:
            yield Violation(
                "MISSING_FORWARD",
                f"stage {stage} never runs the forward of microbatch {microbatch}",
                f"add {stage}F{microbatch} to rank {rank}",
                rank,
            )
        elif what == INPUT_GRADIENT:
            if (WEIGHT_GRADIENT, stage, microbatch, None) in makers:
                continue  # a W without its I: found where W looks for it
            yield Violation(
                "MISSING_BACKWARD",
                f"stage {stage} never runs the backward of microbatch {microbatch}",
                f"add {stage}B{microbatch}, or {stage}I{microbatch} and {stage}W{microbatch}, "
                f"to rank {rank}",
                rank,
            )
        else:
            yield from _find_input_without_weight(program, product)


def _find_input_without_weight(program: Program, product: Product) -> Iterator[Violation]:
    _, stage, microbatch, _ = product
    maker = program.makers.get((PENDING_WEIGHTS, stage, microbatch, None), NOWHERE)
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
