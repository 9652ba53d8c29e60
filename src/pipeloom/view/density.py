"""How much of each column of a lane is filled with what, where boxes are too small to be seen."""

from __future__ import annotations

from collections.abc import Iterator

from pipeloom.view.palette import (
    STYLE_OF_CAUSE,
    STYLE_OF_KIND,
    Style,
    style_of,
    style_of_cause,
)
from pipeloom.view.picture import Picture


def measure_density(
    picture: Picture, row: int, columns: int, *, end: float | None = None, causes: bool = True
) -> list[tuple[Style, list[float]]]:
    """The share (0 to 1) of every column that each style fills, for the styles that occur.

    ``end`` is the time at the right edge of the last column (the picture's end). Of idle time
    only the compute lane tells.
    """
    end = picture.end if end is None else end
    found: dict[str, tuple[Style, list[float]]] = {}
    if end > 0:
        scale = columns / end
        for style, start, stop in _list_pieces(picture, row, causes):
            _, shares = found.setdefault(style.name, (style, [0.0] * columns))
            first, last = start * scale, min(stop * scale, float(columns))
            for column in range(int(first), columns):
                covered = min(last, column + 1) - max(first, column)
                if covered <= 0:
                    break
                shares[column] += covered
    order = [style.name for style in (*STYLE_OF_KIND.values(), *STYLE_OF_CAUSE.values())]
    # Parallel messages can fill a column more than once.
    return [
        (found[name][0], [min(share, 1.0) for share in found[name][1]])
        for name in sorted(found, key=lambda name: order.index(name) if name in order else 99)
    ]


def _list_pieces(picture: Picture, row: int, causes: bool) -> Iterator[tuple[Style, float, float]]:
    for box in picture.boxes_of_row[row]:
        yield style_of(box.action), box.start, box.end
    if causes and picture.rows[row].lane == "compute":
        for idle in picture.idle_of_rank[picture.rows[row].rank]:
            yield style_of_cause(idle.cause), idle.start, idle.end
