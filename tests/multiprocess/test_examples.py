"""The examples for torchrun run as they say, and learn something."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.multiprocess

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_with_torchrun(example: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    result = subprocess.run(
        [*command, str(EXAMPLES / example)],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_pipeline() -> None:
    output = run_with_torchrun("torchrun_pipeline.py")
    losses = [float(loss) for loss in re.findall(r"(?:loss|end) +(\d+\.\d+)", output)]
    assert len(losses) == 4
    assert losses[-1] < losses[0] / 2
    assert "spans of 4 ranks on one clock" in output


def test_data_parallel() -> None:
    output = run_with_torchrun("torchrun_data_parallel.py")
    assert "rank 0 runs: 0UNSHARD 0F0" in output
    assert "0RESHARD 0REDUCE_GRAD" in output
    assert output.count("loss") == 4
