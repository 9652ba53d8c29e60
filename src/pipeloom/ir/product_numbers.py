"""The dependency table in numbers, for tools that walk programs of a million actions.

Every product has a number, so that a list can say who makes it. The rules of the table are the same
for every microbatch; so one look at the table for a kind, stage and peer answers for all of them::

    pattern of 2F·       needs (base of output 1)       produces (base of output 2)
    2F7                  needs base + 7                 produces base + 7

What the numbers mean is the table's business: :meth:`ProductNumbers.product_of` turns one back.
"""

from __future__ import annotations

from typing import NamedTuple

from pipeloom.ir.action import Action, Kind
from pipeloom.ir.dependencies import (
    RULES,
    Dependencies,
    Role,
)
from pipeloom.ir.products import Product


class Pattern(NamedTuple):
    """What actions of one kind, stage and peer need and produce: add the microbatch, if the action
    has one, to get the numbers of the products."""

    role: Role
    needs: tuple[int, ...]
    produces: tuple[int, ...]


class ProductNumbers:
    """Numbers for the products of one schedule, handed out as they occur.

    >>> from pipeloom.ir.placement import Placement
    >>> from pipeloom.ir.topology import Topology
    >>> table = Dependencies(Topology.chain(2), Placement.loop(2), num_microbatches=4)
    >>> numbers = ProductNumbers(table)
    >>> pattern = numbers.pattern_of(Action(Kind.F, 1, 0))
    >>> [numbers.product_of(base + 3) for base in pattern.needs]
    [('output', 0, 3, None)]
    """

    def __init__(self, table: Dependencies) -> None:
        self.table = table
        self._bases: dict[tuple[str, int, int | None], int] = {}
        self._keys: list[tuple[str, int, int | None]] = []
        #: Each base is followed by a number for each microbatch and one for none.
        self._width = table.num_microbatches + 1
        self._patterns: dict[tuple[Kind, int | None, int | None], Pattern] = {}

    @property
    def count(self) -> int:
        """All numbers handed out so far are smaller."""
        return len(self._keys) * self._width

    def number_of(self, product: Product) -> int:
        """The number of a product."""
        what, stage, microbatch, other = product
        key = (what, stage, other)
        base = self._bases.get(key)
        if base is None:
            base = self._bases[key] = self.count
            self._keys.append(key)
        return base + (self._width - 1 if microbatch is None else microbatch)

    def product_of(self, number: int) -> Product:
        """The product that has a number."""
        index, offset = divmod(number, self._width)
        what, stage, other = self._keys[index]
        return (what, stage, None if offset == self._width - 1 else offset, other)

    def pattern_of(self, action: Action) -> Pattern:
        """The pattern of an action. That of a fused action is its own: it has no microbatch, and
        its pattern is the numbers themselves."""
        kind, stage, _, parts, peer = action
        if parts:
            return self._read_table(action)
        key = (kind, stage, peer)
        pattern = self._patterns.get(key)
        if pattern is None:
            pattern = self._patterns[key] = self._read_table(action)
        return pattern

    def _read_table(self, action: Action) -> Pattern:
        rule = RULES[action.kind]
        microbatch = action.microbatch
        needs, produces = rule.needs(self.table, action), rule.produces(self.table, action)
        if microbatch is None:
            shift = 0
        else:
            shift = microbatch
            assert all(product[2] == microbatch for product in needs + produces), (
                f"a rule of {action} is not the same for every microbatch"
            )
        return Pattern(
            rule.role,
            tuple([self.number_of(product) - shift for product in needs]),
            tuple([self.number_of(product) - shift for product in produces]),
        )
