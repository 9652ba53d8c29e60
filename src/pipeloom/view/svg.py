"""SVG by hand: a figure for a paper or a page, sharp at any size, its text searchable."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from pipeloom.ir.timeline import Timeline
from pipeloom.view.figure import draw_figure, make_options
from pipeloom.view.scene import Area, Line, Rect, Scene, Shape, Words

FONTS = "Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif"

#: What each pattern draws on a tile of 6 × 6 pixels.
_STROKES = {
    "rising": "M-1 7L7 -1M-1 1L1 -1M5 7L7 5",
    "falling": "M-1 -1L7 7M5 -1L7 1M-1 5L1 7",
    "cross": "M0 0L6 6M6 0L0 6",
    "horizontal": "M0 1.5H6M0 4.5H6",
    "vertical": "M1.5 0V6M4.5 0V6",
}
_DOTS = '<circle cx="1.5" cy="1.5" r=".8"/><circle cx="4.5" cy="4.5" r=".8"/>'


def draw_svg(timelines: Timeline | Iterable[Timeline], **options: Any) -> str:
    """The figure as the text of an SVG file; :func:`make_options` lists the options."""
    if isinstance(timelines, Timeline):
        timelines = [timelines]
    return write_scene(draw_figure(timelines, make_options(**options)))


def render(timelines: Iterable[Timeline], path: str | Path, **options: Any) -> Path:
    """Write the figure to a file."""
    path = Path(path)
    path.write_text(draw_svg(timelines, **options), encoding="utf-8")
    return path


def write_scene(scene: Scene) -> str:
    """A scene as SVG."""
    patterns: dict[tuple[str, str, str], str] = {}
    # Several figures may stand on one page, so names of patterns must not clash.
    prefix = "p" + sha256(repr(scene.shapes).encode()).hexdigest()[:6]
    body = [_write_shape(shape, patterns, prefix) for shape in scene.shapes]
    size = f'width="{_n(scene.width)}" height="{_n(scene.height)}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} '
        f'viewBox="0 0 {_n(scene.width)} {_n(scene.height)}" role="img" '
        f'font-family="{FONTS}">',
        f"<title>{_text(scene.title)}</title>",
        f"<desc>{_text(scene.description)}</desc>",
    ]
    definitions = [
        _define_pattern(name, pattern, colour, ink)
        for (pattern, colour, ink), name in patterns.items()
    ]
    if any(isinstance(shape, Line) and shape.arrow for shape in scene.shapes):
        definitions.append(
            f'<marker id="{prefix}-arrow" viewBox="0 0 6 6" refX="5.5" refY="3" markerWidth="5" '
            'markerHeight="5" orient="auto"><path d="M0 .5L6 3L0 5.5Z" fill="context-stroke"/>'
            "</marker>"
        )
    if definitions:
        lines += ["<defs>", *definitions, "</defs>"]
    lines.append(f'<rect width="100%" height="100%" fill="{scene.background}"/>')
    return "\n".join([*lines, *body, "</svg>", ""])


def _write_shape(shape: Shape, patterns: dict[tuple[str, str, str], str], prefix: str) -> str:
    match shape:
        case Rect():
            return _write_rect(shape, patterns, prefix)
        case Area(points, fill, opacity):
            seen = f' fill-opacity="{_n(opacity)}"' if opacity < 1 else ""
            return f'<path d="{_write_path(points)}Z" fill="{fill}"{seen}/>'
        case Line(points, stroke, width, dashed, arrow):
            extra = ' stroke-dasharray="4 3"' if dashed else ""
            extra += f' marker-end="url(#{prefix}-arrow)"' if arrow else ""
            return (
                f'<path d="{_write_path(points)}" fill="none" stroke="{stroke}" '
                f'stroke-width="{_n(width)}"{extra}/>'
            )
        case Words(x, y, text, size, colour, anchor, bold):
            place = "" if anchor == "start" else f' text-anchor="{anchor}"'
            weight = ' font-weight="600"' if bold else ""
            return (
                f'<text x="{_n(x)}" y="{_n(y)}" font-size="{_n(size)}" fill="{colour}"'
                f"{place}{weight}>{_text(text)}</text>"
            )


def _write_rect(rect: Rect, patterns: dict[tuple[str, str, str], str], prefix: str) -> str:
    fill = rect.fill
    if rect.pattern != "plain":
        key = (rect.pattern, rect.fill, rect.ink)
        name = patterns.setdefault(key, f"{prefix}-{len(patterns)}")
        fill = f"url(#{name})"
    outline = f' stroke="{rect.stroke}" stroke-width="{_n(rect.stroke_width)}"'
    place = f'x="{_n(rect.x)}" y="{_n(rect.y)}" width="{_n(rect.width)}" height="{_n(rect.height)}"'
    start = f'<rect {place} fill="{fill}"{outline if rect.stroke else ""}'
    return f"{start}><title>{_text(rect.hint)}</title></rect>" if rect.hint else f"{start}/>"


def _define_pattern(name: str, pattern: str, colour: str, ink: str) -> str:
    if pattern == "dots":
        marks = f'<g fill="{ink}" fill-opacity=".55">{_DOTS}</g>'
    else:
        marks = f'<path d="{_STROKES[pattern]}" stroke="{ink}" stroke-opacity=".45"/>'
    return (
        f'<pattern id="{name}" width="6" height="6" patternUnits="userSpaceOnUse">'
        f'<rect width="6" height="6" fill="{colour}"/>{marks}</pattern>'
    )


def _write_path(points: Iterable[tuple[float, float]]) -> str:
    return "".join(f"{'L' if index else 'M'}{_n(x)} {_n(y)}" for index, (x, y) in enumerate(points))


def _text(text: str) -> str:
    # XML has no word for control characters.
    return escape(
        "".join(c if c >= " " or c in "\t\n" else "\N{REPLACEMENT CHARACTER}" for c in text)
    )


def _n(value: float) -> str:
    """Two decimals are finer than any eye, and the same on every machine."""
    return f"{round(value, 2) + 0.0:.2f}".rstrip("0").rstrip(".")
