"""The verbs `simulate` and `compare`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipeloom import UniformCosts, build_schedule, load_timeline, lower, save_costs
from pipeloom.cli.main import app

COSTS = UniformCosts(
    *(18.522, 18.086, 9.337), latency=0.601, activation=2, time_unit="ms", memory_unit="GiB"
)


@pytest.fixture
def costs_file(tmp_path: Path) -> str:
    return str(save_costs(COSTS, tmp_path / "costs.json"))


def call(*arguments: str, status: int = 0) -> str:
    result = CliRunner().invoke(app, [*map(str, arguments)])
    assert result.exit_code == status, result.output
    return result.output


# ── simulate ─────────────────────────────────────────────────────────────────────────────────────


def test_a_summary_for_people() -> None:
    assert call("simulate", "1f1b", "-r", "2", "-m", "3").splitlines() == [
        "1f1b · 2 ranks · 2 stages · 3 microbatches",
        "makespan      12",
        "lower bound   10 (fill); the makespan is 20.0 % above it",
        "span          12",
        "bubble        25.0 % of the span, 25.0 % of the makespan; ranks idle 25.0 % of the time",
        "peak memory   2",
        "  rank 0    2          activation 2 at 0F1",
        "  rank 1    1          activation 1 at 1F0",
        "idle time     6 over all ranks",
        "  waiting        50.0 %  3          longest: 2 on rank 0 before 0B0, for 1B0 of rank 1",
        "  drain          33.3 %  2          longest: 2 on rank 1",
        "  warm-up        16.7 %  1          longest: 1 on rank 1 before 1F0, for 0F0 of rank 0",
    ]


def test_everything_as_json(costs_file: str) -> None:
    text = call(
        *("simulate", "zbv", "-r", "4", "-m", "8", "--costs", costs_file),
        *("--memory", "10GiB", "--json"),
    )
    data = json.loads(text)
    assert data["span"] <= data["makespan"]
    assert data["peak_memory"] == [8, 8, 8, 8]
    assert data["fits"] is True
    assert data["bubble"] < 0.1
    assert data["timeline"]["time_unit"] == "ms"
    assert len(data["timeline"]["spans"]["slack"]) == len(data["timeline"]["spans"]["start"])
    assert sum(i["end"] - i["start"] for i in data["idle_causes"]) == pytest.approx(
        4 * data["makespan"] - sum(data["work"])
    )


def test_over_the_limit(costs_file: str) -> None:
    text = call(
        "simulate", "gpipe", "-r", "2", "-m", "4", "--costs", costs_file, "--memory", "3GiB"
    )
    assert "peak memory   8 GiB; 2 ranks are over the limit of 3 GiB" in text
    assert text.count("over the limit\n") == 2


def test_a_limit_in_bytes_needs_costs_in_bytes() -> None:
    text = call("simulate", "gpipe", "-r", "2", "-m", "4", "--memory", "40GiB", status=2)
    assert "without a memory unit" in text


def test_files_and_saving(tmp_path: Path) -> None:
    path = build_schedule("zbv", ranks=2, microbatches=4).save(tmp_path / "mine.json")
    saved = tmp_path / "timeline.json"
    text = call("simulate", str(path), "--save", str(saved))
    assert text.splitlines()[-1] == f"wrote {saved}"
    assert load_timeline(saved).makespan == 12.5


def test_lowered_under_the_strictest_model() -> None:
    arguments = ("simulate", "1f1b", "-r", "2", "-m", "4", "--json")
    free = json.loads(call(*arguments))
    strict = json.loads(call(*arguments, "--lower", "--sends", "blocking", "--channel", "all"))
    assert strict["makespan"] >= free["makespan"]
    assert strict["timeline"]["metadata"]["sends"] == "blocking"


def test_what_is_made_for_costs_is_made_for_these(costs_file: str) -> None:
    arguments = ("simulate", "zb_auto", "-r", "4", "-m", "8", "--costs", costs_file, "--json")
    free = json.loads(call(*arguments))
    tight = json.loads(call(*arguments, "--memory", "6GiB"))
    assert max(tight["peak_memory"]) <= 6 < max(free["peak_memory"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("zbx", "-r", "2", "-m", "2"), "there is no schedule 'zbx'"),
        (("zbv",), "needs a shape"),
        (("zbv", "-r", "2", "-m", "2", "--costs", "none.json"), "cannot be read"),
        (("zbv", "-r", "2", "-m", "2", "--memory", "lots"), "no amount of memory"),
        (("none.csv",), "cannot be read"),
    ],
)
def test_mistakes_are_told(arguments: tuple[str, ...], message: str) -> None:
    assert message in call("simulate", *arguments, status=2)


def test_a_deadlock_is_told(tmp_path: Path) -> None:
    path = tmp_path / "stuck.csv"
    path.write_text("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")
    assert "waits" in call("simulate", str(path), status=2)


# ── compare ──────────────────────────────────────────────────────────────────────────────────────


def compare(*arguments: str) -> dict:
    return json.loads(call("compare", *arguments, "--json"))


def names_of(data: dict) -> list[str]:
    return [row["name"] for row in data["schedules"]]


def test_the_published_costs_rank_the_schedules_as_published(tmp_path: Path) -> None:
    costs = UniformCosts(18.522, 18.086, 9.337, latency=0.601, retained=0.366)
    path = str(save_costs(costs, tmp_path / "costs.json"))
    shape = ("-r", "8", "-m", "24", "--costs", path, "--chunks", "3", "--sort", "bubble")
    ranking = names_of(compare(*shape))
    published = ["zb_auto", "zb_h2", "interleaved_1f1b", "zb_h1", "1f1b"]  # ZB-2p … 1F1B
    assert [name for name in ranking if name in published] == published


def test_the_table() -> None:
    text = call("compare", "-r", "4", "-m", "8", "--memory", "4")
    lines = text.splitlines()
    zbv = next(line for line in lines if " zbv," in line)
    assert zbv.split()[:6] == ["*", "zbv,", "2", "chunks", "25.5", "24"]
    gpipe = next(line for line in lines if " gpipe" in line)
    assert gpipe.endswith("does not fit: 4 ranks over, rank 0 needs 8")
    assert lines.index(zbv) < lines.index(gpipe)


def test_a_limit_lets_a_schedule_with_a_peak_of_its_own_be(costs_file: str) -> None:
    shape = ("v_min", "v_half", "zb_auto", "-r", "6", "-m", "12", "--costs", costs_file)

    def peaks(*limit: str) -> dict[str, float]:
        found = compare(*shape, *limit)["schedules"]
        return {row["name"]: max(row["peak_memory"]) for row in found}

    # An activation is 2 GiB here: ⌊10/3⌋ and ⌊8/2⌋ of them, and 2·6.
    assert peaks() == {"v_min": 6, "v_half": 8, "zb_auto": 24}
    assert peaks("--memory", "20GiB") == {"v_min": 6, "v_half": 8, "zb_auto": 20}
    # v_half is squeezed into what it would not fit.
    assert peaks("--memory", "6GiB") == {"v_min": 6, "v_half": 6, "zb_auto": 6}


def test_what_does_not_allow_the_shape_says_why() -> None:
    data = compare("-r", "3", "-m", "5")
    reasons = {item["name"]: item["reason"] for item in data["left_out"]}
    assert "an even number of ranks" in reasons["chimera"]
    assert "at least 2·ranks microbatches" in reasons["dualpipev"]
    assert "dualpipe" not in names_of(data)
    assert "left out" in call("compare", "-r", "3", "-m", "5")


@pytest.mark.parametrize(
    ("key", "figure"),
    [
        ("makespan", lambda row: row["makespan"]),
        ("span", lambda row: row["span"]),
        ("bubble", lambda row: row["bubble"]),
        ("memory", lambda row: max(row["peak_memory"])),
        ("bound", lambda row: row["distance_to_bound"]),
        ("name", lambda row: row["name"]),
    ],
)
def test_sorting(key: str, figure) -> None:
    rows = compare("-r", "4", "-m", "8", "--sort", key)["schedules"]
    assert [figure(row) for row in rows] == sorted(map(figure, rows))


def test_nothing_beats_the_pareto_best() -> None:
    rows = compare("-r", "4", "-m", "8")["schedules"]
    points = [(row["makespan"], max(row["peak_memory"])) for row in rows]
    for row, (time, memory) in zip(rows, points, strict=True):
        beaten = any(t <= time and m <= memory and (t < time or m < memory) for t, m in points)
        assert row["pareto_best"] == (not beaten), row["name"]


def test_files_beside_the_library(tmp_path: Path) -> None:
    mine = str(build_schedule("gpipe", ranks=4, microbatches=8).save(tmp_path / "mine.csv"))
    lowered = build_schedule("zbv", ranks=4, microbatches=8)
    other = str(lower(lowered).save(tmp_path / "lowered.json"))
    data = compare("zbv", "1f1b", mine, other, "-r", "4", "-m", "8")
    assert sorted(names_of(data)) == sorted([mine, other, "1f1b", "zbv"])
    assert names_of(compare(mine)) == [mine]


def test_costs_per_stage_leave_out_other_numbers_of_stages(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text('{"forward": [1, 1, 1, 2], "input": 1, "weight": 1}')
    data = compare("-r", "4", "-m", "8", "--costs", str(path))
    assert "1f1b" in names_of(data)
    reasons = {item["name"]: item["reason"] for item in data["left_out"]}
    assert "costs are for 4 stages" in reasons["zbv"]


def test_a_shape_is_needed() -> None:
    assert "add -m MICROBATCHES" in call("compare", "-r", "4", status=2)
    assert "add -r RANKS and -m MICROBATCHES" in call("compare", "zbv", status=2)
