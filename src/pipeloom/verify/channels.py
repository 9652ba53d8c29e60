"""Do sends and receives agree? The k-th send of a directed pair of ranks meets the k-th receive.

::

    rank 0 → rank 1    sends      0SEND_F0 0SEND_F1
                       receives   1RECV_F1 1RECV_F0      CHANNEL_ORDER: microbatches are swapped
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeloom.verify.program import NOWHERE, Program
from pipeloom.verify.report import Violation


def check_channels(program: Program) -> Iterator[Violation]:
    """Every send has its receive, and both come in the same order."""
    yield from _find_unmatched(program)
    yield from _find_different_orders(program)


def _find_unmatched(program: Program) -> Iterator[Violation]:
    repeated = {location for location, _ in program.made_again}
    # A message doubled on one side leaves one over: that is reported as the duplicate it is.
    for location in program.sends:
        if program.matches[location] == NOWHERE and location not in repeated:
            place = program.place_of(location)
            receive = program.counterpart_of(place.action)
            rank = program.home_of(receive)
            yield Violation(
                "SEND_WITHOUT_RECEIVE",
                f"nobody receives it: there is no {receive}",
                f"add {receive} to rank {rank}, or remove the send",
                *place,
            )
    for location in program.receives:
        if program.matches[location] == NOWHERE and location not in repeated:
            place = program.place_of(location)
            send = program.counterpart_of(place.action)
            rank = program.home_of(send)
            yield Violation(
                "RECEIVE_WITHOUT_SEND",
                f"nobody sends it: there is no {send}",
                f"add {send} to rank {rank}, or remove the receive",
                *place,
            )


def _find_different_orders(program: Program) -> Iterator[Violation]:
    matches = program.matches
    for pair, channel in program.channels.items():
        sent = [location for location in channel.sends if matches[location] != NOWHERE]
        received = [location for location in channel.receives if matches[location] != NOWHERE]
        for index, (send, receive) in enumerate(zip(sent, received, strict=False)):
            if matches[send] == receive:
                continue
            first, met = program.place_of(send), program.place_of(receive)
            expected = program.place_of(matches[send])
            yield Violation(
                "CHANNEL_ORDER",
                f"it is message {index} from rank {pair[0]} to rank {pair[1]}, "
                f"which receives {met.action} as message {index}: it would get other data",
                f"move {expected.action} (rank {expected.rank}, position {expected.position}) "
                f"before {met.action}, or exchange the sends",
                *first,
                related=(met, expected),
            )
            break
