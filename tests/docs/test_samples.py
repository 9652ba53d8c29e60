"""Every sample in README.md and docs/ does what the page says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.run_samples import SKIPPED, find_samples, matches

ROOT = Path(__file__).parents[2]
RUNNER = Path(__file__).with_name("run_samples.py")
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if "_build" not in page.parts),
]


def run_page(page: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(RUNNER), str(page)],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page(page: Path) -> None:
    if not any(find_samples(page.read_text(encoding="utf-8"))):
        return
    result = run_page(page)
    if result.returncode == SKIPPED:
        pytest.skip(result.stdout.strip())
    assert result.returncode == 0, result.stdout + result.stderr


GOOD = """
# A page

```python
numbers = [1, 2]
```

    ```python
    numbers.append(3)  # indented, as under a list item
    ```

```python
>>> sum(numbers)
6
>>> total = sum(numbers)
```

```python
assert total == 6
open("note.txt", "w").write("first\\nsecond\\nthird\\n")
```

```console
$ cat note.txt
first
...
third
$ cat missing.txt
cat: ...No such file...
$ echo $?
1
```

<!-- no-test: needs a cluster -->

```console
$ torchrun train.py
```

```text
not run
```
"""

BROKEN = {
    "a failing block": "```python\nvalue = 1\nassert value == 2\n```",
    "an exit": "```python\nraise SystemExit(0)\n```\n",
    "a wrong doctest": "```python\n>>> 1 + 1\n3\n```",
    "names of another page": "```python\nprint(numbers)\n```",
    "other output": "```console\n$ echo one\ntwo\n```",
    "missing output": "```console\n$ echo one\n```",
    "too much output": "```console\n$ echo one\none\ntwo\n```",
    "an untold failure": "```console\n$ cat missing.txt\n...\n```",
    "an untold failure, then more": "```console\n$ cat missing.txt\n...\n$ echo one\none\n```",
    "an unknown command": "```console\n$ torchrun train.py\n```",
    "no reason given": "<!-- no-test: -->\n```python\n1 / 0\n```",
}


def test_a_good_page_passes(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(GOOD)
    result = run_page(tmp_path / "page.md")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_a_broken_page_fails(text: str, tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(f"# A page\n\n{text}\n")
    result = run_page(tmp_path / "page.md")
    assert result.returncode == 1, result.stdout + result.stderr


def test_a_traceback_points_at_the_line_of_the_page(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("# A page\n\n```python\nvalue = 1\nvalue / 0\n```\n")
    assert 'page.md", line 5' in run_page(tmp_path / "page.md").stderr


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        (["a", "b"], ["a", "b"], True),
        (["a  ", "b", ""], ["a", "b"], True),
        (["a", "x", "y", "b"], ["a", "...", "b"], True),
        (["a", "b"], ["a", "...", "b"], True),
        (["took 1.25 s"], ["took ... s"], True),
        (["a", "x"], ["a", "...", "b"], False),
        ([" a"], ["a"], False),
        (["a", "", "b"], ["a", "b"], False),
        (["a.b"], ["a*b"], False),
    ],
)
def test_wildcards(printed: list[str], expected: list[str], same: bool) -> None:
    assert matches(printed, expected) is same
