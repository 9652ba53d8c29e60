"""The verbs that need no simulation: what they print, and how they fail."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipeloom import __version__
from pipeloom.cli.main import VERBS, app
from pipeloom.ir.serialization import load_schedule
from pipeloom.passes.pipeline import lower
from pipeloom.schedules.registry import build_schedule, list_schedules


def pipeloom(*arguments: str | Path, status: int = 0) -> tuple[str, str]:
    """Run the command line; what it printed to stdout and to stderr."""
    result = CliRunner().invoke(app, list(map(str, arguments)), prog_name="pipeloom")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == status, result.output
    return result.stdout, result.stderr


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


# ── the command itself ───────────────────────────────────────────────────────────────────────────


def test_help_lists_the_verbs_in_the_order_of_the_table() -> None:
    out, _ = pipeloom("--help")
    lines = out.splitlines()
    listed = [line.split()[0] for line in lines[lines.index("Commands:") + 1 :]]
    assert listed == [verb for verb in VERBS if verb in listed]
    assert {"schedules", "show", "check", "passes"} <= set(listed)
    for verb in listed:
        assert VERBS[verb].summary in out


@pytest.mark.parametrize("verb", ["schedules", "show", "check", "passes"])
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_every_verb_explains_itself(verb: str, flag: str) -> None:
    out, _ = pipeloom(verb, flag)
    assert out.startswith(f"Usage: pipeloom {verb} [OPTIONS]")
    assert "--json" in out


def test_version() -> None:
    assert pipeloom("--version") == (f"pipeloom {__version__}\n", "")


def test_an_unknown_verb_suggests_one() -> None:
    _, err = pipeloom("shwo", status=2)
    assert "No such command 'shwo'. Did you mean 'show'?" in err


# ── schedules ────────────────────────────────────────────────────────────────────────────────────


def test_schedules_lists_the_whole_library() -> None:
    out, _ = pipeloom("schedules")
    names = [line.partition(":")[0] for line in out.splitlines() if line and line[0] != " "]
    assert names == [entry.name for entry in list_schedules()]
    assert "ZBVZeroBubble" in out


def test_one_schedule_by_any_of_its_names() -> None:
    out, _ = pipeloom("schedules", "Interleaved1F1B")
    assert out.startswith("interleaved_1f1b: ")
    assert "  shape    microbatches divisible by" in out
    assert "  options  group_size" in out


def test_schedules_as_json() -> None:
    entries = json.loads(pipeloom("schedules", "--json")[0])
    assert [entry["name"] for entry in entries] == [entry.name for entry in list_schedules()]
    (zbv,) = json.loads(pipeloom("schedules", "zbv", "--json")[0])
    assert zbv["default_chunks"] == 2
    assert "ZBVZeroBubble" in zbv["aliases"]


# ── show ─────────────────────────────────────────────────────────────────────────────────────────


def test_show_saves_what_loads_again() -> None:
    schedule = build_schedule("zbv", ranks=2, microbatches=4)
    out, _ = pipeloom("show", "zbv", "-r", "2", "-m", "4", "--save", "a.csv", "--save", "a.json")
    assert out == "wrote a.csv\nwrote a.json\n"
    assert load_schedule("a.csv") == schedule
    assert load_schedule("a.json") == schedule
    assert Path("a.csv").read_text().splitlines()[0].startswith("0F0,0F1,0F2,3F0,3I0,3W0")


def test_show_json_is_the_file() -> None:
    out, _ = pipeloom("show", "1f1b", "-r", "2", "-m", "3", "--json")
    Path("a.json").write_text(out)
    assert load_schedule("a.json") == build_schedule("1f1b", ranks=2, microbatches=3)


def test_lower_adds_the_messages() -> None:
    pipeloom("show", "1f1b", "-r", "2", "-m", "3", "--lower", "--save", "a.csv")
    assert load_schedule("a.csv") == lower(build_schedule("1f1b", ranks=2, microbatches=3))


def test_chunks_and_options_reach_the_schedule() -> None:
    arguments = ("-r", "2", "-m", "6", "--chunks", "3", "--option", "group_size=3")
    pipeloom("show", "interleaved_1f1b", *arguments, "--save", "a.csv")
    assert load_schedule("a.csv") == build_schedule(
        "interleaved_1f1b", ranks=2, microbatches=6, chunks=3, group_size=3
    )


def test_a_csv_that_cannot_say_its_topology_warns() -> None:
    _, err = pipeloom("show", "chimera", "-r", "2", "-m", "4", "--save", "two.csv")
    assert "warning: two.csv: a CSV does not say the topology" in err
    pipeloom("check", "two.csv", status=1)
    out, _ = pipeloom("check", "two.csv", "--topology", "bidirectional")
    assert out.startswith("two verifies")


# ── check ────────────────────────────────────────────────────────────────────────────────────────

WRONG_REPORT = """\
wrong does not verify: 1 violation

1. BACKWARD_BEFORE_FORWARD at rank 1, position 0: 1B0
   why:  it needs the output of stage 1 for microbatch 0, which 1F0 makes only later, at position 1
   hint: move 1F0 before 1B0
     rank 1   1B0 ← here  1F0 ←

checked: soundness, completeness, order, channels, sharding, deadlock
"""


def test_a_right_schedule_passes() -> None:
    out, _ = pipeloom("check", "zbv", "-r", "4", "-m", "8")
    assert out.startswith("zbv verifies\n")


def test_a_wrong_schedule_fails_with_the_report() -> None:
    Path("wrong.csv").write_text("0F0,0B0\n1B0,1F0\n")
    assert pipeloom("check", "wrong.csv", status=1) == (WRONG_REPORT, "")


def test_the_report_as_json() -> None:
    Path("wrong.csv").write_text("0F0,0B0\n1B0,1F0\n")
    report = json.loads(pipeloom("check", "wrong.csv", "--json", status=1)[0])
    assert report["ok"] is False
    assert report["violations"][0]["code"] == "BACKWARD_BEFORE_FORWARD"


CROSSING = (
    "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
    "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n"
)


def test_the_communication_model_decides() -> None:
    Path("crossing.csv").write_text(CROSSING)
    pipeloom("check", "crossing.csv")
    pipeloom("check", "crossing.csv", "--sends", "buffered", "--channel", "all")
    for model in (("rendezvous", "all"), ("rendezvous", "pair"), ("blocking", "edge")):
        out, _ = pipeloom(
            "check", "crossing.csv", "--sends", model[0], "--channel", model[1], status=1
        )
        assert "DEADLOCK" in out
        assert "which waits" in out


def test_check_lowers_on_demand() -> None:
    out, _ = pipeloom("check", "zbv", "-r", "4", "-m", "8", "--lower", "--sends", "blocking")
    assert out.startswith("zbv verifies")


def test_a_memory_limit_needs_costs() -> None:
    _, err = pipeloom("check", "gpipe", "-r", "2", "-m", "4", "--memory", "2", status=2)
    assert err == "--memory needs --costs FILE, which says what actions hold\n"


def test_a_memory_limit_is_checked_against_costs() -> None:
    Path("costs.json").write_text(
        '{"forward": 1, "input": 1, "weight": 1, "activation": 2, "memory_unit": "GiB"}'
    )
    arguments = ("check", "gpipe", "-r", "2", "-m", "4", "--costs", "costs.json", "--memory")
    assert "checked: soundness" in pipeloom(*arguments, "8GiB")[0]
    out, _ = pipeloom(*arguments, "7GiB", status=1)
    assert "MEMORY_LIMIT at rank 0" in out
    _, err = pipeloom(*arguments, "seven", status=2)
    assert "'seven' is no amount of memory" in err


# ── passes ───────────────────────────────────────────────────────────────────────────────────────

SHOWN = """\
split_backward: +4 I, +4 W, -4 B
  rank 0   0F0  0F1  -0B0  +0I0  +0W0  -0B1  +0I1  +0W1
  rank 1   1F0  -1B0  +1I0  +1W0  1F1  -1B1  +1I1  +1W1
insert_communication: +2 SEND_F, +2 RECV_B, +2 RECV_F, +2 SEND_B
  rank 0   0F0  +0SEND_F0  0F1  +0SEND_F1  +0RECV_B0  0I0  0W0  +0RECV_B1  0I1  0W1
  rank 1   +1RECV_F0  1F0  +1RECV_F1  1I0  +1SEND_B0  1W0  1F1  1I1  +1SEND_B1  1W1
"""


def test_each_pass_is_shown() -> None:
    run = ("--run", "split_backward,insert_communication", "--show-each")
    assert pipeloom("passes", "1f1b", "-r", "2", "-m", "2", *run)[0] == SHOWN


def test_without_show_each_the_counts_and_the_result() -> None:
    out, _ = pipeloom("passes", "1f1b", "-r", "2", "-m", "2")
    first, headline, *_ = out.splitlines()
    assert first == "insert_communication: +2 SEND_F, +2 RECV_B, +2 RECV_F, +2 SEND_B"
    assert headline == "# 1f1b · 2 ranks · 2 stages · 2 microbatches"


def test_passes_as_json() -> None:
    arguments = ("passes", "1f1b", "-r", "2", "-m", "2", "--json")
    (change,) = json.loads(pipeloom(*arguments)[0])
    assert change == {
        "pass": "insert_communication",
        "counts": {"+SEND_F": 2, "+RECV_B": 2, "+RECV_F": 2, "+SEND_B": 2},
        "actions": 16,
    }
    (change,) = json.loads(pipeloom(*arguments, "--show-each")[0])
    assert change["ranks"][0]["added"] == ["0SEND_F0", "0SEND_F1", "0RECV_B0", "0RECV_B1"]


def test_the_result_is_saved() -> None:
    out, _ = pipeloom("passes", "1f1b", "-r", "2", "-m", "2", "--save", "program.csv")
    assert out.endswith("wrote program.csv\n")
    assert load_schedule("program.csv") == lower(build_schedule("1f1b", ranks=2, microbatches=2))


def test_a_pass_with_a_limit_in_memory_takes_costs() -> None:
    Path("costs.json").write_text('{"forward": 1, "input": 1, "weight": 1, "weights": 4}')
    arguments = ("passes", "interleaved_1f1b", "-r", "2", "-m", "2", "--costs", "costs.json")
    out, _ = pipeloom(*arguments, "--run", "unshard_parameters:memory=2")
    assert out.startswith("unshard_parameters:memory=2: +6 UNSHARD")
    _, err = pipeloom(*arguments, "--run", "unshard_parameters:memory=1", status=2)
    assert "allow at least memory=" in err


def test_without_a_schedule_the_passes_are_listed() -> None:
    out, _ = pipeloom("passes")
    assert "\nunshard_parameters: Gather and release" in out
    assert "  lookahead: int = 1\n" in out
    listed = json.loads(pipeloom("passes", "--json")[0])
    assert listed[0]["name"] == "insert_communication"


def test_a_wrong_program_is_not_passed_on() -> None:
    Path("wrong.csv").write_text("0F0,0B0\n1B0,1F0\n")
    _, err = pipeloom("passes", "wrong.csv", status=2)
    assert "BACKWARD_BEFORE_FORWARD" in err
    assert err.endswith("found by the pass pipeline: what goes in\n")


# ── mistakes ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("show zbw -r 2 -m 3", "there is no schedule 'zbw'; did you mean"),
        ("show 1f1b -r 2", "1f1b needs a shape; add -m MICROBATCHES\n"),
        ("show 1f1b", "add -r RANKS and -m MICROBATCHES\n"),
        ("show interleaved_1f1b -r 4 -m 9", ": 8 or 10, not 9\n"),
        ("show 1f1b -r 2 -m 2 --option x", "--option x: write it as key=value\n"),
        ("show 1f1b -r 2 -m 2 --option x=1", "1f1b has no option 'x'; it has none\n"),
        ("show 1f1b -r 2 -m 2 --option x=1 --option x=2", "--option x is given twice\n"),
        ("show gpipe -r 2 -m 2 --option chunks=2", "chunks is no option; write --chunks CHUNKS\n"),
        ("show gpipe -r 2 -m 2 --option ranks=2", "ranks is no option; write -r RANKS\n"),
        ("show zb_auto -r 2 -m 2 --option costs=3", "costs must be a cost model or a mapping"),
        ("show zb_auto -r 2 -m 2 --option memory_limit=[1]", "a number or a text, not [1]"),
        ("show gpipe -r 2 -m 9000000000", "would run 18000000000 forwards"),
        ("show 1f1b -r 2 -m 2 --topology chain", "--topology is for CSV files"),
        ("show 1f1b -r 0 -m 2", "'-r' / '--ranks'"),
        ("show 1f1b -r 2 -m 2 --ranks-as heaps", "'rows', 'columns'"),
        ("show nothing.csv", "nothing.csv cannot be read: No such file or directory\n"),
        (
            "show 1f1b -r 2 -m 2 --save no/a.csv",
            "no/a.csv cannot be written: there is no folder no",
        ),
        ("show 1f1b -r 2 -m 2 --save a.bmp", "a.bmp: no picture has this suffix"),
        ("check 1f1b -r 2 -m 2 --sends eager", "'blocking'"),
        ("passes 1f1b -r 2 -m 2 --run lower", "no pass is named 'lower'; known: insert_"),
        ("passes 1f1b -r 2 -m 2 --run place_receives", "run insert_communication before"),
    ],
)
def test_mistakes_are_explained(arguments: str, message: str) -> None:
    out, err = pipeloom(*arguments.split(), status=2)
    assert out == ""
    assert message in err
    assert "Traceback" not in err


def test_every_bad_cell_is_reported() -> None:
    Path("bad.csv").write_text("0F0,0B0,0F0xyz\n1F0,2Q3,1B0\n")
    _, err = pipeloom("check", "bad.csv", status=2)
    assert err.splitlines()[0] == "bad.csv is not a schedule, 2 bad cells:"
    assert "row 1, column 3: '0F0xyz': 'xyz' after the action, at character 4" in err
    assert "row 2, column 2: '2Q3'" in err


def test_a_file_knows_its_own_shape() -> None:
    Path("a.csv").write_text("0F0,0B0\n")
    _, err = pipeloom("show", "a.csv", "-r", "1", "-m", "1", status=2)
    assert err == "a.csv is a file and says its own shape; leave out -r, -m\n"


def test_a_file_named_like_a_schedule_does_not_hide_it() -> None:
    Path("zbv").write_text("nonsense")
    assert "zbv" in pipeloom("show", "zbv", "-r", "2", "-m", "2")[0]
    _, err = pipeloom("show", "./zbv", status=2)
    assert "a schedule file ends in .csv or .json" in err
