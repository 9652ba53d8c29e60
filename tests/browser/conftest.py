"""One headless Chromium for all browser tests."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import pipeloom
from pipeloom.view.html_report import make_report

CHROMIUM_ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
VIEWPORT = {"width": 1300, "height": 800}


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium")
    assert path, "these tests need Chromium: `make browser` installs it, BROWSER=no leaves them out"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(CHROMIUM_ARGUMENTS))
        yield browser
        browser.close()


class Report:
    """An open report, and what a person does with it."""

    def __init__(self, page: Any, path: Path) -> None:
        self.page, self.path = page, path
        self.problems: list[str] = []
        self.requests: list[str] = []
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("console", self._note_message)
        page.on("request", lambda request: self.requests.append(request.url))
        self.open()

    def _note_message(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(message.text)

    def open(self, fragment: str = "") -> None:
        self.page.goto("about:blank")
        self.page.goto(self.path.as_uri() + fragment)
        self.page.wait_for_selector("html[data-ready=true]", timeout=20_000)
        self.settle()

    def settle(self) -> None:
        """Wait until what was asked for is on the screen, and in the link."""
        self.page.evaluate(
            "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
        )

    def locate(self, action: str, timeline: int = 0) -> tuple[float, float]:
        found = self.page.evaluate(f"pipeloomReport.locate({action!r}, {timeline})")
        assert found, f"{action} is nowhere"
        box = self.page.locator("#canvas").bounding_box()
        assert box["x"] <= found["x"] <= box["x"] + box["width"], f"{action} is out of view"
        assert box["y"] <= found["y"] <= box["y"] + box["height"], f"{action} is out of view"
        return found["x"], found["y"]

    def hover(self, action: str, timeline: int = 0) -> str:
        """Point at an action; what the tooltip says."""
        self.page.mouse.move(*self.locate(action, timeline))
        self.settle()
        return self.tooltip()

    def tooltip(self) -> str:
        tooltip = self.page.locator("#tooltip")
        assert tooltip.is_visible()
        return str(tooltip.inner_text())

    def click(self, action: str, timeline: int = 0) -> None:
        self.page.mouse.click(*self.locate(action, timeline))
        self.settle()

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)
        self.settle()

    def selected(self) -> str:
        """The action that the panel describes; "" for none."""
        title = self.page.locator("#panel section").first.locator(".about-title b")
        return str(title.inner_text()) if title.count() else ""

    def window(self) -> tuple[float, float]:
        start, stop = self.page.evaluate(
            "[pipeloomReport.view.camera.start, pipeloomReport.view.camera.stop]"
        )
        return start, stop

    def pixel(self, x: float, y: float) -> str:
        """The colour of the canvas at a point of the window."""
        red, green, blue = self.page.evaluate(
            """([x, y]) => {
              const canvas = document.getElementById("canvas");
              const box = canvas.getBoundingClientRect();
              const ratio = canvas.width / box.width;
              const copy = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
              copy.drawImage(canvas, -Math.floor((x - box.left) * ratio),
                -Math.floor((y - box.top) * ratio));
              return [...copy.getImageData(0, 0, 1, 1).data].slice(0, 3);
            }""",
            [x, y],
        )
        return f"#{red:02X}{green:02X}{blue:02X}"


OpenReport = Callable[..., Report]


@pytest.fixture
def open_report(browser: Any, tmp_path: Path) -> Iterator[OpenReport]:
    """Write timelines to a report and open it; afterwards nothing may have gone wrong."""
    opened: list[tuple[Any, Report]] = []

    def open_(*timelines: pipeloom.Timeline, options: dict[str, Any] | None = None) -> Report:
        path = tmp_path / f"report{len(opened)}.html"
        path.write_text(make_report(timelines), encoding="utf-8")
        settings = {"viewport": VIEWPORT, "color_scheme": "light", **(options or {})}
        context = browser.new_context(**settings)
        report = Report(context.new_page(), path)
        opened.append((context, report))
        return report

    yield open_
    problems: list[str] = []
    requests: Sequence[str] = []
    for context, report in opened:
        problems += report.problems
        requests = [*requests, *report.requests]
        context.close()
    assert problems == []
    assert [
        url for url in requests if not url.startswith(("file:", "data:", "blob:", "about:"))
    ] == []
