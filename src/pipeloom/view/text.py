"""A timeline in the terminal: coloured or plain, Unicode or ASCII, never wider than asked.

::

    rank 0 │F0│F1│··········│B0    │B1    │
    rank 1 ···│F0│B0    │F1│B1    │______

Boxes carry their names while these fit. A longer timeline is cut into windows, one below the
other; a still longer one becomes a density view, whose characters stand in proportion to time.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeloom.ir.timeline import Timeline
from pipeloom.view.palette import STYLE_OF_CAUSE, STYLE_OF_KIND
from pipeloom.view.picture import make_pictures
from pipeloom.view.text_sheet import NARROWEST, UNICODE_IDLE, Line, Pen, Sheet

if TYPE_CHECKING:
    from rich.text import Text


def draw_text(
    timeline: Timeline | Iterable[Timeline],
    *,
    width: int = 100,
    unicode: bool = True,
    communication: bool = False,
) -> str:
    """The picture as plain text of lines not longer than ``width``.

    With ``communication``, the lanes of sends, receives and collectives are drawn too.
    """
    lines = _draw_lines(timeline, width, Pen(unicode), communication)
    return "\n".join("".join(text for text, _ in line).rstrip() for line in lines) + "\n"


def draw_coloured(
    timeline: Timeline | Iterable[Timeline],
    *,
    width: int = 100,
    unicode: bool = True,
    communication: bool = False,
) -> Text:
    """The same characters as :func:`draw_text`, as a rich Text with the palette's colours."""
    from rich.text import Text

    styles = {
        style.name: f"{style.ink} on {style.colour}"
        for style in (*STYLE_OF_KIND.values(), *STYLE_OF_CAUSE.values())
    }
    styles |= {"title": "bold", "muted": "dim"}
    text = Text(no_wrap=True, end="")
    for line in _draw_lines(timeline, width, Pen(unicode), communication):
        for name, cells in groupby(line, key=lambda cell: cell[1]):
            text.append("".join(characters for characters, _ in cells), styles.get(name, ""))
        text.append("\n")
    return text


def can_encode(encoding: str | None) -> bool:
    """True if a terminal of this encoding can show the Unicode picture.

    >>> can_encode("utf-8"), can_encode("ascii"), can_encode(None)
    (True, False, False)
    """
    try:
        "".join([*UNICODE_IDLE.values(), "│×·"]).encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def render(timelines: Iterable[Timeline], path: str | Path, **options: Any) -> Path:
    """Write the plain text to a file."""
    path = Path(path)
    path.write_text(draw_text(timelines, **options), encoding="utf-8")
    return path


def _draw_lines(
    timeline: Timeline | Iterable[Timeline], width: int, pen: Pen, communication: bool
) -> list[Line]:
    pictures = make_pictures([timeline] if isinstance(timeline, Timeline) else timeline)
    lines: list[Line] = []
    # One scale for all, so that lengths can be compared.
    end = max((picture.end for picture in pictures), default=0.0)
    for position, picture in enumerate(pictures):
        if position:
            lines.append([])
        lines += Sheet(picture, max(width, NARROWEST), end, pen, communication).draw()
    return [_strip(line) for line in lines]


def _strip(line: Line) -> Line:
    """Without blanks at the end, except those of a box."""
    kept = list(line)
    while kept and kept[-1][1] in ("", "muted"):
        text, style = kept.pop()
        if text.rstrip():
            kept.append((text.rstrip(), style))
            break
    return kept
