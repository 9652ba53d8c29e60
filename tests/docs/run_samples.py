"""Run the samples of one Markdown page as a reader would.

``python tests/docs/run_samples.py PAGE`` runs its blocks in order, in one namespace and one
temporary directory:

- ```` ```python ````   executed; lines that start with ``>>>`` are checked as a doctest
- ```` ```console ````  each ``$ command`` is run and what it prints compared with the lines below
  it; a line ``...`` stands for any lines, ``...`` inside a line for any text. A command that fails
  must say so, with ``$ echo $?`` as the next command.

``<!-- no-test: reason -->`` on the line before a block skips it.
"""

from __future__ import annotations

import doctest
import os
import re
import shlex
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

RUNNABLE = ("python", "console")
KNOWN_COMMANDS = ("pipeloom", "python", "cat", "head", "ls", "echo")
COMMAND_TIMEOUT = 100
SKIPPED = 5
"""Exit status that says: passed as far as it could be run without an optional package."""

_OPENING = re.compile(r"^(?P<indent> *)(?P<fence>`{3,}|~{3,}) *(?P<language>[\w{}-]*)")
_NO_TEST = re.compile(r"<!--\s*no-test:\s*\S.*-->\s*$")


class SampleError(Exception):
    """A sample does not do what the page says; the message is what to show."""


@dataclass(frozen=True)
class Sample:
    """One fenced block; ``line`` is where its first line of code stands, counted from 1."""

    language: str
    code: str
    line: int


def find_samples(text: str) -> Iterator[Sample]:
    """Every block that is to be run, in order."""
    lines = text.splitlines()
    index = 0
    while index < len(lines):
        opening = _OPENING.match(lines[index])
        index += 1
        if opening is None:
            continue
        first, fence, indent = index, opening["fence"], len(opening["indent"])
        while index < len(lines) and lines[index].strip() != fence:
            index += 1
        body = [line[indent:] if line[:indent].isspace() else line for line in lines[first:index]]
        index += 1
        before = next((line for line in reversed(lines[: first - 1]) if line.strip()), "")
        if opening["language"] in RUNNABLE and not _NO_TEST.search(before):
            yield Sample(opening["language"], "\n".join(body) + "\n", first + 1)


def run_python(sample: Sample, namespace: dict[str, Any], *, page: str) -> None:
    """Execute a block; a traceback points at the line of the page."""
    if sample.code.lstrip().startswith(">>>"):
        test = doctest.DocTestParser().get_doctest(
            sample.code, namespace, page, page, sample.line - 1
        )
        report: list[str] = []
        runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
        if runner.run(test, out=report.append, clear_globs=False).failed:
            raise SampleError("".join(report))
        namespace.update(test.globs)
        return
    code = compile("\n" * (sample.line - 1) + sample.code, page, "exec")
    exec(code, namespace)


def run_console(sample: Sample, *, page: str) -> None:
    """Run each command and compare what it prints."""
    status = 0
    for command, expected, line in split_commands(sample):
        where = f"{page}:{line}: $ {command}"
        program = shlex.split(command)[0]
        if program not in KNOWN_COMMANDS:
            raise SampleError(f"{where}\nonly {', '.join(KNOWN_COMMANDS)} are run here")
        if status and command != "echo $?":
            raise SampleError(f"{where}\nthe command before failed; say so with '$ echo $?'")
        result = subprocess.run(
            ["bash", "-c", f"(exit {status}); {command}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=COMMAND_TIMEOUT,
            check=False,
        )
        status = result.returncode
        if not matches(result.stdout.splitlines(), expected):
            raise SampleError(
                f"{where}\n--- the page says\n{chr(10).join(expected)}\n"
                f"--- it printed (status {status})\n{result.stdout}"
            )
    if status:
        raise SampleError(f"{page}: the last command failed; say so with '$ echo $?'")


def split_commands(sample: Sample) -> Iterator[tuple[str, list[str], int]]:
    """Each command with the lines expected below it and its own line number."""
    command, expected, line = "", [], sample.line
    for offset, text in enumerate([*sample.code.splitlines(), "$ "]):
        if text.startswith("$ "):
            if command:
                yield command, expected, line
            command, expected, line = text[2:].strip(), [], sample.line + offset
        elif command.endswith("\\") and not expected:
            command = f"{command[:-1].rstrip()} {text.strip()}"
        else:
            expected.append(text)


def matches(printed: list[str], expected: list[str]) -> bool:
    """Whether what was printed is what the page shows, white space at line ends aside."""
    pattern = "".join(
        "(?:.*\n)*?" if line.strip() == "..." else _line_pattern(line)
        for line in _strip_blank_ends(expected)
    )
    text = "".join(f"{line.rstrip()}\n" for line in _strip_blank_ends(printed))
    return re.fullmatch(pattern, text) is not None


def _line_pattern(line: str) -> str:
    return ".*?".join(re.escape(part) for part in line.rstrip().split("...")) + "\n"


def _strip_blank_ends(lines: list[str]) -> list[str]:
    return "\n".join(lines).strip("\n").splitlines()


def run_page(path: Path) -> int:
    """Run every sample of a page; the exit status."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for sample in find_samples(path.read_text(encoding="utf-8")):
        try:
            if sample.language == "python":
                run_python(sample, namespace, page=str(path))
            else:
                run_console(sample, page=str(path))
        except ImportError as error:
            if find_spec("torch") is None:
                print(f"{path}:{sample.line}: not run without torch: {error}")
                return SKIPPED
            traceback.print_exc()
            return 1
        except SampleError as error:
            print(error)
            return 1
        except (Exception, SystemExit):
            traceback.print_exc()
            return 1
    return 0


def main() -> int:
    """Run one page in a directory of its own, with the commands of this interpreter first."""
    path = Path(sys.argv[1]).resolve()
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    os.environ |= {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb", "PYTHONUTF8": "1"}
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        status = run_page(path)
        os.chdir("/")
    return status


if __name__ == "__main__":
    sys.exit(main())
