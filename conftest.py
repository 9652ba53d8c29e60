"""What every test of the project shares, the doctests under src/ included."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

# Before torch is first imported: with several workers on few cores, more threads only get in each
# other's way, and the number of threads is part of what makes two runs agree bit for bit.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")

# Modules that cannot be imported without torch, so that the rest can be tested where it is missing.
BELOW_THE_TORCH_LINE = (
    "runtime",
    "model",
    "checkpoint",
    "torch_api",
    "integrations",
    "bench",
    "cli/torch_verbs",
)

collect_ignore: list[str] = []
if find_spec("torch") is None:
    package = Path(__file__).parent / "src" / "pipeloom"
    collect_ignore += [str(package / name) for name in BELOW_THE_TORCH_LINE]
    collect_ignore += [str(package / f"{name}.py") for name in BELOW_THE_TORCH_LINE]
