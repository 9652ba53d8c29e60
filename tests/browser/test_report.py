"""What a person does with a report."""

from __future__ import annotations

from typing import Any

import pytest

import pipeloom
from support.hand_made_timelines import make_small_timeline

pytestmark = pytest.mark.browser

COSTS = pipeloom.UniformCosts(forward=1, input=1, weight=1, latency=0.1)


def simulate(name: str, ranks: int, microbatches: int, *, lower: bool = False) -> pipeloom.Timeline:
    schedule = pipeloom.build_schedule(name, ranks=ranks, microbatches=microbatches)
    return pipeloom.simulate(pipeloom.lower(schedule) if lower else schedule, costs=COSTS)


# ── seeing ───────────────────────────────────────────────────────────────────────────────────────


def test_boxes_have_the_colours_of_their_kinds(open_report: Any) -> None:
    report = open_report(make_small_timeline())
    x, y = report.locate("0F0")
    assert report.pixel(x - 20, y - 12) == "#0072B2"
    assert report.page.title() == "small"
    legend = report.page.locator("#legend").inner_text()
    for word in ("forward", "full backward", "warm-up", "waiting", "drain"):
        assert word in legend


def test_hovering_an_action_tells_its_times_and_who_waits(open_report: Any) -> None:
    report = open_report(make_small_timeline(scale=0.001, time_unit="s"))
    said = report.hover("0B0")
    assert "full backward, stage 0, microbatch 0, rank 0" in said
    assert "4 ms to 6 ms" in said
    assert "0F0 on rank 0" in said
    assert "1B0 on rank 1 (last)" in said
    assert "slack\n1 ms" in said
    said = report.hover("1B0")
    assert "none: on the critical path" in said
    assert "awaited by\n0B0 on rank 0" in said


def test_hovering_idle_time_tells_its_cause(open_report: Any) -> None:
    report = open_report(make_small_timeline())
    (left, y), (right, _) = report.locate("0F1"), report.locate("0B0")
    report.page.mouse.move((left + right) / 2 - 20, y)
    report.settle()
    said = report.tooltip()
    assert "idle: waiting" in said
    assert "2 to 4" in said
    assert "1B0 on rank 1, which ended at 4" in said


def test_hovering_memory_tells_who_is_alive(open_report: Any) -> None:
    report = open_report(make_small_timeline())
    x, y = report.locate("0F1")
    report.page.mouse.move(x, y + 45)
    report.settle()
    said = report.tooltip()
    assert "memory of rank 0" in said
    assert "holds\n2" in said
    assert "activation of stage 0\nmicrobatch 0–1" in said


def test_the_ranked_causes_are_in_the_panel(open_report: Any) -> None:
    report = open_report(make_small_timeline())
    totals = report.page.locator("table.causes").first.locator("tbody tr").all_inner_texts()
    assert [row.split("\t")[0].strip() for row in totals] == ["waiting", "drain", "warm-up"]
    assert "3\t50.0 %" in totals[0]
    report.page.locator("table.causes").nth(1).locator("button").first.click()
    report.settle()
    assert report.selected() == "1B0"


def test_numbers_are_written_as_in_the_other_pictures(open_report: Any) -> None:
    from pipeloom.view.quantities import format_memory, format_number, format_time

    report = open_report(make_small_timeline())
    numbers = [0, 1, 25.5, 0.1 + 0.2, 33, 1234567, 0.001234, 999.96, 12.3456, -4.25, 8e8]
    said = report.page.evaluate(
        """async (numbers) => {
             const { formatNumber, formatTime, formatMemory } = await import("explorer/format.js");
             const seconds = { secondsPerUnit: 1, timeUnit: "s", memoryUnit: "B" };
             return [numbers.map(formatNumber), numbers.map((n) => formatTime(n, seconds)),
                     numbers.map((n) => formatMemory(n, seconds))];
           }""",
        numbers,
    )
    assert said[0] == [format_number(n) for n in numbers]
    assert said[1] == [format_time(n, "s") for n in numbers]
    assert said[2] == [format_memory(n, "B") for n in numbers]


# ── moving ───────────────────────────────────────────────────────────────────────────────────────


def test_the_wheel_zooms_at_the_pointer(open_report: Any) -> None:
    report = open_report(make_small_timeline())
    x, y = report.locate("1B0")
    report.page.mouse.move(x, y)
    report.page.mouse.wheel(0, -600)
    report.settle()
    start, stop = report.window()
    assert stop - start < 5
    assert report.locate("1B0")[0] == pytest.approx(x, abs=2)
    report.page.mouse.wheel(0, 5000)
    report.settle()
    assert report.window() == (0, 9)


def test_dragging_pans(open_report: Any) -> None:
    report = open_report(simulate("1f1b", 4, 8))
    report.press("w", "w", "w")
    x, y = report.locate("2B3")
    report.page.mouse.move(x, y)
    report.page.mouse.down()
    report.page.mouse.move(x - 60, y, steps=4)
    report.page.mouse.up()
    report.settle()
    assert report.locate("2B3")[0] == pytest.approx(x - 60, abs=3)
    assert report.selected() == "", "a drag is no click"


def test_keys_move_zoom_and_fit(open_report: Any) -> None:
    report = open_report(make_small_timeline())
    report.press("w", "w")
    first = report.window()
    assert first[1] - first[0] == pytest.approx(9 / 1.4**2)
    report.press("d")
    assert report.window()[0] > first[0]
    report.press("a")
    assert report.window()[0] == pytest.approx(first[0])
    report.press("0")
    assert report.window() == (0, 9)


def test_two_fingers_zoom(open_report: Any) -> None:
    report = open_report(make_small_timeline(), options={"has_touch": True})
    x, y = report.locate("1B0")
    session = report.page.context.new_cdp_session(report.page)

    def touch(kind: str, *places: tuple[float, float]) -> None:
        points = [{"x": px, "y": py, "id": i} for i, (px, py) in enumerate(places)]
        session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    touch("touchStart", (x - 30, y), (x + 30, y))
    for spread in (50, 80, 120):
        touch("touchMove", (x - spread, y), (x + spread, y))
    touch("touchEnd")
    report.settle()
    start, stop = report.window()
    assert stop - start == pytest.approx(9 / 4, rel=0.15)
    assert report.locate("1B0")[0] == pytest.approx(x, abs=8)


def test_many_ranks_scroll(open_report: Any) -> None:
    report = open_report(simulate("1f1b", 48, 48))
    report.press(">", ">", ">", ">")
    canvas = report.page.locator("#canvas").bounding_box()
    report.page.mouse.move(500, 300)
    report.page.mouse.wheel(0, 200)
    report.settle()
    assert report.page.evaluate("pipeloomReport.view.camera.scroll") == 200
    assert report.locate("16F0")[1] > canvas["y"]


# ── following ────────────────────────────────────────────────────────────────────────────────────


def test_following_what_an_action_waits_for(open_report: Any) -> None:
    report = open_report(simulate("zbv", 4, 8, lower=True))
    report.click("3F0")
    assert report.selected() == "3F0"
    links = report.page.locator("#panel .links").first.locator("button")
    assert "comes last" in links.first.inner_text()
    links.first.click()
    report.settle()
    assert report.selected() == "3RECV_F0"
    report.press("Enter")
    assert report.selected() == "2SEND_F0"
    report.press("Enter", "Enter")
    assert report.selected() == "2RECV_F0"
    report.press("Backspace")
    assert report.selected() == "2F0"
    assert "2F0, forward, stage 2" in report.page.locator("#announcer").inner_text()


def test_arrows_are_drawn_to_both_sides(open_report: Any) -> None:
    report = open_report(make_small_timeline())
    before = report.page.screenshot()
    report.hover("1B0")
    report.page.evaluate("document.getElementById('tooltip').hidden = true")
    assert report.page.screenshot() != before
    ends = report.page.evaluate(
        """() => {
             const { timeline, span } = pipeloomReport.view.hovered;
             const name = (i) => timeline.text(i);
             return [[...timeline.needs(span)].map(name), [...timeline.dependents(span)].map(name)];
           }"""
    )
    assert ends == [["1F0"], ["0B0"]]


def test_walking_with_the_arrow_keys(open_report: Any) -> None:
    report = open_report(make_small_timeline())
    report.press("ArrowRight")
    assert report.selected() == "0F0"
    report.press("ArrowRight", "ArrowRight")
    assert report.selected() == "0B0"
    report.press("ArrowDown")
    assert report.selected() in ("1F1", "1B1")
    report.press("ArrowLeft")
    report.press("ArrowUp")
    assert report.selected().startswith("0")
    report.press("Escape")
    assert report.selected() == ""


def test_the_critical_path_stands_out(open_report: Any) -> None:
    report = open_report(make_small_timeline())
    x, y = report.locate("0F1")
    assert report.pixel(x - 20, y - 12) == "#0072B2"
    report.press("c")
    assert report.pixel(x - 20, y - 12) != "#0072B2", "0F1 has slack and steps back"
    x, y = report.locate("1F1")
    assert report.pixel(x - 20, y - 12) == "#0072B2"
    pressed = report.page.locator("[data-switch=critical]").get_attribute("aria-pressed")
    assert pressed == "true"


def test_idle_time_can_be_left_blank(open_report: Any) -> None:
    report = open_report(make_small_timeline())
    x, y = report.locate("1B1")
    drain = (x + 200, y)
    lane = (x + 200, y - 16)
    report.page.mouse.move(5, 5)
    assert report.pixel(*drain) != report.pixel(*lane)
    report.page.get_by_role("button", name="Idle causes").click()
    report.page.mouse.move(5, 5)
    report.settle()
    assert report.pixel(*drain) == report.pixel(*lane)


# ── searching ────────────────────────────────────────────────────────────────────────────────────


def test_searching(open_report: Any) -> None:
    report = open_report(simulate("1f1b", 4, 8))
    counts = {
        "2F3": 1, "F3": 4, "B": 32, "rank 1": 16, "stage 2 F": 8, "2b": 8, "microbatch 7": 8,
        "rank 0 microbatch 1": 2, "9F9": 0, "zebra": 0,
    }  # fmt: skip
    for query, count in counts.items():
        report.press("/")
        report.page.keyboard.type(query)
        report.settle()
        said = report.page.locator("#matches").inner_text()
        assert said == (f"{count} found" if count else "none found"), query
        report.press("Enter")
        if count:
            assert report.selected()
            assert report.page.locator("#matches").inner_text() == f"1 of {count}"
        report.press("Escape")
        assert report.page.locator("#search").input_value() == ""


def test_searching_goes_to_what_is_out_of_view(open_report: Any) -> None:
    report = open_report(simulate("interleaved_1f1b", 8, 64))
    report.page.fill("#search", "9B63")
    report.press("Enter")
    assert report.selected() == "9B63"
    report.locate("9B63")
    start, stop = report.window()
    assert 0 < stop - start < 150


# ── comparing ────────────────────────────────────────────────────────────────────────────────────


def test_predicted_under_measured_with_the_difference_per_action(open_report: Any) -> None:
    predicted = make_small_timeline(time_unit="s", scale=0.001)
    measured = make_small_timeline(source="measured", time_unit="ms", scale=1.5)
    report = open_report(predicted, measured)
    above, below = report.locate("0B1", 0), report.locate("0B1", 1)
    assert below[1] > above[1]
    assert below[0] > above[0]
    said = report.hover("0B0", 1)
    assert "6 ms to 9 ms" in said
    assert "against simulated\n2 ms; +1 ms (+50 %)" in said
    rows = report.page.locator("table.changes tbody tr").all_inner_texts()
    assert len(rows) == 8
    assert "+50 %" in rows[0]
    report.press("x")
    x, y = report.locate("0B0", 1)
    red, _, blue = (int(report.pixel(x - 20, y - 6)[i : i + 2], 16) for i in (1, 3, 5))
    assert red > blue + 60, "slower is warm"
    x, y = report.locate("0F0", 0)
    assert report.pixel(x - 10, y - 8) == "#0072B2", "the baseline keeps its colours"


def test_two_schedules_on_one_axis_or_one_length(open_report: Any) -> None:
    report = open_report(simulate("1f1b", 4, 8), simulate("zbv", 4, 8))

    def right_end(action: str, timeline: int) -> float:
        box = report.page.evaluate(f"pipeloomReport.locate({action!r}, {timeline})")
        return float(box["x"] + box["width"] / 2)

    last = right_end("0B7", 0)
    assert right_end("3W7", 1) < last - 100
    report.press("r")
    assert right_end("3W7", 1) == pytest.approx(last, abs=3)


# ── themes, links, tables ────────────────────────────────────────────────────────────────────────


def test_switching_the_theme(open_report: Any) -> None:
    report = open_report(make_small_timeline())
    background = "getComputedStyle(document.documentElement).backgroundColor"
    assert report.page.evaluate(background) == "rgb(255, 255, 255)"
    x, y = report.locate("0F0")
    empty = (x, y + 330)
    assert report.pixel(*empty) == "#FFFFFF"
    report.press("l")
    assert report.page.evaluate(background) == "rgb(18, 22, 28)"
    assert report.pixel(*empty) == "#12161C"
    assert report.pixel(x - 20, y - 12) == "#0072B2"


def test_the_system_chooses_the_theme(open_report: Any) -> None:
    report = open_report(make_small_timeline(), options={"color_scheme": "dark"})
    assert report.page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_a_link_restores_the_view(open_report: Any) -> None:
    report = open_report(simulate("zbv", 4, 8, lower=True))
    report.press("w", "w", "d", "c", "m", "l")
    report.page.fill("#search", "I3")
    report.click("4I3")
    report.page.evaluate("pipeloomReport.view.remember()")
    view = report.window()
    link = report.page.evaluate("location.hash")
    assert link.startswith("#t=")
    report.page.mouse.move(5, 5)
    report.settle()
    shot = report.page.evaluate("document.getElementById('canvas').toDataURL()")

    report.open(link)
    assert report.window() == pytest.approx(view)
    assert report.selected() == "4I3"
    assert report.page.locator("#search").input_value() == "I3"
    assert report.page.evaluate("document.documentElement.dataset.theme") == "dark"
    options = report.page.evaluate(
        "(({critical, messages}) => [critical, messages])(pipeloomReport.view.options)"
    )
    assert options == [True, False]
    again = report.page.evaluate("document.getElementById('canvas').toDataURL()")
    assert again == shot, "the same picture, pixel for pixel"


@pytest.mark.parametrize("link", ["#t=9,1", "#sel=7.99999", "#t=nan,x&show=zz&theme=pink&y=-5"])
def test_a_broken_link_shows_everything(open_report: Any, link: str) -> None:
    report = open_report(make_small_timeline())
    report.open(link)
    assert report.window() == (0, 9)
    assert report.selected() == ""


def test_the_table_has_the_same_data(open_report: Any) -> None:
    report = open_report(make_small_timeline())
    report.press("t")
    table = report.page.locator("#table table")
    rows = [row.split("\t") for row in table.locator("tbody tr").all_inner_texts()]
    assert len(rows) == 8
    assert rows[3] == ["1B0", "1", "compute", "2", "4", "2", "0", "1F0", "0B0"]
    assert table.locator("caption").count() == 1
    assert table.locator("thead th[scope=col]").count() == 9
    report.page.locator("#table [name=filter]").fill("rank 0 B")
    assert table.locator("tbody tr").count() == 2
    report.page.locator("#table [name=what]").select_option("idle")
    rows = [row.split("\t") for row in table.locator("tbody tr").all_inner_texts()]
    assert rows[0] == ["0", "waiting", "1B0", "2", "4", "2", "33.3 %"]
    report.page.locator("#table [name=what]").select_option("memory")
    assert "activation 0F0 (1)" in table.inner_text()
    report.page.locator("#table").get_by_role("button", name="Close").click()
    assert not report.page.locator("#table").is_visible()


def test_a_long_table_has_pages(open_report: Any) -> None:
    report = open_report(simulate("1f1b", 4, 40))
    report.press("t")
    assert report.page.locator("#table output").inner_text() == "320 rows, page 1 of 4"
    report.page.get_by_role("button", name="Next page").click()
    assert report.page.locator("#table output").inner_text() == "320 rows, page 2 of 4"


def test_help_lists_the_keys(open_report: Any) -> None:
    report = open_report(make_small_timeline())
    report.press("?")
    assert "critical path" in report.page.locator("#help").inner_text()


def test_names_are_shown_as_they_are(open_report: Any) -> None:
    name = '</script><img src=x onerror="document.title=1">'
    report = open_report(make_small_timeline(name=name))
    assert report.page.locator("#title").inner_text() == name
    assert report.page.locator("img").count() == 0


def test_every_button_has_a_name(open_report: Any) -> None:
    report = open_report(simulate("zbv", 4, 8, lower=True), simulate("1f1b", 4, 8))
    for button in report.page.locator("button").all():
        assert (button.get_attribute("aria-label") or button.inner_text()).strip()


def test_an_empty_timeline_opens(open_report: Any) -> None:
    report = open_report(pipeloom.Timeline(pipeloom.make_schedule([[], []]), ()))
    report.press("ArrowRight", "w", "c", "t", "Escape")
    assert "No rank is ever idle" in report.page.locator("#panel").inner_text()


# ── large ────────────────────────────────────────────────────────────────────────────────────────


def test_a_dense_lane_shows_true_shares(open_report: Any) -> None:
    """In the steady state of 1f1b a third of the height is F and the rest is B."""
    schedule = pipeloom.build_schedule("1f1b", ranks=2, microbatches=3000)
    report = open_report(pipeloom.simulate(schedule))
    x, y = report.locate("1F1500")
    lane = report.page.evaluate(
        "pipeloomReport.view.layout.lanes.find((l) => l.type === 'compute' && l.rank === 1).height"
    )
    colours = [report.pixel(x, y - lane / 2 + i + 0.5) for i in range(1, int(lane) - 1)]
    assert set(colours) == {"#0072B2", "#C85802"}
    assert colours.count("#0072B2") == pytest.approx(lane / 3, abs=1.5)
    report.hover("1F1500")
    report.press("c")
    report.press("c", "w", "w", "w", "w", "w", "w", "w", "w", "w", "w", "w", "w")
    assert report.hover("1F1500").startswith("F\n1F1500")


def test_a_large_program_opens_and_pans(open_report: Any) -> None:
    """No clock here: benchmarks/report.py measures; this sees that the picture stays whole."""
    report = open_report(simulate("interleaved_1f1b", 32, 64, lower=True))
    assert report.page.evaluate("pipeloomReport.view.axis.count") > 20_000
    report.press("m", "y")
    for _ in range(5):
        report.press("w", "d")
    report.page.fill("#search", "63F40")
    report.press("Enter")
    assert report.selected() == "63F40"
    assert "63F40" in report.hover("63F40")
