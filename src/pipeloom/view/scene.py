"""A drawing before it has a format: rectangles, areas, lines and words, in pixels.

``figure.py`` makes a Scene of pictures; ``svg.py`` and ``png.py`` write it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

Points: TypeAlias = tuple[tuple[float, float], ...]


class Rect(NamedTuple):
    """A filled rectangle, perhaps with a pattern over it or a line around it."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    pattern: str = "plain"
    #: The colour of the pattern's lines.
    ink: str = ""
    stroke: str = ""
    stroke_width: float = 0.0
    #: Shown when the pointer rests on it, where the format can.
    hint: str = ""


class Area(NamedTuple):
    """A filled polygon."""

    points: Points
    fill: str
    opacity: float = 1.0


class Line(NamedTuple):
    """Straight pieces through some points."""

    points: Points
    stroke: str
    width: float = 1.0
    dashed: bool = False
    arrow: bool = False


class Words(NamedTuple):
    """One line of text; ``y`` is its baseline."""

    x: float
    y: float
    text: str
    size: float
    colour: str
    #: "start", "middle" or "end": which point of the text stands at ``x``.
    anchor: str = "start"
    bold: bool = False


Shape: TypeAlias = Rect | Area | Line | Words


@dataclass
class Scene:
    """Shapes on a sheet, later ones above earlier ones."""

    width: float
    title: str
    description: str
    background: str
    height: float = 0.0
    shapes: list[Shape] = field(default_factory=list)

    def add(self, *shapes: Shape) -> None:
        """Put shapes on top."""
        self.shapes += shapes


#: Widths of characters in units of the size, for the sans-serif faces a reader may have.
_NARROW = frozenset("iljtfrI.,:;|!'()[] ")
_WIDE = frozenset("mwMW@%…")


def measure_text(text: str, size: float) -> float:
    """About how wide a text is; rather too wide than too narrow.

    >>> measure_text("F3", 10) < measure_text("W33", 10)
    True
    """
    units = sum(
        0.36 if c in _NARROW else 0.95 if c in _WIDE else 0.72 if c.isupper() else 0.62
        for c in text
    )
    return units * size
