"""Costs measured on real stages, written as a file that the other verbs read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

torch = pytest.importorskip("torch")

from pipeloom import load_costs  # noqa: E402
from pipeloom.cli.main import app  # noqa: E402
from pipeloom.cli.torch_verbs.stage_costs import measure_bytes, measure_times  # noqa: E402

STAGES = """
import torch
from torch import nn

def make_stages():
    torch.manual_seed(0)
    wide = nn.Sequential(*(nn.Linear(128, 128) for _ in range(12)))
    return {
        "stages": [nn.Linear(64, 128), wide, nn.Linear(128, 64)],
        "arguments": (torch.randn(256, 64),),
        "loss_fn": nn.functional.mse_loss,
        "target": torch.zeros(256, 64),
    }

def make_nonsense():
    return {"stages": [nn.Linear(2, 2), 3], "batch": 1}

number = 3
"""


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stages.py").write_text(STAGES)
    return tmp_path


def test_costs_of_stages(folder: Path) -> None:
    result = run("profile", "stages.py:make_stages", "-m", "4", "--optimizer-states", "2")
    assert result.exit_code == 0, result.output
    assert "wrote costs.json" in result.stdout
    costs = load_costs("costs.json")
    assert (costs.time_unit, costs.memory_unit) == ("ms", "MiB")
    for times in (costs.forward, costs.input, costs.weight, costs.full):
        assert len(times) == 3
    assert costs.forward[1] > costs.forward[0], "twelve large layers take longer than a small one"
    # Linear layers keep their inputs: eleven of 256 × 128 inside the second stage, of 4 bytes each.
    assert costs.activation[1] == pytest.approx(11 * 256 * 128 * 4 / 2**20)
    assert costs.boundary == pytest.approx((0.125, 0.125, 0))
    weights = 4 * 12 * (128 * 128 + 128) / 2**20
    assert costs.weights[1] == pytest.approx(weights)
    assert costs.optimizer[1] == pytest.approx(2 * weights)


def test_the_file_is_read_by_simulate(folder: Path) -> None:
    assert run("profile", "stages.py:make_stages", "--save", "c.json", "--json").exit_code == 0
    result = run("simulate", "1f1b", "-r", "3", "-m", "4", "--costs", "c.json", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["makespan"] > 0


def test_gradients_are_left_alone() -> None:
    stages = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)]
    kept = torch.ones(4, 4)
    stages[0].weight.grad = kept
    batch = torch.randn(2, 4)
    measure_times(stages, (batch,), microbatches=2, steps=1)
    measure_bytes(stages, (batch,))
    assert stages[0].weight.grad is kept
    assert torch.equal(kept, torch.ones(4, 4))
    assert stages[1].weight.grad is None


def test_without_a_loss_and_with_several_values_between_stages() -> None:
    class Twice(torch.nn.Module):
        def forward(self, tokens):
            return tokens.float() * torch.ones(3, requires_grad=True), {"mask": tokens > 0}

    class Joined(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(3, 5)

        def forward(self, x, extra):
            return self.layer(x) * extra["mask"].any()

    first, last = measure_bytes([Twice(), Joined()], (torch.ones(2, 3, dtype=torch.long),))
    assert first.boundary == 2 * 3 * 4 + 2 * 3
    assert last.boundary == 0
    assert last.weights == 4 * (15 + 5)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("make_stages", "write it as stages.py:make_stages"),
        ("nothing.py:make_stages", "there is no file nothing.py"),
        ("no_such_module:make", "No module named 'no_such_module'"),
        ("stages.py:other", "stages.py has no function 'other'"),
        ("stages.py:number", "stages.py has no function 'number'"),
        ("stages.py:make_nonsense", "'batch' is none of"),
        ("stages.py:make_nonsense", "'arguments' is missing"),
        ("stages.py:make_nonsense", "'stages' must be a list of modules"),
    ],
)
def test_what_cannot_be_measured(folder: Path, source: str, message: str) -> None:
    result = run("profile", source)
    assert result.exit_code == 2
    assert message in result.output
