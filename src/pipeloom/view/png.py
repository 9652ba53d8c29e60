"""PNG: the same figure as the SVG, drawn by matplotlib."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pipeloom.errors import MissingExtraError
from pipeloom.ir.timeline import Timeline
from pipeloom.view.figure import draw_figure, make_options
from pipeloom.view.scene import Area, Line, Rect, Scene, Words

_HATCHES = {
    "rising": "////",
    "falling": "\\\\\\\\",
    "cross": "xxxx",
    "dots": "....",
    "horizontal": "----",
    "vertical": "||||",
}
#: Pixels of the scene per inch; text sizes are in pixels, matplotlib's in points of 1/72 inch.
_PIXELS_PER_INCH = 96.0


def render(
    timelines: Iterable[Timeline], path: str | Path, *, scale: float = 2.0, **options: Any
) -> Path:
    """Write the figure to a file, with ``scale`` dots to a pixel of the scene."""
    scene = draw_figure(timelines, make_options(**options))
    path = Path(path)
    write_scene(scene, path, scale=scale)
    return path


def write_scene(scene: Scene, path: Path, *, scale: float) -> None:
    """Draw a scene with matplotlib, without a display."""
    try:
        import matplotlib as mpl
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import FancyArrowPatch, Polygon, Rectangle
    except ImportError:
        raise MissingExtraError("matplotlib", extra="plot", purpose="a PNG picture") from None

    points = 72.0 / _PIXELS_PER_INCH
    with mpl.rc_context({"hatch.linewidth": 0.5, "path.simplify": False}):
        figure = Figure(
            (scene.width / _PIXELS_PER_INCH, scene.height / _PIXELS_PER_INCH),
            dpi=_PIXELS_PER_INCH * scale,
            facecolor=scene.background,
        )
        FigureCanvasAgg(figure)
        axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
        axes.set_axis_off()
        axes.set_xlim(0, scene.width)
        axes.set_ylim(scene.height, 0)
        for order, shape in enumerate(scene.shapes):
            match shape:
                case Rect(x, y, width, height, fill, pattern, ink, stroke, stroke_width):
                    hatch = _HATCHES.get(pattern)
                    axes.add_patch(
                        Rectangle(
                            (x, y), width, height,
                            facecolor=fill, hatch=hatch, zorder=order,
                            edgecolor=stroke or ((ink, 0.45) if hatch else "none"),
                            linewidth=stroke_width * points if stroke else 0.0,
                        )
                    )  # fmt: skip
                case Area(corners, fill, opacity):
                    axes.add_patch(
                        Polygon(
                            corners, closed=True, facecolor=fill, alpha=opacity,
                            linewidth=0, zorder=order,
                        )
                    )  # fmt: skip
                case Line(places, stroke, width, dashed, arrow):
                    if arrow:
                        axes.add_patch(
                            FancyArrowPatch(
                                places[0], places[-1], arrowstyle="-|>", mutation_scale=5,
                                color=stroke, linewidth=width * points, zorder=order,
                                shrinkA=0, shrinkB=0,
                            )
                        )  # fmt: skip
                    else:
                        axes.plot(
                            [x for x, _ in places], [y for _, y in places],
                            color=stroke, linewidth=width * points, zorder=order,
                            linestyle=(0, (4, 3)) if dashed else "-", solid_capstyle="butt",
                        )  # fmt: skip
                case Words(x, y, text, size, colour, anchor, bold):
                    axes.text(
                        x, y, text,
                        fontsize=size * points, color=colour, zorder=order,
                        ha={"start": "left", "middle": "center", "end": "right"}[anchor],
                        va="baseline", fontweight="bold" if bold else "normal",
                        # A name with dollar signs is a name, not a formula.
                        parse_math=False,
                    )  # fmt: skip
        figure.savefig(path, format="png", metadata={"Title": scene.title, "Software": "pipeloom"})
