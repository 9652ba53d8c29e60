"""The examples run, and do what they say."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str):
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_local_pipeline(schedule, capsys):
    assert load("local_pipeline")(schedule) < 1.0
    assert "longest action" in capsys.readouterr().out


def test_custom_schedule(capsys):
    assert sorted(load("custom_schedule")()) == [
        "(0F3;0B1)OVERLAP_F_B",
        "(1F2;1B1)OVERLAP_F_B",
    ]


def test_skip_connections(capsys):
    first, last = load("skip_connections")()
    assert last < 0.7 * first


def test_training_loop(capsys):
    before, after = load("training_loop")(updates=12)
    assert after < 0.7 * before
    assert "loss per token" in capsys.readouterr().out
