"""Parts of a figure that know no panel: the legend, outlines of steps, areas between them."""

from __future__ import annotations

from collections.abc import Sequence

from pipeloom.ir.questions import simple_actions
from pipeloom.view.palette import STYLE_OF_CAUSE, STYLE_OF_KIND, Theme
from pipeloom.view.picture import Picture
from pipeloom.view.scene import Area, Points, Rect, Scene, Words, measure_text


def number_chunks(picture: Picture) -> dict[int, int]:
    """Which of its rank's stages a stage is, in the order in which the rank first runs them."""
    chunk_of: dict[int, int] = {}
    next_of_rank: dict[int, int] = {}
    for box in picture.boxes:
        for part in simple_actions(box.action):
            if part.stage is not None and part.stage not in chunk_of:
                rank = picture.rows[box.row].rank
                chunk_of[part.stage] = next_of_rank.get(rank, 0)
                next_of_rank[rank] = chunk_of[part.stage] + 1
    return chunk_of


def outline_steps(xs: Sequence[float], ys: Sequence[float], right: float) -> Points:
    """A step function, with as many points as can be told apart."""
    points: list[tuple[float, float]] = []
    column, highest = None, 0.0
    dense = len(xs) > 2 * max(right - xs[0], 1.0)
    for index, (x, y) in enumerate(zip(xs, ys, strict=True)):
        following = xs[index + 1] if index + 1 < len(xs) else right
        if dense:
            # Many steps in a pixel: what matters is the largest.
            if column is not None and int(x) == column:
                highest = min(highest, y)
                points[-1] = (points[-1][0], highest)
                points[-2] = (points[-2][0], highest)
                continue
            column, highest = int(x), y
        points += [(x, y), (max(x, following), y)]
    return tuple(points)


def make_areas(
    tops: Sequence[float], floors: Sequence[float], left: float, step: float, colour: str
) -> list[Area]:
    """The space between two step functions, where there is any."""
    areas: list[Area] = []
    column = 0
    while column < len(tops):
        if floors[column] - tops[column] < 0.01:
            column += 1
            continue
        first = column
        while column < len(tops) and floors[column] - tops[column] >= 0.01:
            column += 1
        upper: list[tuple[float, float]] = []
        lower: list[tuple[float, float]] = []
        for c in range(first, column):
            x = left + c * step
            upper += [(x, tops[c]), (x + step, tops[c])]
            lower += [(x, floors[c]), (x + step, floors[c])]
        areas.append(Area((*upper, *reversed(lower)), colour))
    return areas


def draw_legend(
    scene: Scene, pictures: Sequence[Picture], *, theme: Theme, left: float, causes: bool, y: float
) -> float:
    """Name what occurs; returns where the legend ends."""
    present = {style for picture in pictures for style in picture.legend}
    styles = [*STYLE_OF_KIND.values(), *(STYLE_OF_CAUSE.values() if causes else ())]
    x = left
    for style in styles:
        if style not in present:
            continue
        cause = style.name in STYLE_OF_CAUSE
        text = style.name if cause else f"{style.letter}  {style.meaning}"
        width = 24 + measure_text(text, 10) + 14
        if x + width > scene.width - 14 and x > left:
            x, y = left, y + 17
        scene.add(
            Rect(
                x, y + 2, 18, 11, style.colour, style.pattern, style.ink,
                stroke=theme.grid, stroke_width=0.8,
            ),
            Words(x + 24, y + 11, text, 10, theme.text),
        )  # fmt: skip
        x += width
    if any(chunk for picture in pictures for chunk in number_chunks(picture).values()):
        text = "a bar at the foot: the rank's second stage, two bars: its third"
        if x + 24 + measure_text(text, 10) > scene.width - 14:
            x, y = left, y + 17
        scene.add(
            Rect(x, y + 2, 18, 11, theme.lane, stroke=theme.grid, stroke_width=0.8),
            Rect(x, y + 11, 18, 2, theme.text),
            Words(x + 24, y + 11, text, 10, theme.text),
        )
    return y + 15
