"""Pictures as columns of numbers: what the HTML report carries instead of a million objects.

::

    header   {"timelines": [{"title": …, "columns": {"start": ["f64", offset, length], …}}]}
    body     |start start start …|end end end …|row row …|needs …|        one block of bytes

A column is a typed array that the page reads in place; texts are made in the page from numbers.
"""

from __future__ import annotations

import sys
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from pipeloom.ir.action import Action, Kind
from pipeloom.ir.timeline import Timeline
from pipeloom.ir.timeline_comparison import compare_timelines
from pipeloom.view.links import find_lifetimes, find_links
from pipeloom.view.palette import DARK, LIGHT, STYLE_OF_CAUSE, STYLE_OF_KIND, style_of_cause
from pipeloom.view.picture import Picture
from pipeloom.view.quantities import SECONDS_PER_UNIT

VERSION = 1
#: Of the ranked table of what is waited for.
MOST_CAUSES = 50

_TYPECODES = {"f64": "d", "f32": "f", "u8": "B", "u16": "H", "i32": "i", "u32": "I"}
_KINDS = list(STYLE_OF_KIND)
_NUMBER_OF_KIND = {kind: number for number, kind in enumerate(_KINDS)}


#: (rank, action) → its last span.
_Places: TypeAlias = dict[tuple[int | None, Action | None], int]


class Block:
    """Columns, one after the other, each at a multiple of eight bytes."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.size = 0

    def add(self, kind: str, values: Iterable[Any]) -> list[Any]:
        """Put a column down; returns what the page needs to find it."""
        numbers = array(_TYPECODES[kind], values)
        if sys.byteorder == "big":
            numbers.byteswap()
        data = numbers.tobytes()
        place = [kind, self.size, len(numbers)]
        data += bytes(-len(data) % 8)
        self.parts.append(data)
        self.size += len(data)
        return place

    def join(self) -> bytes:
        """All columns."""
        return b"".join(self.parts)


def encode_pictures(pictures: Sequence[Picture]) -> tuple[dict[str, Any], bytes]:
    """The header and the block of bytes."""
    block = Block()
    causes = list(STYLE_OF_CAUSE)
    for picture in pictures:
        causes += [idle.cause for idle in picture.idle if idle.cause not in causes]
    timelines = [_encode_picture(picture, pictures, causes, block) for picture in pictures]
    header = {
        "version": VERSION,
        "kinds": [
            {**STYLE_OF_KIND[kind]._asdict(), "short": len(kind.value) == 1} for kind in _KINDS
        ],
        "causes": [style_of_cause(cause)._asdict() for cause in causes],
        "themes": {theme.name: theme._asdict() for theme in (LIGHT, DARK)},
        "timelines": timelines,
    }
    return header, block.join()


def _encode_picture(
    picture: Picture, pictures: Sequence[Picture], causes: list[str], block: Block
) -> dict[str, Any]:
    timeline, figures = picture.timeline, picture.figures
    schedule = timeline.schedule
    factor, relative = _find_factor(picture, pictures[0])
    fused: list[dict[str, Any]] = []
    columns = _encode_spans(picture, fused, block)
    place: _Places = {(s.rank, s.action): i for i, s in enumerate(timeline.spans)}
    columns |= _encode_idle(picture, place, causes, block)
    columns |= _encode_memory(timeline, block)
    baseline, matches = _match_baseline(picture, pictures)
    if baseline is not None:
        columns["match"] = block.add("i32", matches)
    lifetimes, products = _encode_lifetimes(timeline, block)
    columns |= lifetimes
    return {
        "title": picture.title,
        "schedule": schedule.name,
        "source": timeline.source,
        "timeUnit": timeline.time_unit,
        "secondsPerUnit": SECONDS_PER_UNIT.get(timeline.time_unit),
        "memoryUnit": timeline.memory_unit,
        "memoryLimit": picture.memory_limit,
        "ranks": schedule.num_ranks,
        "stages": schedule.num_stages,
        "microbatches": schedule.num_microbatches,
        "stagesOfRank": [
            [stage for stage, of in enumerate(schedule.placement.ranks) if of == rank]
            for rank in range(schedule.num_ranks)
        ],
        "end": picture.end,
        "factor": factor,
        "relative": relative,
        "facts": [list(fact) for fact in picture.facts],
        "rows": [list(row) for row in picture.rows],
        "fused": fused,
        "idleOfRank": list(figures.bubble_of_rank),
        "peaks": [
            {
                "total": peak.total,
                "time": peak.time,
                "action": None if peak.action is None else str(peak.action),
                "categories": dict(peak.categories),
                "alive": [list(item) for item in peak.alive[:40]],
                "numAlive": len(peak.alive),
            }
            for peak in figures.peaks
        ],
        **_encode_causes(picture, place),
        "categories": list(timeline.memory[0].categories) if timeline.memory else [],
        "products": products,
        "baseline": baseline,
        "columns": columns,
    }


def _encode_spans(picture: Picture, fused: list[dict[str, Any]], block: Block) -> dict[str, Any]:
    boxes = picture.boxes
    links = find_links(picture.timeline)
    return {
        "start": block.add("f64", (box[2] for box in boxes)),
        "end": block.add("f64", (box[3] for box in boxes)),
        "row": block.add("u32", (box[0] for box in boxes)),
        "track": block.add("u16", (min(box[1], 65535) for box in boxes)),
        "kind": block.add("u8", (_NUMBER_OF_KIND[box[5][0]] for box in boxes)),
        "stage": block.add("i32", (-1 if box[5][1] is None else box[5][1] for box in boxes)),
        "microbatch": block.add("i32", (-1 if box[5][2] is None else box[5][2] for box in boxes)),
        "extra": block.add("i32", (_encode_extra(box[5], fused) for box in boxes)),
        "slack": block.add("f64", picture.figures.slack),
        "critical": block.add("u32", sorted(picture.critical_spans)),
        "needsOffset": block.add("u32", links.offsets),
        "needs": block.add("u32", links.sources),
    }


def _encode_extra(action: Action, fused: list[dict[str, Any]]) -> int:
    """The peer of a message, or the place in the list of fused actions; -1 for neither."""
    if action[3]:
        parts = [[_NUMBER_OF_KIND[p.kind], p.stage, p.microbatch] for p in action.parts]
        fused.append({"text": str(action), "parts": parts})
        return len(fused) - 1
    return -1 if action[4] is None else action[4]


def _encode_causes(picture: Picture, place: _Places) -> dict[str, Any]:
    """The ranked tables of idle time: by cause, and by what is waited for."""
    ranked = picture.rank_causes()
    awaited = {
        f"{idle.waits_for} of rank {idle.waits_for_rank}": (idle.waits_for_rank, idle.waits_for)
        for idle in picture.idle
    }
    return {
        "causeTotals": [[total.cause, total.time, total.share] for total in picture.total_causes()],
        "rankedCauses": [
            [*cause, place.get(awaited.get(cause.waits_for, (None, None)), -1)]
            for cause in ranked[:MOST_CAUSES]
        ],
        "numCauses": len(ranked),
    }


def _encode_idle(
    picture: Picture, place: _Places, causes: list[str], block: Block
) -> dict[str, Any]:
    number = {cause: index for index, cause in enumerate(causes)}
    idle = sorted(picture.idle, key=lambda span: (span.rank, span.start))
    return {
        "idleRank": block.add("u32", (span.rank for span in idle)),
        "idleStart": block.add("f64", (span.start for span in idle)),
        "idleEnd": block.add("f64", (span.end for span in idle)),
        "idleCause": block.add("u8", (number[span.cause] for span in idle)),
        "idleWaitsFor": block.add(
            "i32", (place.get((span.waits_for_rank, span.waits_for), -1) for span in idle)
        ),
        "idleBefore": block.add("i32", (place.get((span.rank, span.before), -1) for span in idle)),
    }


def _encode_memory(timeline: Timeline, block: Block) -> dict[str, Any]:
    curves = {curve.rank: curve for curve in timeline.memory}
    offsets, times, totals = [0], array("d"), array("d")
    names = list(timeline.memory[0].categories) if timeline.memory else []
    categories = [array("d") for _ in names]
    for rank in range(timeline.num_ranks):
        if rank in curves:
            curve = curves[rank]
            times.extend(curve.times)
            totals.extend(curve.totals)
            for name, values in zip(names, categories, strict=True):
                values.extend(curve.categories.get(name, (0.0,) * len(curve.times)))
        offsets.append(len(times))
    return {
        "memoryOffset": block.add("u32", offsets),
        "memoryTime": block.add("f64", times),
        "memoryTotal": block.add("f64", totals),
        **{f"memory:{i}": block.add("f64", values) for i, values in enumerate(categories)},
    }


def _encode_lifetimes(timeline: Timeline, block: Block) -> tuple[dict[str, Any], list[str]]:
    """What is alive when, where there are memory curves to ask it of."""
    found = list(find_lifetimes(timeline)) if timeline.memory else []
    found.sort(key=lambda lifetime: (lifetime.rank, lifetime.start))
    products = sorted({lifetime.product[0] for lifetime in found})
    number = {name: index for index, name in enumerate(products)}
    counts = [0] * (timeline.num_ranks + 1)
    for lifetime in found:
        counts[lifetime.rank + 1] += 1
    for rank in range(timeline.num_ranks):
        counts[rank + 1] += counts[rank]
    columns = {
        "lifeOffset": block.add("u32", counts),
        "lifeProduct": block.add("u8", (number[life.product[0]] for life in found)),
        "lifeStage": block.add("i32", (life.product[1] for life in found)),
        "lifeMicrobatch": block.add(
            "i32", (-1 if life.product[2] is None else life.product[2] for life in found)
        ),
        "lifeStart": block.add("f64", (life.start for life in found)),
        "lifeEnd": block.add("f64", (life.end for life in found)),
    }
    return columns, products


def _find_factor(picture: Picture, first: Picture) -> tuple[float, bool]:
    """What times are multiplied by to stand on the first timeline's axis.

    Where the units cannot be compared, lengths are relative to the makespan.
    """
    own, axis = picture.timeline.time_unit, first.timeline.time_unit
    if own == axis:
        return 1.0, False
    if own in SECONDS_PER_UNIT and axis in SECONDS_PER_UNIT:
        return float(f"{SECONDS_PER_UNIT[own] / SECONDS_PER_UNIT[axis]:.9g}"), False
    return (first.end / picture.end if picture.end > 0 else 1.0), True


def _match_baseline(picture: Picture, pictures: Sequence[Picture]) -> tuple[int | None, list[int]]:
    """The first other timeline in which the same ranks compute the same actions, and where each
    action is in it (-1: nowhere)."""
    own = _computations(picture)
    for index, other in enumerate(pictures):
        if other is picture:
            break
        if _computations(other) != own:
            continue
        spans, base = picture.timeline.spans, other.timeline.spans
        # Spans are told apart by what they are, not by what they say: two can be equal.
        place = {id(span): position for position, span in enumerate(spans)}
        base_place = {id(span): position for position, span in enumerate(base)}
        matches = [-1] * len(spans)
        for pair in compare_timelines(other.timeline, picture.timeline).differences:
            matches[place[id(pair.second)]] = base_place[id(pair.first)]
        return index, matches
    return None, []


def _computations(picture: Picture) -> Counter[tuple[int, Action]]:
    return Counter(
        (span.rank, span.action) for span in picture.timeline.spans if span.lane == "compute"
    )


assert set(STYLE_OF_KIND) == set(Kind), "every kind of action has a row in the palette"
