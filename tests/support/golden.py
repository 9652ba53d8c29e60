"""Compare with a file under tests/golden.

UPDATE_GOLDEN=1 writes the file, to be looked at and committed.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path

GOLDEN = Path(__file__).parents[1] / "golden"


def check_golden(name: str, text: str) -> None:
    """Fail with the difference when the text is not the file's."""
    path = GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return
    expected = path.read_text(encoding="utf-8")
    if text != expected:
        lines = difflib.unified_diff(
            expected.splitlines(), text.splitlines(), str(path), "now", lineterm="", n=1
        )
        raise AssertionError("\n".join(lines) or "only line ends differ")
