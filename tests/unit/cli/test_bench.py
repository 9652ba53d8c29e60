"""Collecting benchmarks: what ran, what it said, one page and the same as data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("torch")

from pipeloom.bench import suites
from pipeloom.cli.main import app

ROOT = Path(__file__).parents[3]


def run(*arguments: str):
    return CliRunner().invoke(app, ["bench", *arguments], catch_exceptions=False)


def test_every_script_is_a_suite_and_every_suite_a_script() -> None:
    scripts = {path.stem for path in (ROOT / "benchmarks").glob("[!_]*.py")}
    assert {suite.name for suite in suites.SUITES} == scripts
    for suite in suites.SUITES:
        text = suites.find_script(suite.name).read_text(encoding="utf-8")
        flags = [word for word in suite.quick if word.startswith("--")]
        flags += [suite.figures_flag] if suite.figures_flag else []
        assert [flag for flag in flags if f'"{flag}"' not in text] == []


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two benchmarks that take no time."""
    monkeypatch.chdir(tmp_path)
    good = "import json, sys\nprint('ratio 0.5')\njson.dump([0.5], open(sys.argv[-1], 'w'))\n"
    (tmp_path / "good.py").write_text(good)
    (tmp_path / "bad.py").write_text("import sys\nprint('no')\nsys.exit(3)\n")
    both = (
        suites.Suite(name="good", title="A good one", quick=("--fast",), figures_flag="--json"),
        suites.Suite(name="bad", title="A bad one"),
    )
    monkeypatch.setattr(suites, "SUITES", both)
    monkeypatch.setattr(suites, "find_script", lambda name: tmp_path / f"{name}.py")
    return tmp_path


def test_page_and_data(scripts: Path) -> None:
    result = run("good", "--quick", "--save", "page.md")
    assert result.exit_code == 0, result.output
    assert "ratio 0.5" in result.stdout
    page = (scripts / "page.md").read_text()
    for text in ("## A good one", "ratio 0.5", "| torch |", "`pipeloom bench good --quick`"):
        assert text in page
    data = json.loads((scripts / "page.json").read_text())
    [told] = data["results"]
    assert (told["figures"], told["status"]) == ([0.5], 0)
    assert told["command"] == "python benchmarks/good.py --fast"
    assert int(data["facts"]["cores"]) > 0


def test_a_suite_that_fails(scripts: Path) -> None:
    result = run("--json")
    assert result.exit_code == 1
    data = json.loads(result.stdout)
    assert [told["status"] for told in data["results"]] == [0, 3]
    assert "It ended with status 3" in (scripts / "bench.md").read_text()


def test_list_and_unknown() -> None:
    assert run("--list").stdout.startswith("runtime")
    assert json.loads(run("--list", "startup", "--json").stdout)[0]["name"] == "startup"
    result = run("runtme")
    assert result.exit_code == 2
    assert "there are runtime" in result.output
