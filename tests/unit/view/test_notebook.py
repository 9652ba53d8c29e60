"""What notebooks show."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pipeloom
from support.hand_made_timelines import make_small_timeline


def test_a_timeline_is_an_inline_picture() -> None:
    html = make_small_timeline()._repr_html_()
    assert html.startswith("<div")
    root = ET.fromstring(html)
    assert root[0].tag.endswith("svg")
    assert "0B1: 7 to 9" in html


def test_a_schedule_is_rows_of_names() -> None:
    html = pipeloom.build_schedule("zbv", ranks=2, microbatches=4)._repr_html_()
    assert html.index("rank 0") < html.index("rank 1")
    for action in pipeloom.build_schedule("zbv", ranks=2, microbatches=4).all_actions():
        assert f">{action}</span>" in html
    assert "backward of weights" in html
    assert "full backward" not in html


def test_a_long_schedule_says_what_it_leaves_out() -> None:
    html = pipeloom.build_schedule("gpipe", ranks=20, microbatches=100)._repr_html_()
    assert "… and 4 more ranks" in html
    assert "… 80 more" in html
    assert html.count("<tr>") == 16


def test_names_are_escaped() -> None:
    schedule = pipeloom.build_schedule("1f1b", ranks=2, microbatches=2).renamed("<b>&")
    assert "&lt;b&gt;&amp;" in schedule._repr_html_()
    html = make_small_timeline(name="</svg><script>")._repr_html_()
    assert "<script>" not in html
