"""Which benchmarks there are, and running one.

Each is a script that stands alone (``python benchmarks/runtime.py``). A wheel carries them beside
this file, a checkout has them in ``benchmarks/``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeloom.errors import PipeloomError

__all__ = ["SUITES", "Result", "Suite", "find_script", "find_suites", "run_suite"]


@dataclass(frozen=True, kw_only=True)
class Suite:
    """One benchmark: what it compares, and how to run it."""

    name: str
    title: str
    #: What is added for ``--quick``: the same comparison, less exact.
    quick: tuple[str, ...] = ()
    #: The argument before the file that it writes its figures to, if it does.
    figures_flag: str | None = None


SUITES = (
    Suite(
        name="runtime",
        title="A training step beside torch.distributed.pipelining, alternating",
        quick=("--schedules", "1f1b", "zbv", "--size", "overhead", "--alternations", "8"),
        figures_flag="--json",
    ),
    Suite(
        name="split_backward",
        title="Splitting a backward beside torch's own functions",
        quick=("--rounds", "5"),
    ),
    Suite(
        name="planning",
        title="Building, proving and simulating at scale beside torch's construction",
        quick=("--ranks", "16", "--microbatches", "64", "--repeats", "1"),
    ),
    Suite(
        name="local_overhead",
        title="A pipeline in one process beside a plain accumulation loop",
        quick=("--repeats", "10"),
    ),
    Suite(
        name="compare",
        title="Comparing the whole library",
        quick=("--ranks", "8", "--microbatches", "16", "--repeats", "1"),
    ),
    Suite(name="startup", title="Starting the command line"),
    Suite(
        name="report",
        title="The interactive report of a million actions (needs Chromium)",
        quick=("--chunks", "1", "--compute-only"),
    ),
)


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one benchmark said. ``figures`` is its data, where it writes some."""

    name: str
    title: str
    command: str
    status: int
    seconds: float
    output: str
    figures: Any = None


def find_script(name: str) -> Path:
    """The script of a benchmark."""
    here = Path(__file__).parent
    places = (here / "scripts", here.parents[2] / "benchmarks")
    for place in places:
        if (place / f"{name}.py").is_file():
            return place / f"{name}.py"
    raise PipeloomError(
        f"the script of benchmark {name!r} is not in {' nor in '.join(map(str, places))}; "
        "install pipeloom again, or run in a checkout of it"
    )


def find_suites(names: list[str]) -> list[Suite]:
    """The benchmarks of these names; all that can run here, where none is given.

    >>> [suite.name for suite in find_suites(["startup"])]
    ['startup']
    """
    known = {suite.name: suite for suite in SUITES}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise PipeloomError(
            f"no benchmark is called {', '.join(map(repr, unknown))}; there are {', '.join(known)}"
        )
    return [known[name] for name in names] if names else list(SUITES)


def run_suite(suite: Suite, *, quick: bool, on_line: Callable[[str], None]) -> Result:
    """Run one in a process of its own; ``on_line`` gets what it prints as it comes."""
    script = find_script(suite.name)
    extra = list(suite.quick if quick else ())
    shown = " ".join(["python", f"benchmarks/{suite.name}.py", *extra])
    with tempfile.TemporaryDirectory() as folder:
        figures_file = Path(folder) / "figures.json"
        command = [sys.executable, str(script), *extra]
        if suite.figures_flag is not None:
            command += [suite.figures_flag, str(figures_file)]
        start = time.perf_counter()
        lines = []
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line)
                on_line(line.rstrip("\n"))
        figures = None
        if figures_file.is_file():
            figures = json.loads(figures_file.read_text(encoding="utf-8"))
    return Result(
        name=suite.name,
        title=suite.title,
        command=shown,
        status=process.returncode,
        seconds=time.perf_counter() - start,
        output="".join(lines),
        figures=figures,
    )
