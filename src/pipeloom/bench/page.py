"""The results as one page, and as data."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from pipeloom import __version__
from pipeloom.bench.suites import Result

__all__ = ["find_facts", "make_data", "make_page"]


def find_facts() -> dict[str, str]:
    """What the figures depend on: machine and versions, and how busy the machine was."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    facts = {
        "processor": _name_processor(),
        "cores": str(os.cpu_count()),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "pipeloom": __version__,
        "GPU": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "load at the start": f"{load:.1f}",
    }
    memory = _find_memory_gib()
    return {**facts, "memory": f"{memory:.0f} GiB"} if memory else facts


def make_page(facts: dict[str, str], results: Sequence[Result], *, repeat: str) -> str:
    """The page, in Markdown."""
    lines = ["# pipeloom beside torch.distributed.pipelining", ""]
    lines += ["| machine | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in facts.items()]
    lines += ["", "Everything was measured in this one run. Ratios are pipeloom / torch: below 1,"]
    lines += [f"pipeloom is faster. Repeat it with `{repeat}`.", ""]
    for result in results:
        lines += [f"## {result.title}", "", f"`{result.command}`, {result.seconds:.0f} s"]
        if result.status:
            lines += ["", f"**It ended with status {result.status}.**"]
        lines += ["", "```text", result.output.rstrip("\n"), "```", ""]
    return "\n".join(lines)


def make_data(facts: dict[str, str], results: Sequence[Result], *, repeat: str) -> dict[str, Any]:
    """The same as data."""
    return {
        "pipeloom": "benchmarks",
        "version": 1,
        "facts": facts,
        "repeat": repeat,
        "results": [{**asdict(result), "output": result.output.splitlines()} for result in results],
    }


def _name_processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _find_memory_gib() -> float:
    names = getattr(os, "sysconf_names", {})
    if "SC_PHYS_PAGES" not in names:
        return 0.0
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1024**3
