"""How long the command line takes to start, beside an interpreter that does nothing.

    python benchmarks/startup.py

The bound is 0.3 s for `pipeloom --help` on an idle machine; the bare interpreter's time beside it
tells how much of that is Python's own.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

REPEATS = 7
BOUND_SECONDS = 0.3


def time_command(command: list[str]) -> float:
    """The fastest of several runs in seconds: the others only add what else the machine did."""
    runs = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        runs.append(time.perf_counter() - start)
    return min(runs)


def main() -> None:
    """Print one line a command."""
    script = str(Path(sys.executable).with_name("pipeloom"))
    show = [script, "show", "1f1b", "-r", "4", "-m", "8"]
    bare = time_command([sys.executable, "-c", "pass"])
    commands = {
        "python -c pass": bare,
        "import pipeloom": time_command([sys.executable, "-c", "import pipeloom"]),
        "pipeloom --help": time_command([script, "--help"]),
        "pipeloom show 1f1b -r 4 -m 8": time_command(show),
    }
    print(f"{'command':<30} {'seconds':>8} {'over python':>12}")
    for name, seconds in commands.items():
        print(f"{name:<30} {seconds:8.3f} {seconds - bare:12.3f}")
    within = commands["pipeloom --help"] <= BOUND_SECONDS
    print(f"pipeloom --help within {BOUND_SECONDS} s: {'yes' if within else 'NO'}")


if __name__ == "__main__":
    main()
