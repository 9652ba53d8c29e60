"""``pipeloom demo`` as a person runs it, and how it ends when it is interrupted or a rank dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.multiprocess

from pipeloom.cli.torch_verbs.launch import run_ranks  # noqa: E402
from pipeloom.errors import RankLost, StepFailed  # noqa: E402

COMMAND = (sys.executable, "-m", "pipeloom", "demo")


def start(*arguments: str, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def find_processes(session: int) -> list[int]:
    """The living processes of a session, the youngest last."""
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                state, _, _, of = (path / "stat").read_text().rpartition(")")[2].split()[:4]
            except (OSError, ValueError):
                continue
            if int(of) == session and state != "Z":
                found.append(int(path.name))
    return sorted(found)


def wait_for_none(session: int) -> list[int]:
    deadline = time.monotonic() + 20
    while (left := find_processes(session)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def wait_for_step(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 1"):
            return
    raise AssertionError("the demo ended before it trained")


def test_four_processes(tmp_path: Path) -> None:
    process = start("--steps", "12", "--json", folder=tmp_path)
    output, _ = process.communicate(timeout=110)
    assert process.returncode == 0, output
    told = json.loads(output)
    assert (told["schedule"], told["ranks"], told["stages"]) == ("zbv", 4, 8)
    assert len(told["gradient_errors"]) == 2
    assert max(told["gradient_errors"]) < 1e-5
    assert told["losses"][-1] < told["losses"][0] - 1
    assert len(told["process_peak_mib"]) == 4
    # The same program, so the same activations at the peak, whatever the times.
    assert told["measured"]["peak_memory_mib"] == pytest.approx(
        told["predicted"]["peak_memory_mib"]
    )
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert {event["ph"] for event in trace["traceEvents"]} >= {"X", "M"}
    assert "zbv" in (tmp_path / "report.html").read_text()
    assert wait_for_none(process.pid) == []


def test_interrupted(tmp_path: Path) -> None:
    process = start("--steps", "500", folder=tmp_path)
    wait_for_step(process)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "interrupted" in output
    assert "Traceback" not in output
    assert wait_for_none(process.pid) == []


def test_a_rank_is_killed(tmp_path: Path) -> None:
    process = start("--steps", "500", folder=tmp_path)
    wait_for_step(process)
    os.kill(find_processes(process.pid)[-1], signal.SIGKILL)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "went away without a word" in output
    assert wait_for_none(process.pid) == []


def _talk(rank, post, word):
    post(f"{word} from {rank}")


def _raise_on_one(rank, post):
    if rank == 1:
        raise ArithmeticError("no")
    time.sleep(600)


def _leave_on_one(rank, post):
    if rank == 1:
        os._exit(3)


def test_ranks_are_heard() -> None:
    heard = []
    run_ranks(_talk, "hello", ranks=2, on_message=lambda rank, text: heard.append((rank, text)))
    assert sorted(heard) == [(0, "hello from 0"), (1, "hello from 1")]


def test_a_rank_that_raises_ends_all() -> None:
    with pytest.raises(StepFailed, match="rank 1 failed: ArithmeticError: no") as caught:
        run_ranks(_raise_on_one, ranks=2, on_message=print)
    assert caught.value.rank == 1
    assert "_raise_on_one" in (caught.value.origin or "")


def test_a_rank_that_leaves_is_missed() -> None:
    with pytest.raises(RankLost, match="its process ended with status 3"):
        run_ranks(_leave_on_one, ranks=2, on_message=print)
