"""What all actions of one kind on one stage have in common, worked out once.

::

    2F0  2F1  2F2 …     needs    [output of 1] + microbatch         a place in a flat list
                        produces [output of 2] + microbatch
                        holds    activation: 0.5 from its start

The dependency table is asked for one action; the others differ in the microbatch only, so what
they need is found by adding it. A large program has hundreds of thousands of actions and a few
thousand of these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pipeloom.cost.model import ScheduleCosts
from pipeloom.ir.action import Action, Kind
from pipeloom.ir.dependencies import (
    RULES,
    Dependencies,
    Role,
)
from pipeloom.ir.products import RETAINED, Product


class UnwrittenMessage(NamedTuple):
    """A message of a schedule without communication."""

    received: int
    edge: tuple[int, int]
    occupied: float
    latency: float
    #: Stage at the other end.
    consumer: int


@dataclass(slots=True, eq=False)
class Footprint:
    """Places are numbers to which the microbatch is added."""

    role: Role
    lane: str
    duration: float
    needs: tuple[int, ...]
    produces: tuple[int, ...]
    #: (place, category, size): alive from the start, gone after the end, alive from the end.
    begun: tuple[tuple[int, str, float], ...]
    ended: tuple[tuple[int, str, float], ...]
    left_behind: tuple[tuple[int, str, float], ...]
    #: Of sends and receives.
    edge: tuple[int, int] = (0, 0)
    latency: float = 0.0
    #: Of computations, where nobody writes the sends.
    messages: tuple[UnwrittenMessage, ...] = ()
    #: Whether anything changes at the end.
    lets_go: bool = False
    gathers: bool = False


class Footprints:
    """Finds the footprint of any action of a schedule."""

    def __init__(self, costs: ScheduleCosts) -> None:
        schedule = costs.schedule
        self.costs = costs
        self.num_microbatches = max(1, schedule.num_microbatches)
        self.is_written = schedule.has_communication
        #: What takes memory, as the schedule is written.
        self.written_table = schedule.dependencies
        # In this table a computation needs what was received, also where nobody writes the
        # receive: those messages are drawn behind their producer.
        self.table = Dependencies(
            schedule.topology,
            schedule.placement,
            num_microbatches=schedule.num_microbatches,
            has_communication=True,
            has_backward=schedule.has_backward,
        )
        self.known: dict[tuple[Kind, int | None, int | None], Footprint] = {}
        self._places: dict[tuple[str, int, int | None], int] = {}

    @property
    def num_places(self) -> int:
        """How many places there are for products."""
        return len(self._places) * self.num_microbatches

    def find(self, action: Action) -> Footprint:
        """The footprint of an action that is not fused."""
        key = (action[0], action[1], action[4])
        found = self.known.get(key)
        if found is None:
            found = self.known[key] = self._make(action)
        return found

    def place_of(self, product: Product) -> int:
        """The place of a product, its microbatch included."""
        return self._place(product) + (product[2] or 0)

    def _place(self, product: Product) -> int:
        key = (product[0], product[1], product[3])
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = len(self._places) * self.num_microbatches
        return place

    def _make(self, action: Action) -> Footprint:
        rule = RULES[action.kind]
        table, costs = self.table, self.costs
        role = rule.role
        produced = rule.produces(table, action)
        made = Footprint(
            role=role,
            lane=rule.lane,
            duration=0.0,
            # What concerns a whole stage needs every microbatch: there is nothing to add to.
            needs=tuple(map(self._place, rule.needs(table, action))) if rule.has_microbatch else (),
            produces=tuple(map(self._place, produced)),
            begun=(),
            ended=(),
            left_behind=(),
            gathers=rule.gathers,
        )
        if role in (Role.SEND, Role.RECEIVE):
            message = table.message_of(action)
            made.edge = table.ranks_of_message(message)
            if role is Role.SEND:
                made.duration, made.latency = costs.transfer_of(message)
        else:
            made.duration = costs.duration_of(action)
            if not self.is_written:
                made.messages = tuple(
                    message for product in produced for message in self._find_messages(product)
                )
        self._add_memory(made, action)
        return made

    def _find_messages(self, product: Product) -> list[UnwrittenMessage]:
        table = self.table
        messages = []
        for consumer in table.remote_consumers(product):
            send, receive = table.make_message(product, consumer)
            sent = table.message_of(send)
            messages.append(
                UnwrittenMessage(
                    self._place(table.produces(receive)[0]),
                    table.ranks_of_message(sent),
                    *self.costs.transfer_of(sent),
                    consumer,
                )
            )
        return messages

    def _add_memory(self, made: Footprint, action: Action) -> None:
        table, size_of = self.written_table, self.costs.size_of

        def sized(products: tuple[Product, ...]) -> tuple[tuple[int, str, float], ...]:
            pairs = [(product, size_of(product)) for product in products]
            return tuple((self._place(p), p[0], size) for p, size in pairs if size)

        allocated = table.allocates(action)
        made.begun = sized(tuple(p for p in allocated if p[0] != RETAINED))
        made.left_behind = sized(tuple(p for p in allocated if p[0] == RETAINED))
        made.ended = sized(table.frees(action))
        made.lets_go = bool(made.left_behind or made.ended)
