"""The console script in a process of its own: what it loads, and how it ends."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pipeloom.cli.main import VERBS

HEAVY = ("torch", "numpy", "matplotlib", "scipy", "ortools")


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False
    )


@pytest.mark.parametrize(
    ("arguments", "verbs"),
    [
        (["--help"], set()),
        (["show", "zbv", "-r", "2", "-m", "2", "--lower"], {"show"}),
        (["check", "zbv", "-r", "2", "-m", "2"], {"check"}),
    ],
)
def test_a_verb_loads_itself_and_nothing_heavy(arguments: list[str], verbs: set[str]) -> None:
    modules = {verb: VERBS[verb].module for verb in VERBS}
    result = run(
        "import sys\n"
        f"sys.argv = ['pipeloom', *{arguments!r}]\n"
        "from pipeloom.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code\n"
        f"print('loaded', *(n for n in {HEAVY!r} if n in sys.modules),"
        f" *(v for v, m in {modules!r}.items() if m in sys.modules))\n"
    )
    assert result.returncode == 0, result.stderr
    assert set(result.stdout.splitlines()[-1].split()[1:]) == verbs


def test_python_dash_m() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "pipeloom", "check", "nothing.csv"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 2
    assert result.stderr == "nothing.csv cannot be read: No such file or directory\n"


def test_a_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m pipeloom show gpipe -r 64 -m 128 | head -c 10"
    result = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=100, check=False
    )
    assert result.stdout == "# gpipe · "[:10] or result.stdout.startswith("# gpipe")
    assert "Traceback" not in result.stderr


def test_a_terminal_without_the_characters_still_gets_the_schedule() -> None:
    result = run(
        "import os, subprocess, sys\n"
        "env = {**os.environ, 'PYTHONIOENCODING': 'ascii'}\n"
        "sys.exit(subprocess.run([sys.executable, '-m', 'pipeloom', 'show', '1f1b', '-r', '2',"
        " '-m', '2'], env=env).returncode)\n"
    )
    assert result.returncode == 0, result.stderr
    assert "rank 0" in result.stdout
