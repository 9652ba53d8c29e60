"""Which module draws what: the one seam between the data and the pictures.

``Timeline.save("x.svg")`` looks its suffix up here and loads the module on use, so that the data
know no picture and starting up loads none. A renderer module has ``render(timelines, path,
**options)``; the notebook renderer has ``render_schedule`` and ``render_timeline``, which return
HTML.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType

from pipeloom.errors import ScheduleError

#: Longest suffix first: "x.trace.json" is a trace, "x.json" the data.
RENDERERS = {
    ".trace.json": "pipeloom.view.perfetto",
    ".html": "pipeloom.view.html_report",
    ".svg": "pipeloom.view.svg",
    ".png": "pipeloom.view.png",
    ".txt": "pipeloom.view.text",
}

_NOTEBOOK = "pipeloom.view.notebook"


def find_renderer(path: Path) -> ModuleType:
    """Load the module that draws a file of this suffix."""
    name = path.name.lower()
    for suffix, module in RENDERERS.items():
        if name.endswith(suffix):
            return import_module(module)
    raise ScheduleError(
        f"{path}: no picture has this suffix; known are {', '.join(RENDERERS)} "
        "and, for the data, .json"
    )


def load_notebook_renderer() -> ModuleType:
    """Load the module that draws schedules and timelines in notebooks."""
    return import_module(_NOTEBOOK)
