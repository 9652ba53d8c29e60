"""The report as a file: complete, offline, safe, and the same data as the timeline."""

from __future__ import annotations

import base64
import gzip
import json
import re
from array import array
from html.parser import HTMLParser
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import pipeloom
from pipeloom.errors import ScheduleError
from pipeloom.view.columns import encode_pictures
from pipeloom.view.html_report import make_report
from pipeloom.view.links import find_links
from pipeloom.view.picture import make_pictures
from support.hand_made_timelines import make_small_timeline

COSTS = pipeloom.UniformCosts(forward=1, input=1, weight=1, latency=0.1)
TYPECODES = {"f64": "d", "f32": "f", "u8": "B", "u16": "H", "i32": "i", "u32": "I"}


class Page(HTMLParser):
    """The elements of a page, and the texts of its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.title = ""
        self._open = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open = tag
        if tag == "script":
            self.scripts.append((dict(attrs), ""))

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        if self._open == "script":
            attributes, text = self.scripts[-1]
            self.scripts[-1] = (attributes, text + data)
        elif self._open == "title":
            self.title += data

    def script(self, name: str) -> str:
        (found,) = (text for attributes, text in self.scripts if attributes.get("id") == name)
        return found


def read_columns(text: str) -> tuple[dict[str, Any], list[dict[str, list[Any]]]]:
    """The header, and every timeline's columns, read as the page reads them."""
    page = Page(text)
    header = json.loads(page.script("header-data"))
    block = gzip.decompress(base64.b64decode(page.script("column-data")))
    columns = []
    for timeline in header["timelines"]:
        read = {}
        for name, (kind, offset, length) in timeline["columns"].items():
            numbers = array(TYPECODES[kind])
            assert offset % 8 == 0
            numbers.frombytes(block[offset : offset + length * numbers.itemsize])
            assert len(numbers) == length
            read[name] = list(numbers)
        columns.append(read)
    return header, columns


def test_the_columns_are_the_timeline() -> None:
    schedule = pipeloom.lower(pipeloom.build_schedule("zbv", ranks=4, microbatches=8))
    timeline = pipeloom.simulate(schedule, costs=COSTS)
    header, (columns,) = read_columns(make_report(timeline))
    about = header["timelines"][0]
    kinds = [kind["name"] for kind in header["kinds"]]
    links = find_links(timeline)
    for index, span in enumerate(timeline.spans):
        assert columns["start"][index] == span.start
        assert columns["end"][index] == span.end
        assert about["rows"][columns["row"][index]][:2] == [span.rank, span.lane]
        text = f"{columns['stage'][index]}{kinds[columns['kind'][index]]}"
        assert f"{text}{columns['microbatch'][index]}" == str(span.action)
        low, high = columns["needsOffset"][index], columns["needsOffset"][index + 1]
        assert tuple(columns["needs"][low:high]) == links.of(index)
    assert timeline.figures is not None
    assert columns["slack"] == list(timeline.figures.slack)
    critical = {timeline.spans[index] for index in columns["critical"]}
    assert critical == set(timeline.critical_path)
    idle = sorted(timeline.idle_causes, key=lambda span: (span.rank, span.start))
    names = [cause["name"] for cause in header["causes"]]
    for index, span in enumerate(idle):
        assert columns["idleStart"][index] == span.start
        assert names[columns["idleCause"][index]] == span.cause
        awaited = columns["idleWaitsFor"][index]
        shown = None if awaited < 0 else timeline.spans[awaited].action
        assert shown == span.waits_for
    for curve, (low, high) in zip(timeline.memory, pairwise(columns["memoryOffset"]), strict=True):
        assert tuple(columns["memoryTime"][low:high]) == curve.times
        assert tuple(columns["memoryTotal"][low:high]) == curve.totals
    assert about["peaks"][0]["total"] == timeline.peak_memory[0]


def test_fused_actions_are_named_with_their_parts() -> None:
    schedule = pipeloom.build_schedule("dualpipev", ranks=2, microbatches=6)
    timeline = pipeloom.simulate(schedule, costs=COSTS)
    header, (columns,) = read_columns(make_report(timeline))
    fused = header["timelines"][0]["fused"]
    kinds = [kind["name"] for kind in header["kinds"]]
    seen = 0
    for index, span in enumerate(timeline.spans):
        if not span.action.parts:
            continue
        seen += 1
        entry = fused[columns["extra"][index]]
        assert entry["text"] == str(span.action)
        parts = [f"{stage}{kinds[kind]}{m}" for kind, stage, m in entry["parts"]]
        assert parts == [str(part) for part in span.action.parts]
    assert seen


def test_skip_connections_name_their_peer() -> None:
    topology = pipeloom.Topology.chain(3).with_edges((0, 2))
    rows = [["0F0"], ["1F0"], ["2F0"]]
    schedule = pipeloom.make_schedule(
        [[pipeloom.parse_action(a) for a in row] for row in rows], topology=topology
    )
    timeline = pipeloom.simulate(pipeloom.lower(schedule), costs=COSTS)
    _, (columns,) = read_columns(make_report(timeline))
    for index, span in enumerate(timeline.spans):
        peer = span.action.peer
        assert columns["extra"][index] == (-1 if peer is None else peer)


def test_predicted_under_measured_is_matched_action_by_action() -> None:
    predicted = make_small_timeline(time_unit="s", scale=0.001)
    measured = make_small_timeline(source="measured", time_unit="ms", scale=1.25)
    header, (_, columns) = read_columns(make_report([predicted, measured]))
    first, second = header["timelines"]
    assert first["baseline"] is None
    assert second["baseline"] == 0
    assert second["factor"] == 0.001
    assert second["relative"] is False
    assert columns["match"] == list(range(8))


def test_other_actions_are_not_matched_and_other_units_are_scaled() -> None:
    zb = pipeloom.simulate(pipeloom.build_schedule("zb_h1", ranks=2, microbatches=2), costs=COSTS)
    small = make_small_timeline(time_unit="s")
    header, _ = read_columns(make_report([small, zb]))
    other = header["timelines"][1]
    assert other["baseline"] is None
    assert other["relative"] is True
    assert other["factor"] * other["end"] == pytest.approx(9)


def test_all_idle_time_is_in_the_ranked_tables() -> None:
    schedule = pipeloom.build_schedule("interleaved_1f1b", ranks=8, microbatches=32)
    timeline = pipeloom.simulate(schedule, costs=COSTS)
    header, _ = read_columns(make_report(timeline))
    about = header["timelines"][0]
    total = sum(idle.end - idle.start for idle in timeline.idle_causes)
    assert sum(time for _, time, _ in about["causeTotals"]) == pytest.approx(total)
    assert sum(share for _, _, share in about["causeTotals"]) == pytest.approx(1)
    times = [entry[2] for entry in about["rankedCauses"]]
    assert times == sorted(times, reverse=True)
    assert about["numCauses"] >= len(times)


# ── the file ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "name",
    [
        "</script><script>alert(1)</script>",
        "<!--<script>",
        "&lt;b&gt; \"quoted\" 'name'",
        "%%DATA%% \\u003c {} $&",
        "名前 ✓ \u2028",
    ],
)
def test_no_name_can_break_out_of_the_page(name: str) -> None:
    plain = Page(make_report(make_small_timeline()))
    text = make_report(make_small_timeline(name=name), title=name)
    page = Page(text)
    assert [tag for tag, _ in page.tags] == [tag for tag, _ in plain.tags]
    assert page.title == name
    header, _ = read_columns(text)
    assert header["timelines"][0]["title"] == name
    assert header["title"] == name


def test_nothing_is_loaded_from_anywhere() -> None:
    text = make_report(make_small_timeline())
    page = Page(text)
    for tag, attributes in page.tags:
        assert tag not in ("link", "img", "iframe", "object", "embed")
        assert "src" not in attributes
        assert "href" not in attributes
    assert not re.search(r"""(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}""", text.split("column-data")[0])
    (policy,) = (
        attributes["content"]
        for tag, attributes in page.tags
        if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert "http" not in policy


def test_modules_import_what_is_there_and_fetch_nothing() -> None:
    page = Page(make_report(make_small_timeline()))
    (imports,) = (
        text for attributes, text in page.scripts if attributes.get("type") == "importmap"
    )
    modules = json.loads(imports)["imports"]
    assert set(modules) == {
        f"explorer/{file.name}"
        for file in (files("pipeloom.view") / "explorer").iterdir()
        if file.name.endswith(".js")
    }
    for name, url in modules.items():
        source = base64.b64decode(url.removeprefix("data:text/javascript;base64,")).decode()
        for wanted in re.findall(r'from "([^"]+)"', source):
            assert wanted in modules, f"{name} imports {wanted}"
        for word in ("fetch(", "XMLHttpRequest", "WebSocket", "innerHTML", "eval("):
            assert word not in source, f"{name} uses {word}"
        assert "//# sourceURL=" in source


def test_the_same_timelines_give_the_same_file() -> None:
    first = make_report([make_small_timeline()])
    assert first == make_report([make_small_timeline()])


def test_without_scripts_the_figures_are_there() -> None:
    text = make_report(make_small_timeline(name="a<b"))
    assert "<li>a&lt;b: makespan 9, bubble 33.3 %, idle 33.3 %, peak memory 2</li>" in text


def test_mistakes_are_errors() -> None:
    with pytest.raises(ScheduleError, match="auto, light, dark"):
        make_report(make_small_timeline(), theme="pink")
    with pytest.raises(ScheduleError, match="no timeline"):
        make_report([])


def test_an_empty_timeline_is_a_report(tmp_path: Path) -> None:
    timeline = pipeloom.Timeline(pipeloom.make_schedule([[], []]), ())
    path = timeline.save(tmp_path / "empty.html")
    header, (columns,) = read_columns(path.read_text())
    assert header["timelines"][0]["ranks"] == 2
    assert columns["start"] == []


def test_columns_are_small() -> None:
    """A file grows by numbers, not by objects: less than 20 bytes a span after compression."""
    schedule = pipeloom.lower(
        pipeloom.build_schedule("interleaved_1f1b", ranks=16, microbatches=64)
    )
    timeline = pipeloom.simulate(schedule, costs=COSTS)
    _, block = encode_pictures(make_pictures([timeline]))
    assert len(gzip.compress(block, 6)) < 20 * len(timeline.spans)
