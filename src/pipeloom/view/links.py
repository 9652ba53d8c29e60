"""Who waits for whom, span by span: the dependency table applied to a timeline.

::

    0F0 ──► 0SEND_F0 ──► 1RECV_F0 ──► 1F0          span 3 waits for span 2, …

The edges are integers in two flat arrays, because a large timeline has more than a million.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import NamedTuple

from pipeloom.ir.action import Action
from pipeloom.ir.dependencies import RULES, Role
from pipeloom.ir.product_numbers import ProductNumbers
from pipeloom.ir.products import RETAINED, Product
from pipeloom.ir.questions import simple_actions
from pipeloom.ir.timeline import Timeline

_NOBODY = -1


class Links(NamedTuple):
    """``sources[offsets[i]:offsets[i + 1]]`` are the spans that span ``i`` waits for."""

    offsets: array[int]
    sources: array[int]

    def of(self, span: int) -> tuple[int, ...]:
        """The positions of the spans that this one waits for."""
        return tuple(self.sources[self.offsets[span] : self.offsets[span + 1]])

    def pairs(self) -> Iterator[tuple[int, int]]:
        """Every (source, waiting span)."""
        for span in range(len(self.offsets) - 1):
            for position in range(self.offsets[span], self.offsets[span + 1]):
                yield self.sources[position], span


def find_links(timeline: Timeline) -> Links:
    """The spans that every span waits for, as the dependency table says."""
    spans = timeline.spans
    numbers = ProductNumbers(timeline.schedule.dependencies)
    patterns = [numbers.pattern_of(span[4]) for span in spans]
    producer = [_NOBODY] * numbers.count
    for index in reversed(range(len(spans))):
        microbatch = spans[index][4][2] or 0
        for base in patterns[index].produces:
            producer[base + microbatch] = index  # the first of several is written last
    gathered = _find_gathers(timeline)
    offsets, sources = array("I", [0]), array("I")
    for index, span in enumerate(spans):
        microbatch = span[4][2] or 0
        found: list[int] = []
        for base in patterns[index].needs:
            source = producer[base + microbatch]
            # Parts of a fused action may need each other.
            if source not in (_NOBODY, index) and source not in found:
                found.append(source)
        if gathered:
            found += _gathers_before(gathered, span.rank, span.start, span.action, index, found)
        sources.extend(found)
        offsets.append(len(sources))
    return Links(offsets, sources)


def find_messages(timeline: Timeline, links: Links) -> Iterator[tuple[int, int]]:
    """(sending span, receiving span) of everything that goes from one rank to another."""
    spans = timeline.spans
    for source, span in links.pairs():
        if spans[source].rank != spans[span].rank:
            yield source, span


_Gathers = dict[tuple[int, int], list[tuple[float, int]]]


def _find_gathers(timeline: Timeline) -> _Gathers:
    """(rank, stage) → where its parameters were gathered, in order of time."""
    found: _Gathers = {}
    for index, span in enumerate(timeline.spans):
        if RULES[span[4][0]].gathers:
            assert span.action.stage is not None
            found.setdefault((span.rank, span.action.stage), []).append((span.start, index))
    return found


def _gathers_before(
    gathers: _Gathers, rank: int, start: float, action: Action, index: int, known: list[int]
) -> list[int]:
    """The last gather of each stage that the computation uses."""
    found: list[int] = []
    for part in simple_actions(action):
        if RULES[part.kind].role is not Role.COMPUTE or part.stage is None:
            continue
        earlier = [at for began, at in gathers.get((rank, part.stage), ()) if began <= start]
        if earlier and earlier[-1] != index and earlier[-1] not in known + found:
            found.append(earlier[-1])
    return found


class Lifetime(NamedTuple):
    """How long something takes memory on a rank."""

    rank: int
    product: Product
    start: float
    end: float


def find_lifetimes(timeline: Timeline) -> Iterator[Lifetime]:
    """What is alive when, as the dependency table says: from where it is allocated to where it is
    freed; what nobody frees stays to the end."""
    table = timeline.schedule.dependencies
    end_of_all = max((span.end for span in timeline.spans), default=0.0)
    for rank in range(timeline.num_ranks):
        born: dict[Product, float] = {}
        for span in timeline.spans_of(rank):
            allocated, freed = table.allocates(span.action), table.frees(span.action)
            for product in freed:
                start = born.pop(product, None)
                if start is not None:
                    yield Lifetime(rank, product, start, span.end)
            for product in allocated:
                if product in freed:
                    yield Lifetime(rank, product, span.start, span.end)
                else:
                    # What takes the place of something freed does not count twice while it runs.
                    born[product] = span.end if product[0] == RETAINED else span.start
        for product, start in born.items():
            yield Lifetime(rank, product, start, end_of_all)
