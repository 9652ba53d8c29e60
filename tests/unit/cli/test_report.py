"""``pipeloom report``, and the pictures of ``pipeloom show``."""

from __future__ import annotations

import json
import webbrowser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipeloom.cli.main import app
from support.hand_made_timelines import make_small_timeline


def pipeloom(*arguments: str | Path, status: int = 0) -> tuple[str, str]:
    result = CliRunner().invoke(app, list(map(str, arguments)), prog_name="pipeloom")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == status, result.output
    return result.stdout, result.stderr


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_two_timelines_in_one_page() -> None:
    make_small_timeline().save("a.json")
    make_small_timeline(source="measured").save("b.json")
    out, _ = pipeloom("report", "a.json", "b.json", "-o", "out.html", "--title", "Both")
    assert out == "wrote out.html\n"
    text = Path("out.html").read_text()
    assert "<title>Both</title>" in text
    assert "small (simulated)" in text
    assert "small (measured)" in text


def test_a_schedule_is_simulated_and_json_says_what_was_written() -> None:
    pipeloom("show", "1f1b", "-r", "2", "-m", "4", "--save", "order.csv")
    pipeloom("simulate", "zbv", "-r", "2", "-m", "4", "--save", "zbv.json")
    Path("gpipe.json").write_text(pipeloom("simulate", "gpipe", "-r", "2", "-m", "4", "--json")[0])
    out, _ = pipeloom("report", "order.csv", "zbv.json", "gpipe.json", "--json")
    said = json.loads(out)
    assert said["written"] == "report.html"
    assert [entry["title"] for entry in said["timelines"]] == ["order", "zbv", "gpipe"]
    assert [entry["makespan"] for entry in said["timelines"]] == [15, 12.5, 15]
    assert Path("report.html").exists()


def test_all_bad_files_are_reported_at_once() -> None:
    Path("bad.json").write_text('{"pipeloom": "timeline"}')
    Path("text.json").write_text("no json")
    Path("number.json").write_text("1" * 5000)
    make_small_timeline().save("good.json")
    files = [f"{name}.json" for name in ("nothing", "bad", "good", "text", "number")]
    _, err = pipeloom("report", *files, status=2)
    assert "nothing.json cannot be read" in err
    assert "bad.json" in err
    assert "text.json is not JSON" in err
    assert "number.json is not JSON" in err
    assert not Path("report.html").exists()


def test_a_report_is_a_page() -> None:
    make_small_timeline().save("a.json")
    _, err = pipeloom("report", "a.json", "-o", "a.svg", status=2)
    assert "a report is an .html file" in err
    _, err = pipeloom("report", "a.json", "-o", "no/such/a.html", status=2)
    assert "there is no folder" in err


def test_open_opens_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    make_small_timeline().save("a.json")
    pipeloom("report", "a.json", "--open")
    assert opened == [Path("report.html").absolute().as_uri()]


@pytest.mark.parametrize(
    ("file", "start"),
    [("x.svg", b"<svg"), ("x.png", b"\x89PNG"), ("x.html", b"<!doctype html>"),
     ("x.trace.json", b'{"displayTimeUnit"'), ("x.txt", b"zbv")],
)  # fmt: skip
def test_show_saves_pictures(file: str, start: bytes) -> None:
    out, _ = pipeloom("show", "zbv", "-r", "4", "-m", "8", "--save", file)
    assert out == f"wrote {file}\n"
    assert Path(file).read_bytes().startswith(start)


def test_show_draws_the_timeline_when_asked() -> None:
    out, _ = pipeloom("show", "1f1b", "-r", "2", "-m", "3", "--as", "timeline")
    assert out.splitlines()[0].startswith("1f1b · 2 ranks × 3 microbatches · simulated")
    assert "│F0" in out
    order, _ = pipeloom("show", "1f1b", "-r", "2", "-m", "3", "--as", "order")
    assert order.startswith("# 1f1b")
    assert pipeloom("show", "1f1b", "-r", "2", "-m", "3")[0] == order


def test_a_program_that_cannot_run_is_shown_all_the_same() -> None:
    Path("stuck.csv").write_text("0F0,0B0\n1B0,1F0\n")
    assert "1B0" in pipeloom("show", "stuck.csv")[0]
    _, err = pipeloom("show", "stuck.csv", "--as", "timeline", status=2)
    assert "1B0" in err
