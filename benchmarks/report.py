"""How long the HTML report of a large program takes to write, to open and to pan in Chromium.

``python benchmarks/report.py [--chunks N] [--compute-only]``

The program is an interleaved schedule of 64 ranks and 512 microbatches, with sends and receives:
about 790,000 spans. Frames are counted by the browser while the view is dragged with the mouse, at
the whole length, at a quarter of it (dense lanes), and where single actions can be seen.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pipeloom

OPENS_WITHIN = 3.0
"""Seconds from the start of loading to the first picture."""
FRAMES_PER_SECOND = 30.0
SECONDS_OF_DRAGGING = 3.0
VIEWPORT = {"width": 1600, "height": 900}
CHROMIUM_ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)

COUNT_FRAMES = """
() => {
  window.frameTimes = [];
  window.counting = true;
  const count = (now) => {
    window.frameTimes.push(now);
    if (window.counting) requestAnimationFrame(count);
  };
  requestAnimationFrame(count);
}
"""


@dataclass(frozen=True)
class Panning:
    """What the browser did while the view was dragged."""

    name: str
    frames_per_second: float
    longest_frame: float
    paint: float


def build_timeline(*, chunks: int, compute_only: bool) -> Any:
    """The simulated program."""
    name = "interleaved_1f1b" if chunks > 1 else "1f1b"
    options = {"chunks": chunks} if chunks > 1 else {}
    schedule = pipeloom.build_schedule(name, ranks=64, microbatches=512, **options)
    if not compute_only:
        schedule = pipeloom.lower(schedule)
    costs = pipeloom.UniformCosts(forward=1, input=1, weight=1, latency=0.05)
    return pipeloom.simulate(schedule, costs=costs)


def drag(page: Any, name: str, view: str) -> Panning:
    """Set a view (a script), then drag it to and fro and count frames."""
    page.evaluate(f"() => {{ const view = pipeloomReport.view; {view}; view.paintNow(); }}")
    middle_y = VIEWPORT["height"] / 2
    page.mouse.move(700, middle_y)
    page.mouse.down()
    page.evaluate(COUNT_FRAMES)
    started = time.perf_counter()
    step = 0
    while time.perf_counter() - started < SECONDS_OF_DRAGGING:
        step += 1
        swing = step % 80
        page.mouse.move(500 + 8 * (swing if swing < 40 else 80 - swing), middle_y)
    times = page.evaluate("() => { window.counting = false; return window.frameTimes; }")
    page.mouse.up()
    gaps = [after - before for before, after in itertools.pairwise(times)]
    paints = page.evaluate(
        """() => Array.from({length: 20}, (_, i) => {
             const view = pipeloomReport.view;
             view.camera.pan(i % 2 ? 3 : -3);
             const start = performance.now();
             view.paintNow();
             return performance.now() - start;
           })"""
    )
    return Panning(
        name,
        1000 * len(gaps) / sum(gaps),
        max(gaps),
        statistics.median(paints),
    )


def measure_page(path: Path, browser_path: str) -> tuple[float, list[Panning], float]:
    """(seconds to open, panning at several zooms, MB of memory)."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=browser_path, args=list(CHROMIUM_ARGUMENTS)
        )
        opened = []
        for _ in range(3):
            page = browser.new_page(viewport=VIEWPORT)  # type: ignore[arg-type]
            page.goto(path.as_uri(), wait_until="commit")
            page.wait_for_selector("html[data-ready=true]", timeout=60_000)
            # From the start of navigation until the frame after the first picture was painted.
            opened.append(
                page.evaluate(
                    "() => new Promise((done) => requestAnimationFrame("
                    "() => setTimeout(() => done(performance.now()), 0)))"
                )
            )
            if len(opened) < 3:
                page.close()
        pannings = [
            drag(page, "whole length", "view.camera.fit()"),
            drag(page, "a quarter", "view.camera.set(view.camera.end / 4, view.camera.end / 2)"),
            drag(
                page,
                "single actions",
                "view.camera.set(view.camera.end / 2, view.camera.end / 2 + 60)",
            ),
            drag(
                page,
                "whole length, messages and memory",
                "view.setOptions({messages: true, memory: true}); view.camera.fit()",
            ),
        ]
        memory = page.evaluate("() => performance.memory ? performance.memory.usedJSHeapSize : 0")
        browser.close()
    return min(opened) / 1000, pannings, memory / 1e6


def main() -> int:
    """Print the figures; exit status 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chunks", type=int, default=4, help="stages per rank (4)")
    parser.add_argument("--compute-only", action="store_true", help="without sends and receives")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    browser_path = shutil.which("chromium")
    if browser_path is None:
        print("chromium is not installed; apt-get install chromium", file=sys.stderr)
        return 2
    timeline = build_timeline(chunks=arguments.chunks, compute_only=arguments.compute_only)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "report.html"
        started = time.perf_counter()
        timeline.save(path)
        written = time.perf_counter() - started
        size = path.stat().st_size / 1e6
        opened, pannings, memory = measure_page(path, browser_path)
    slowest = min(panning.frames_per_second for panning in pannings)
    met = opened < OPENS_WITHIN and slowest >= FRAMES_PER_SECOND
    if arguments.json:
        figures = {
            "spans": len(timeline.spans),
            "written_s": written,
            "size_mb": size,
            "opened_s": opened,
            "heap_mb": memory,
            "panning": [vars(panning) for panning in pannings],
            "targets_met": met,
        }
        print(json.dumps(figures, indent=2))
        return 0 if met else 1
    print(f"{len(timeline.spans):,} spans, 64 ranks, 512 microbatches")
    print(f"  written in   {written:6.1f} s   {size:.1f} MB")
    print(f"  opened in    {opened:6.2f} s   target < {OPENS_WITHIN:g} s   heap {memory:.0f} MB")
    for panning in pannings:
        print(
            f"  panning      {panning.frames_per_second:6.1f} frames/s   target >= "
            f"{FRAMES_PER_SECOND:g}   longest {panning.longest_frame:.0f} ms   "
            f"paint {panning.paint:.1f} ms   {panning.name}"
        )
    print("targets met" if met else "TARGETS MISSED")
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
