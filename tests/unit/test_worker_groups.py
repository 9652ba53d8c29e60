"""Tests that start processes of their own share one worker, whatever the versions of the tools."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

SAMPLE = """
import pytest

@pytest.mark.multiprocess
@pytest.mark.parametrize("number", range(4))
def test_grouped(number):
    pass

@pytest.mark.parametrize("number", range(4))
def test_free(number):
    pass
"""


def test_tests_marked_multiprocess_run_on_one_worker(tmp_path: Path) -> None:
    shutil.copy(Path(__file__).parents[1] / "conftest.py", tmp_path)
    (tmp_path / "test_sample.py").write_text(SAMPLE)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = multiprocess\n")
    arguments = ["-n", "2", "--dist", "loadgroup", "-v", "-p", "no:cacheprovider"]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments, str(tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    grouped = re.findall(r"\[(gw\d)\].*PASSED.*test_grouped", result.stdout)
    everything = re.findall(r"\[gw\d\].*PASSED", result.stdout)
    assert len(everything) == 8, result.stdout + result.stderr
    assert len(grouped) == 4
    assert len(set(grouped)) == 1, grouped
