"""The interactive report: one HTML file that needs no server and no network.

::

    <style>…</style>                      explorer/style.css
    <script type="application/json">      the header: titles, figures, where the columns are
    <script type="text/plain">            the columns: gzip, base64
    <script type="importmap">             explorer/*.js as data: URLs, under the names they import
    <script type="module">import "explorer/main.js"
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterable
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from pipeloom.errors import ScheduleError
from pipeloom.ir.garbage import paused_garbage_collection
from pipeloom.ir.timeline import Timeline
from pipeloom.view.columns import encode_pictures
from pipeloom.view.picture import Picture, make_pictures

#: Nothing is loaded from anywhere: the page says so, and the browser enforces it.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' data:; style-src 'unsafe-inline'; img-src data:"
)


def render(timelines: Iterable[Timeline], path: str | Path, **options: Any) -> Path:
    """Write the report to a file."""
    path = Path(path)
    path.write_text(make_report(timelines, **options), encoding="utf-8")
    return path


def make_report(
    timelines: Timeline | Iterable[Timeline], *, title: str | None = None, theme: str = "auto"
) -> str:
    """The report as text. ``theme`` is "auto" (as the reader's system), "light" or "dark"."""
    if isinstance(timelines, Timeline):
        timelines = [timelines]
    if theme not in ("auto", "light", "dark"):
        raise ScheduleError(f"no theme is called {theme!r}; known are auto, light, dark")
    with paused_garbage_collection():
        pictures = make_pictures(timelines)
        if not pictures:
            raise ScheduleError("there is no timeline to report on")
        header, block = encode_pictures(pictures)
    title = title or " · ".join(picture.title for picture in pictures)
    header["title"] = title
    header["theme"] = theme
    # mtime 0: the same timelines give the same file.
    data = base64.b64encode(gzip.compress(block, compresslevel=6, mtime=0)).decode("ascii")
    explorer = files("pipeloom.view") / "explorer"
    page = (explorer / "page.html").read_text(encoding="utf-8")
    modules = {
        f"explorer/{file.name}": _make_module(file.name, file.read_text(encoding="utf-8"))
        for file in sorted(explorer.iterdir(), key=lambda file: file.name)
        if file.name.endswith(".js")
    }
    parts = {
        "POLICY": _POLICY,
        "TITLE": escape(title),
        "SUMMARY": "".join(map(_summarise, pictures)),
        "STYLE": (explorer / "style.css").read_text(encoding="utf-8"),
        "HEADER": _embed_json(header),
        "DATA": data,
        "MODULES": _embed_json({"imports": modules}),
    }
    pieces = page.split("%%")
    # Every other piece is a name: what is put in is never searched for names itself.
    return "".join(parts[piece] if odd % 2 else piece for odd, piece in enumerate(pieces))


def _make_module(name: str, source: str) -> str:
    """A module as a URL; debuggers show it under its name."""
    text = f"{source}\n//# sourceURL=pipeloom/explorer/{name}\n"
    return "data:text/javascript;base64," + base64.b64encode(text.encode()).decode("ascii")


def _embed_json(value: Any) -> str:
    """JSON that can stand in a script element: no name in it can end the element."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _summarise(picture: Picture) -> str:
    """What a reader without scripts sees."""
    facts = ", ".join(f"{escape(name)} {escape(value)}" for name, value in picture.facts)
    return f"<li>{escape(picture.title)}: {facts}</li>"
