"""Make the pictures of README and docs: ``python docs/images/make_images.py``.

The SVGs need nothing but pipeloom; the screenshot of the report needs Chromium (``--screenshot``).
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pipeloom

HERE = Path(__file__).parent


def make_timelines() -> dict[str, pipeloom.Timeline]:
    """The timelines that are shown: the same batch, with and without bubbles."""
    one = pipeloom.build_schedule("1f1b", ranks=4, microbatches=8)
    zbv = pipeloom.build_schedule("zbv", ranks=4, microbatches=8)
    return {"1f1b": pipeloom.simulate(one), "zbv": pipeloom.simulate(zbv)}


def draw_images() -> Iterator[tuple[str, str]]:
    """(file name, SVG) of every drawing."""
    from pipeloom.view.svg import draw_svg

    timelines = make_timelines()
    for name, timeline in timelines.items():
        yield f"{name}.svg", draw_svg(timeline)
    yield "1f1b_and_zbv.svg", draw_svg(timelines.values(), memory=False)
    yield "critical_path.svg", draw_svg(timelines["1f1b"], critical_path=True, memory=False)


def take_screenshot(path: Path) -> None:
    """Open a report of both timelines, point at an action, and keep what is seen."""
    from playwright.sync_api import sync_playwright

    from pipeloom.view.html_report import render

    chromium = shutil.which("chromium")
    assert chromium, "the screenshot needs Chromium"
    with tempfile.TemporaryDirectory() as directory, sync_playwright() as playwright:
        page_path = Path(directory) / "report.html"
        render(make_timelines().values(), page_path, title="1f1b and zbv", theme="light")
        browser = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.goto(page_path.as_uri())
        page.wait_for_selector("html[data-ready=true]")
        place = page.evaluate("pipeloomReport.locate('2B1', 0)")
        page.mouse.click(place["x"], place["y"])
        page.mouse.move(place["x"], place["y"])
        page.wait_for_timeout(500)
        page.screenshot(path=path)
        browser.close()


def main() -> None:
    """Write every image beside this file."""
    for name, text in draw_images():
        (HERE / name).write_text(text, encoding="utf-8")
    if "--screenshot" in sys.argv[1:]:
        take_screenshot(HERE / "report.png")


if __name__ == "__main__":
    main()
