"""The report as text, as JSON, and in an exception."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path

import pytest

from pipeloom.errors import VerificationError
from pipeloom.ir.action import Action, Kind
from pipeloom.ir.notation import parse_grid
from pipeloom.verify.report import MOST_PRINTED, MOST_PRINTED_PER_CODE
from pipeloom.verify.verifier import verify

ROOT = Path(__file__).parents[3]

BROKEN = parse_grid("rank 0  0F0 0F1 0F1 0B0 0B1 \n rank 1  1F0 1B0 1B1 1F1 1F2 1B2", name="broken")

BROKEN_TEXT = """\
broken does not verify: 4 violations

1. DUPLICATE_FORWARD at rank 0, position 2: 0F1
   why:  the output of stage 0 for microbatch 1 is made twice, first by 0F1 at rank 0, position 1
   hint: remove one of the two, or correct the microbatch if another one is missing
     rank 0   0F0  0F1 ←  0F1 ← here  0B0  0B1

2. MISSING_FORWARD at rank 0
   why:  stage 0 never runs the forward of microbatch 2
   hint: add 0F2 to rank 0

3. MISSING_BACKWARD at rank 0
   why:  stage 0 never runs the backward of microbatch 2
   hint: add 0B2, or 0I2 and 0W2, to rank 0

4. BACKWARD_BEFORE_FORWARD at rank 1, position 2: 1B1
   why:  it needs the output of stage 1 for microbatch 1, which 1F1 makes only later, at position 3
   hint: move 1F1 before 1B1
     rank 1   1F0  1B0  1B1 ← here  1F1 ←  1F2  1B2

checked: soundness, completeness, order, channels, sharding, deadlock"""


def test_the_text_of_a_report() -> None:
    assert str(verify(BROKEN)) == BROKEN_TEXT


def test_the_text_of_a_report_without_violations() -> None:
    text = str(verify(parse_grid("0F0 0SEND_F0 \n 1RECV_F0 1F0", name="fine"), channel="pair"))
    assert text == (
        "fine verifies\nchecked: soundness, completeness, order, channels, sharding, deadlock; "
        "sends=rendezvous, channel=pair"
    )


def test_a_report_as_json() -> None:
    report = verify(BROKEN)
    data = json.loads(json.dumps(report.to_json()))
    assert data["schedule"] == "broken"
    assert data["ok"] is False
    assert data["sends"] is None
    assert len(data["violations"]) == len(report.violations) == 4
    assert data["violations"][0] == {
        "code": "DUPLICATE_FORWARD",
        "rank": 0,
        "position": 2,
        "action": "0F1",
        "why": report.violations[0].why,
        "hint": report.violations[0].hint,
        "related": [{"rank": 0, "position": 1, "action": "0F1"}],
    }


def test_a_report_travels_between_processes() -> None:
    with pytest.raises(VerificationError) as caught:
        verify(BROKEN).raise_for_errors()
    error = pickle.loads(pickle.dumps(caught.value))
    assert str(error) == BROKEN_TEXT
    assert error.report == caught.value.report


def test_a_long_report_is_cut_in_print_but_not_in_the_data() -> None:
    rows = ["", ""]
    for m in range(40):
        rows[0] += f"0B{m} 0F{m} "
        rows[1] += f"1F{m} 1F{m} 1B{m} 1B{m} 1W{m} "
    report = verify(parse_grid("\n".join(rows)))
    assert sum(v.code == "BACKWARD_BEFORE_FORWARD" for v in report.violations) == 40
    assert sum(v.code == "DUPLICATE_FORWARD" for v in report.violations) == 40
    printed = re.findall(r"^\d+\. ([A-Z_]+)", str(report), re.MULTILINE)
    assert len(printed) <= MOST_PRINTED + len(report.codes)
    assert max(map(printed.count, printed)) == MOST_PRINTED_PER_CODE
    assert set(printed) == set(report.codes)
    assert f"and {len(report.violations) - len(printed)} more: " in str(report)


def test_positions_are_those_of_the_schedule_as_it_was_given() -> None:
    """Actions that make no sense take no part, and yet count."""
    right = parse_grid("0F0 0B0")
    row = (Action(Kind.F, 0), Action(Kind.F, 9, 0), Action(Kind.B, 0, 0), Action(Kind.F, 0, 0))
    report = verify(right.with_actions([row]))
    assert [(v.code, v.position) for v in report.violations] == [
        ("MALFORMED_ACTION", 0),
        ("UNKNOWN_STAGE", 1),
        ("BACKWARD_BEFORE_FORWARD", 2),
    ]
    assert report.violations[2].related[0].position == 3


def test_every_code_is_documented_with_an_example() -> None:
    sources = "".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "src/pipeloom/verify").glob("*.py")
    )
    codes = set(re.findall(r'"([A-Z]+(?:_[A-Z]+)+|DEADLOCK)"', sources))
    assert len(codes) > 30
    page = (ROOT / "docs/verifier.md").read_text(encoding="utf-8")
    sections = re.split(r"^#+ ", page, flags=re.MULTILINE)
    for code in sorted(codes):
        (section,) = [text for text in sections if f"`{code}`" in text.partition("\n")[0]]
        outcomes = [line for line in section.splitlines() if line.startswith(("(", "'"))]
        assert any(f"'{code}'" in line for line in outcomes), f"{code} has no example"
