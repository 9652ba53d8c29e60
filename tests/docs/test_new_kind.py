"""The change that CONTRIBUTING.md shows adds a kind of action, and adds it everywhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

USE_IT = """
import pipeloom

rows = "0F0 0F1 0R0 0B0 0R1 0B1\\n1F0 1R0 1B0 1F1 1R1 1B1"
schedule = pipeloom.parse_grid(rows, name="again")
assert pipeloom.parse_grid(str(schedule)).actions == schedule.actions
program = pipeloom.lower(schedule)
pipeloom.verify(program, sends="blocking", channel="all").raise_for_errors()
early = pipeloom.parse_grid("0R0 0F0 0B0")
assert not pipeloom.verify(early).ok
timeline = pipeloom.simulate(program)
assert timeline.makespan == 11
for suffix in ("svg", "html", "trace.json", "txt"):
    timeline.save(f"picture.{suffix}")
assert "forward again" in open("picture.txt").read()
"""

RUN_IT = """
import torch

ran = []
pipe = pipeloom.LocalPipeline(
    [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)],
    schedule,
    loss_fn=torch.nn.functional.mse_loss,
    handlers={"R": lambda context: ran.append(str(context.action))},
)
pipe.step(torch.randn(4, 2), target=torch.randn(4, 2))
assert sorted(ran) == ["0R0", "0R1", "1R0", "1R1"]
"""


def test_the_change_adds_a_kind(tmp_path: Path) -> None:
    if shutil.which("git") is None:
        pytest.skip("git applies the change")
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    [change] = re.findall(r"```diff\n(.*?)```", text, re.DOTALL)
    shutil.copytree(ROOT / "src", tmp_path / "src")
    applied = subprocess.run(
        ["git", "apply", "-p1", "-"], input=change, cwd=tmp_path, text=True, capture_output=True
    )
    assert applied.returncode == 0, f"{applied.stderr}\nrenew the diff in CONTRIBUTING.md"
    code = USE_IT + (RUN_IT if find_spec("torch") else "")
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "src"), "PYTHONUTF8": "1"},
        text=True,
        capture_output=True,
        timeout=100,
    )
    assert result.returncode == 0, result.stderr
