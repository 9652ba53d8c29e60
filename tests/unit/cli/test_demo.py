"""The demo in one process, and what it says about requests that cannot be met."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

torch = pytest.importorskip("torch")

from pipeloom.cli.main import app  # noqa: E402
from pipeloom.cli.torch_verbs.character_model import (  # noqa: E402
    ModelShape,
    find_loss,
    load_text,
    make_parts,
)


def run(*arguments: str):
    return CliRunner().invoke(app, ["demo", *arguments], catch_exceptions=False)


@pytest.fixture(autouse=True)
def keep_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("schedule", ["zbv", "gpipe", "chimera"])
def test_in_one_process(schedule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(schedule, "-r", "2", "-m", "4", "--steps", "2", "--transport", "local", "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["transport"] == "local"
    assert max(told["gradient_errors"]) < 1e-5
    # Whatever the clock says, the order is the same, so each rank holds as much.
    assert len(told["measured"]["peak_memory_mib"]) == 2
    assert (tmp_path / "report.html").stat().st_size > 10_000


def test_of_a_file_with_its_story(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    result = run("mine.csv", "--steps", "1", "--transport", "local", "--report", "r.html")
    assert result.exit_code == 0, result.output
    for text in ("step 0: the gradients of all", "tokens/s", "peak memory", "wrote r.html"):
        assert text in result.stdout
    assert (tmp_path / "trace.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("forward_only",), "forward_only has no backward"),
        (("1fib",), "did you mean"),
        (("--report", "nowhere/report.html"), "there is no folder nowhere"),
        (("dualpipe", "-m", "7"), "dualpipe needs"),
        (("mine.csv", "-r", "2"), "mine.csv is a file and says its own shape"),
    ],
)
def test_requests_that_cannot_be_met(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_parts_are_the_model() -> None:
    """However it is cut, the same number of parameters, and the same weights every time."""
    text = load_text()
    shape = ModelShape(vocabulary=text.vocabulary)
    whole, again = (torch.nn.Sequential(*make_parts(shape, 8)) for _ in range(2))
    halves = torch.nn.Sequential(*make_parts(shape, 2))
    count = sum(p.numel() for p in whole.parameters())
    assert count == sum(p.numel() for p in halves.parameters())
    batch, target = text.batch(3, rows=2, context=shape.context)
    assert torch.equal(batch[:, 1:], target[:, :-1])
    assert find_loss(whole(batch), target) == find_loss(again(batch), target)
    assert len(make_parts(shape, 16)) == 16
