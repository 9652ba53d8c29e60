"""``pipeloom compare --json`` against the published table, row by row.

Zero Bubble Pipeline Parallelism (arXiv 2401.10241v1), table 5: bubble rates at measured costs.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipeloom.cli.main import app

#: ranks, microbatches, (F, I, W, latency), bubble of 1f1b, zb_h1 and zb_h2.
TABLE = [
    (8, 24, (18.522, 18.086, 9.337, 0.601), (0.2431, 0.1585, 0.1083)),
    (8, 32, (18.513, 18.086, 9.331, 0.626), (0.1985, 0.1242, 0.0837)),
    (8, 64, (18.546, 18.097, 9.321, 0.762), (0.1240, 0.0674, 0.0444)),
    (8, 24, (29.718, 29.444, 19.927, 0.527), (0.2347, 0.1323, 0.0698)),
    (8, 32, (29.802, 29.428, 19.530, 0.577), (0.1898, 0.1045, 0.0559)),
    (8, 64, (29.935, 29.621, 19.388, 0.535), (0.1091, 0.0554, 0.0294)),
    (16, 48, (11.347, 11.248, 8.132, 0.377), (0.2552, 0.1397, 0.0672)),
    (16, 64, (11.307, 11.254, 8.101, 0.379), (0.2082, 0.1088, 0.0516)),
    (16, 128, (11.325, 11.308, 8.109, 0.378), (0.1251, 0.0576, 0.0266)),
    (32, 96, (10.419, 10.207, 7.715, 0.408), (0.2646, 0.1421, 0.0641)),
    (32, 128, (10.408, 10.204, 7.703, 0.408), (0.2168, 0.1106, 0.0490)),
]


@pytest.mark.parametrize(("ranks", "microbatches", "costs", "published"), TABLE)
def test_compare_ranks_as_published(
    ranks: int,
    microbatches: int,
    costs: tuple[float, ...],
    published: tuple[float, ...],
    tmp_path: Path,
) -> None:
    file = tmp_path / "costs.json"
    file.write_text(
        json.dumps(dict(zip(("forward", "input", "weight", "latency"), costs, strict=True)))
    )
    names = ("1f1b", "zb_h1", "zb_h2")
    arguments = ["compare", *names, "-r", str(ranks), "-m", str(microbatches)]
    result = CliRunner().invoke(app, [*arguments, "--costs", str(file), "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["schedules"]
    bubbles = {entry["name"]: entry["bubble"] for entry in found}
    assert [entry["name"] for entry in found] == ["zb_h2", "zb_h1", "1f1b"]
    for name, bubble in zip(names, published, strict=True):
        assert bubbles[name] == pytest.approx(bubble, abs=6e-5), name
