"""What is alive at each point of an order.

One walk, shared by the verifier (does it fit?) and the simulator (when and who?). It follows the
dependency table: what an action allocates lives from its start, what it frees is gone after its
end. What a computation leaves behind *in place of* something it frees (the share of the
activation that stays from I until W) does not count twice while it runs.

::

    0F0   0F1   0I0   0F2   0W0 …
     1     2     2    2+½    …      one activation each; ½ of the first is retained after 0I0
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from pipeloom.ir.action import Action
from pipeloom.ir.dependencies import Dependencies
from pipeloom.ir.products import RETAINED, Product

#: How many bytes (or units) a product takes while it lives.
SizeOf = Callable[[Product], float]


class Occupancy(NamedTuple):
    """The walk over one rank's order."""

    #: The largest sum of sizes alive during any action.
    peak: float
    #: The position of the (first) action during which the peak is reached; ``None`` if no action.
    peak_position: int | None
    #: What is alive then, largest first.
    alive_at_peak: tuple[tuple[Product, float], ...]
    #: For every action: the sum while it runs.
    during: tuple[float, ...]
    #: For every action: the sum once it has ended.
    after: tuple[float, ...]


class Change(NamedTuple):
    """What one action changes: (product, size) of each."""

    #: Alive from the action's start.
    begun: tuple[tuple[Product, float], ...]
    #: Gone after its end.
    ended: tuple[tuple[Product, float], ...]
    #: Alive from its end, in place of something that is gone.
    left_behind: tuple[tuple[Product, float], ...]


_NO_CHANGE = Change((), (), ())


def walk_changes(
    table: Dependencies, actions: Iterable[Action], size_of: SizeOf
) -> Iterator[Change]:
    """Walk one rank's order and say what each action changes."""
    alive: dict[Product, float] = {}
    for action in actions:
        allocated = table.allocates(action)
        freed = table.frees(action)
        if not allocated and not freed:
            yield _NO_CHANGE
            continue
        begun: list[tuple[Product, float]] = []
        left_behind: list[tuple[Product, float]] = []
        for product in allocated:
            item = (product, size_of(product))
            (left_behind if product[0] == RETAINED else begun).append(item)
        alive.update(begun)
        ended = [(product, alive.pop(product)) for product in freed if product in alive]
        alive.update(left_behind)
        yield Change(tuple(begun), tuple(ended), tuple(left_behind))


def walk_occupancy(table: Dependencies, actions: Iterable[Action], size_of: SizeOf) -> Occupancy:
    """Walk one rank's order and add up what is alive."""
    alive: dict[Product, float] = {}
    total = 0.0
    peak, peak_position = 0.0, None
    alive_at_peak: dict[Product, float] | None = None
    during: list[float] = []
    after: list[float] = []
    for position, change in enumerate(walk_changes(table, actions, size_of)):
        for product, size in change.begun:
            alive[product] = size
            total += size
        during.append(total)
        if peak_position is None or total > peak + 1e-12 * abs(peak):
            peak, peak_position, alive_at_peak = total, position, None
        if change.ended and alive_at_peak is None:
            # Only now can what is alive shrink; copying at every new peak would be quadratic.
            alive_at_peak = dict(alive)
        for product, size in change.ended:
            total -= size
            del alive[product]
        for product, size in change.left_behind:
            alive[product] = size
            total += size
        after.append(total)
    ranked = sorted((alive_at_peak or alive).items(), key=lambda item: -item[1])
    return Occupancy(
        peak,
        peak_position,
        tuple((product, size) for product, size in ranked if size),
        tuple(during),
        tuple(after),
    )
