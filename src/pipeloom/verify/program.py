"""A program taken apart once, for all checks: who makes what, who needs what, who meets whom.

::

    rank 0   0F0 0SEND_F0 …       location 0, 1, …        every action has a number
    rank 1   1RECV_F0 1F0 …       location 7, 8, …

    makers      (output, 0, 0)    → 0
    matches     1 ↔ 7             the send and the receive of one message
    waits       8 → (7,)          1F0 waits for 1RECV_F0
"""

from __future__ import annotations

from bisect import bisect_right
from functools import cached_property
from typing import NamedTuple

from pipeloom.ir.action import Action, Kind
from pipeloom.ir.dependencies import (
    RULES,
    Dependencies,
    Role,
)
from pipeloom.ir.product_numbers import Pattern, ProductNumbers
from pipeloom.ir.products import (
    INPUT_GRADIENT,
    OUTPUT,
    SENT_GRADIENT,
    SENT_OUTPUT,
    Product,
)
from pipeloom.ir.schedule import Schedule
from pipeloom.verify.report import Place
from pipeloom.verify.soundness import SoundRows, find_sound_actions

#: Stands for a location where there is none.
NOWHERE = -1


def describe_product(product: Product) -> str:
    """Say a product in words.

    >>> describe_product(("sent output", 0, 3, 1))
    'sent output of stage 0 for microbatch 3 to stage 1'
    """
    what, stage, microbatch, other = product
    text = f"{what} of stage {stage}"
    if microbatch is not None:
        text += f" for microbatch {microbatch}"
    return text if other is None else f"{text} to stage {other}"


class Channel(NamedTuple):
    """The messages of one directed pair of ranks."""

    sends: list[int]
    receives: list[int]


class Program:
    """The sound actions of a schedule, numbered, with the relations between them."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.sound: SoundRows = find_sound_actions(schedule)
        self.rows = self.sound.rows
        #: The same schedule without what is unsound: its dependency table answers for every action.
        self.whole = Schedule(
            self.sound.placement,
            schedule.topology,
            self.sound.num_microbatches,
            self.rows,
            self.sound.has_communication,
            schedule.name,
        )
        self.table: Dependencies = self.whole.dependencies
        self.has_communication = self.sound.has_communication
        #: Where the locations of each rank begin, and, last, the number of all actions.
        self.starts = [0]
        for row in self.rows:
            self.starts.append(self.starts[-1] + len(row))
        self.numbers = ProductNumbers(self.table)
        patterns = [[self.numbers.pattern_of(action) for action in row] for row in self.rows]
        #: For every numbered product the location that makes it (the first, if several do).
        self.makers = [NOWHERE] * self.numbers.count
        #: What is made again: (location, product).
        self.made_again: list[tuple[int, Product]] = []
        self.is_receive = bytearray(self.starts[-1])
        self._find_makers(patterns)
        #: Location → locations that must be done before it may run, where the order of its own
        #: rank does not say so already; NOWHERE for what is never done.
        self.waits: dict[int, tuple[int, ...]] = {}
        #: (location, product, location that makes it, on the same rank but not earlier).
        self.late: list[tuple[int, Product, int]] = []
        #: (location, product) of what nobody makes, messages not counted.
        self.missing: list[tuple[int, Product]] = []
        #: For every send its receive and the other way round. The k-th send of one message meets
        #: the k-th receive of it; in a right program there is one of each.
        self.matches: list[int] = [NOWHERE] * self.starts[-1]
        self.sends: list[int] = []
        self.receives: list[int] = []
        self.reductions: list[int] = []
        self._find_needs(patterns)

    # ── who makes what ───────────────────────────────────────────────────────────────────────

    def _find_makers(self, patterns: list[list[Pattern]]) -> None:
        makers = self.makers
        location = 0
        for row, patterns_of_row in zip(self.rows, patterns, strict=True):
            for action, (role, _, produces) in zip(row, patterns_of_row, strict=True):
                shift = action[2] or 0
                if role is Role.RECEIVE:
                    self.is_receive[location] = 1
                for base in produces:
                    if makers[base + shift] == NOWHERE:
                        makers[base + shift] = location
                    else:
                        product = self.numbers.product_of(base + shift)
                        self.made_again.append((location, product))
                location += 1

    def maker_of(self, product: Product) -> int:
        """The location that makes a product, NOWHERE if none does."""
        number = self.numbers.number_of(product)
        return self.makers[number] if number < len(self.makers) else NOWHERE

    # ── who needs what ───────────────────────────────────────────────────────────────────────

    def _find_needs(self, patterns: list[list[Pattern]]) -> None:
        makers, is_receive, waits = self.makers, self.is_receive, self.waits
        spare_sends = self._find_spare_sends()
        for rank, row in enumerate(self.rows):
            start = self.starts[rank]
            location = start - 1
            for action, (role, needs, _) in zip(row, patterns[rank], strict=True):
                location += 1
                shift = action[2] or 0
                if role is Role.RECEIVE:
                    self.receives.append(location)
                    self._match(needs[0] + shift, location, spare_sends)
                    continue
                if role is Role.SEND:
                    self.sends.append(location)
                elif role is Role.REDUCE:
                    self.reductions.append(location)
                for base in needs:
                    maker = makers[base + shift]
                    if not start <= maker < location:
                        self._note_foreign(location, rank, base + shift, maker)
                    elif is_receive[maker]:  # posted earlier, but has it come?
                        waits[location] = (*waits.get(location, ()), maker)

    def _note_foreign(self, location: int, rank: int, number: int, maker: int) -> None:
        """Note that an action needs what its own rank has not made before."""
        if maker == NOWHERE:
            self.missing.append((location, self.numbers.product_of(number)))
        elif location <= maker < self.starts[rank + 1]:
            self.late.append((location, self.numbers.product_of(number), maker))
        elif self.has_communication:
            maker = NOWHERE  # it would have to travel
        self.waits[location] = (*self.waits.get(location, ()), maker)

    def _find_spare_sends(self) -> dict[Product, list[int]]:
        spare: dict[Product, list[int]] = {}
        for location, product in reversed(self.made_again):
            if self.role_at(location) is Role.SEND:
                spare.setdefault(product, []).append(location)
        return spare

    def _match(self, message: int, receive: int, spare_sends: dict[Product, list[int]]) -> None:
        send = self.makers[message]
        if send != NOWHERE and self.matches[send] != NOWHERE:
            spare = spare_sends.get(self.numbers.product_of(message))
            send = spare.pop() if spare else NOWHERE
        if send != NOWHERE:
            self.matches[send] = receive
            self.matches[receive] = send

    # ── where and what ───────────────────────────────────────────────────────────────────────

    def rank_at(self, location: int) -> int:
        """The rank that runs the action at a location."""
        return bisect_right(self.starts, location) - 1

    def action_at(self, location: int) -> Action:
        """The action at a location."""
        rank = self.rank_at(location)
        return self.rows[rank][location - self.starts[rank]]

    def role_at(self, location: int) -> Role:
        """The role of the action at a location."""
        return RULES[self.action_at(location)[0]].role

    def place_of(self, location: int) -> Place:
        """Where the action at a location stands in the schedule as it was given."""
        rank = self.rank_at(location)
        index = location - self.starts[rank]
        positions = self.sound.positions[rank]
        position = index if positions is None else positions[index]
        return Place(rank, position, self.rows[rank][index])

    def message_at(self, location: int) -> Product:
        """The message that the send or receive at a location carries."""
        return self.table.message_of(self.action_at(location))

    def counterpart_of(self, message_action: Action) -> Action:
        """The receive of a send, and the send of a receive."""
        table = self.table
        what, sender, microbatch, receiver = table.message_of(message_action)
        assert receiver is not None
        carried = {SENT_OUTPUT: OUTPUT, SENT_GRADIENT: INPUT_GRADIENT}[what]
        send, receive = table.make_message((carried, sender, microbatch, None), receiver)
        return receive if RULES[message_action.kind].role is Role.SEND else send

    def home_of(self, action: Action) -> int | None:
        """The rank that holds an action's stage."""
        assert action.stage is not None
        return self.table.placement.ranks[action.stage]

    @cached_property
    def channels(self) -> dict[tuple[int, int], Channel]:
        """(sending rank, receiving rank) → its sends and receives, in order. Those that stand on
        another rank than their stage are reported for that and take no further part."""
        ranks = self.table.placement.ranks
        channels: dict[tuple[int, int], Channel] = {}
        for is_receive, locations in ((0, self.sends), (1, self.receives)):
            lists: dict[tuple[Kind, int | None, int | None, int], list[int] | None] = {}
            rank = 0
            for location in locations:
                while location >= self.starts[rank + 1]:
                    rank += 1
                action = self.rows[rank][location - self.starts[rank]]
                key = (action[0], action[1], action[4], rank)
                if key not in lists:
                    _, sender, _, receiver = self.table.message_of(action)
                    assert receiver is not None
                    from_rank, to_rank = ranks[sender], ranks[receiver]
                    lists[key] = None
                    if (
                        from_rank is not None
                        and to_rank is not None
                        and rank == (to_rank if is_receive else from_rank)
                    ):
                        channel = channels.setdefault((from_rank, to_rank), Channel([], []))
                        lists[key] = channel[is_receive]
                members = lists[key]
                if members is not None:
                    members.append(location)
        return channels

    @cached_property
    def collectives(self) -> dict[int, tuple[int, ...]]:
        """Location → the locations on other ranks that run together with it, one collective."""
        found: dict[int, tuple[int, ...]] = {}
        for location in self.reductions:
            rank = self.rank_at(location)
            partners = tuple(
                partner
                for partner in self.partners_at(location)
                if partner == NOWHERE or self.rank_at(partner) != rank
            )
            if partners:
                found[location] = partners
        return found

    def partners_at(self, location: int) -> list[int]:
        """The locations of an action's partners, NOWHERE for one that is missing."""
        table = self.table
        return [
            self.maker_of(product)
            for partner in table.partners_of(self.action_at(location))
            for product in table.produces(partner)
        ]
