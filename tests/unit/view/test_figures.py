"""SVG and PNG: the same layout, true to scale."""

from __future__ import annotations

import builtins
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import pipeloom
from pipeloom.errors import MissingExtraError, ScheduleError
from pipeloom.view.density import measure_density
from pipeloom.view.figure import LEFT, RIGHT, draw_figure, make_options
from pipeloom.view.html_report import make_report
from pipeloom.view.palette import STYLE_OF_CAUSE, STYLE_OF_KIND
from pipeloom.view.picture import make_picture
from pipeloom.view.scene import Line, Rect, Scene, Words, measure_text
from pipeloom.view.svg import draw_svg
from support.golden import check_golden
from support.hand_made_timelines import make_small_timeline

NAMESPACE = "{http://www.w3.org/2000/svg}"
COSTS = pipeloom.UniformCosts(forward=1, input=1, weight=1, latency=0.1)


def simulate(name: str, ranks: int, microbatches: int, *, lower: bool = False) -> pipeloom.Timeline:
    schedule = pipeloom.build_schedule(name, ranks=ranks, microbatches=microbatches)
    return pipeloom.simulate(pipeloom.lower(schedule) if lower else schedule, costs=COSTS)


def rectangles(scene: Scene, kind: str) -> list[Rect]:
    colour = STYLE_OF_KIND[pipeloom.Kind(kind)].colour
    return [s for s in scene.shapes if isinstance(s, Rect) and s.fill == colour and s.hint]


def words(scene: Scene) -> list[str]:
    return [shape.text for shape in scene.shapes if isinstance(shape, Words)]


# ── layout ───────────────────────────────────────────────────────────────────────────────────────


def test_boxes_are_where_their_times_are() -> None:
    scene = draw_figure([make_small_timeline()], make_options(width=64 + 104 + 900))
    assert (LEFT, RIGHT) == (64, 104)
    forwards = {r.hint.split(":")[0]: r for r in rectangles(scene, "F")}
    assert set(forwards) == {"0F0", "0F1", "1F0", "1F1"}
    for name, start in {"0F0": 0, "0F1": 1, "1F0": 1, "1F1": 4}.items():
        assert forwards[name].x == pytest.approx(64 + 100 * start)
        assert forwards[name].width == pytest.approx(100, abs=1)
    assert forwards["1F0"].y > forwards["0F0"].y
    assert forwards["1F0"].y == forwards["1F1"].y
    backwards = {r.hint.split(":")[0]: r for r in rectangles(scene, "B")}
    assert backwards["0B1"].x == pytest.approx(64 + 700)
    assert backwards["0B1"].width == pytest.approx(200, abs=1)


def test_idle_time_has_the_colour_of_its_cause() -> None:
    scene = draw_figure([make_small_timeline()], make_options(width=64 + 104 + 900))
    causes = {style.colour: name for name, style in STYLE_OF_CAUSE.items()}
    drawn = [
        (causes[s.fill], (s.x - 64) / 100, s.width / 100)
        for s in scene.shapes
        if isinstance(s, Rect) and s.fill in causes and not s.stroke
    ]
    assert drawn == [
        ("waiting", pytest.approx(2), pytest.approx(2)),
        ("waiting", pytest.approx(6), pytest.approx(1)),
        ("warm-up", pytest.approx(0), pytest.approx(1)),
        ("drain", pytest.approx(7), pytest.approx(2)),
    ]
    blank = draw_figure([make_small_timeline()], make_options(causes=False))
    assert not [s for s in blank.shapes if isinstance(s, Rect) and s.fill in causes]


def test_two_timelines_share_one_scale() -> None:
    slow = make_small_timeline(name="slow", scale=2.0)
    scene = draw_figure([make_small_timeline(), slow], make_options())
    quick_box, slow_box = (r for r in rectangles(scene, "F") if r.hint.startswith("0F0"))
    assert slow_box.width == pytest.approx(2 * quick_box.width, abs=1)
    assert slow_box.x == quick_box.x


def test_options_show_and_hide() -> None:
    timeline = replace(make_small_timeline(), memory_limit=1.5)
    default = draw_figure([timeline], make_options())
    assert "memory" in words(default)
    assert [s for s in default.shapes if isinstance(s, Line) and s.dashed]
    assert "memory" not in words(draw_figure([timeline], make_options(memory=False)))
    outlined = draw_figure([timeline], make_options(critical_path=True))
    count = len([s for s in outlined.shapes if isinstance(s, Rect) and s.fill == "none"])
    assert count == 6
    arrows = draw_figure([timeline], make_options(arrows=True))
    assert len([s for s in arrows.shapes if isinstance(s, Line) and s.arrow]) == 4
    dark = draw_figure([timeline], make_options(theme="dark"))
    assert dark.background == "#12161C"


def test_a_limit_out_of_sight_is_no_limit() -> None:
    timeline = replace(make_small_timeline(), memory_limit=float("inf"))
    scene = draw_figure([timeline], make_options())
    assert not [s for s in scene.shapes if isinstance(s, Line) and s.dashed]
    assert '"memoryLimit":null' in make_report(timeline)


def test_bad_options_are_errors_that_say_what_works() -> None:
    with pytest.raises(ScheduleError, match="light, dark"):
        make_options(theme="pink")
    with pytest.raises(ScheduleError, match="try 960"):
        make_options(width=10)
    with pytest.raises(ScheduleError, match="no timeline"):
        draw_figure([], make_options())


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches"),
    [("1f1b", 1, 1), ("zbv", 4, 8), ("dualpipev", 4, 8), ("gpipe", 70, 4), ("1f1b", 4, 500)],
)
@pytest.mark.parametrize("width", [320, 960])
def test_nothing_is_drawn_outside_the_sheet(
    name: str, ranks: int, microbatches: int, width: int
) -> None:
    timeline = simulate(name, ranks, microbatches, lower=ranks < 8)
    scene = draw_figure([timeline], make_options(width=width, critical_path=True))
    for shape in scene.shapes:
        if isinstance(shape, Rect):
            assert shape.x >= 0
            assert shape.x + shape.width <= scene.width + 1
            assert shape.y + shape.height <= scene.height
        elif isinstance(shape, Words) and width >= 600:
            length = measure_text(shape.text, shape.size)
            shift = {"start": 0.0, "middle": 0.5, "end": 1.0}[shape.anchor]
            assert shape.x - shift * length >= 0
            assert shape.x + (1 - shift) * length <= scene.width + 1


def test_a_crowded_lane_is_a_density_of_the_true_shares() -> None:
    timeline = simulate("1f1b", 2, 300)
    picture = make_picture(timeline)
    columns = 15
    found = {style.name: shares for style, shares in measure_density(picture, 1, columns)}
    step = picture.end / columns
    for column in range(columns):
        # Counted the slow way, at 200 points of the column.
        points = [(column + (i + 0.5) / 200) * step for i in range(200)]
        for kind in ("F", "B"):
            inside = sum(
                any(
                    box.start <= point < box.end
                    for box in picture.boxes_of_row[1]
                    if box.action.kind.value == kind
                    and box.end > column * step
                    and box.start < (column + 1) * step
                )
                for point in points
            )
            assert found[kind][column] == pytest.approx(inside / 200, abs=0.02)
        assert sum(shares[column] for shares in found.values()) == pytest.approx(1, abs=1e-6)


# ── SVG ──────────────────────────────────────────────────────────────────────────────────────────


def test_golden_svg() -> None:
    check_golden("view/small.svg", draw_svg(make_small_timeline(), width=640))


def test_golden_svg_of_two_schedules() -> None:
    timelines = [simulate("1f1b", 2, 4), simulate("zbv", 2, 4)]
    check_golden("view/1f1b_and_zbv.svg", draw_svg(timelines, critical_path=True, arrows=True))


@pytest.mark.parametrize("name", ["zbv", "</title><script>alert(1)</script>", "a & b \x00\x1f\"'"])
def test_an_svg_is_xml_whatever_the_name(name: str) -> None:
    root = ET.fromstring(draw_svg(make_small_timeline(name=name)))
    assert root.tag == f"{NAMESPACE}svg"
    assert root.find(f".//{NAMESPACE}script") is None
    title = root.find(f"{NAMESPACE}title")
    assert title is not None
    assert title.text
    assert root.get("role") == "img"
    text = "".join(root.itertext())
    assert ("<script>" in text) == ("<script>" in name)


def test_every_pattern_that_is_used_is_defined_and_has_its_own_name() -> None:
    text = draw_svg(simulate("zbv", 4, 8))
    used = set(re.findall(r"url\(#([\w-]+)\)", text))
    assert used
    assert used == set(re.findall(r'<pattern id="([\w-]+)"', text))
    other = draw_svg(simulate("zbv", 4, 9))
    assert not used & set(re.findall(r"url\(#([\w-]+)\)", other))


def test_boxes_of_an_svg_say_what_they_are() -> None:
    root = ET.fromstring(draw_svg(make_small_timeline(scale=0.001, time_unit="s")))
    hints = {node.text for node in root.iter(f"{NAMESPACE}title")}
    assert "0B1: 7 ms to 9 ms" in hints
    assert "waiting for 1B0 of rank 1" in hints


def test_a_large_svg_stays_small(tmp_path: Path) -> None:
    timeline = simulate("interleaved_1f1b", 32, 128)
    path = timeline.save(tmp_path / "large.svg")
    assert len(timeline.spans) > 16_000
    assert path.stat().st_size < 3_000_000
    ET.parse(path)


# ── PNG ──────────────────────────────────────────────────────────────────────────────────────────


def test_a_png_has_the_size_and_the_colours_of_the_figure(tmp_path: Path) -> None:
    image_module = pytest.importorskip("PIL.Image")
    path = make_small_timeline().save(tmp_path / "small.png", width=700, scale=1.0, memory=False)
    image = image_module.open(path).convert("RGB")
    scene = draw_figure([make_small_timeline()], make_options(width=700, memory=False))
    assert abs(image.width - 700) <= 1
    assert abs(image.height - scene.height) <= 1
    box = next(r for r in rectangles(scene, "F") if r.hint.startswith("0F0"))
    pixel = image.getpixel((int(box.x + 4), int(box.y + 4)))
    assert "#{:02X}{:02X}{:02X}".format(*pixel) == "#0072B2"


def test_a_name_with_dollars_is_no_formula(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    make_small_timeline(name=r"$\frac{1$").save(tmp_path / "x.png")


def test_without_matplotlib_the_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_import = builtins.__import__

    def refuse(name: str, *arguments: Any, **options: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real_import(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(MissingExtraError, match=r"pip install 'pipeloom\[plot\]'"):
        make_small_timeline().save(tmp_path / "small.png")
    assert not (tmp_path / "small.png").exists()


def test_in_a_grey_print_every_style_is_told_from_every_other(tmp_path: Path) -> None:
    """Swatches without letters, printed in grey: each pair differs in tone or in texture."""
    image_module = pytest.importorskip("PIL.Image")
    from pipeloom.view.png import write_scene

    styles = [*STYLE_OF_KIND.values(), *STYLE_OF_CAUSE.values()]
    size = 48
    scene = Scene(size * len(styles), "swatches", "", "#FFFFFF", height=size)
    for index, style in enumerate(styles):
        scene.add(Rect(index * size, 0, size, size, style.colour, style.pattern, style.ink))
    write_scene(scene, tmp_path / "grey.png", scale=1.0)
    grey = image_module.open(tmp_path / "grey.png").convert("L")

    def texture(index: int) -> tuple[float, float, float, float]:
        """Mean tone, and how much it changes from pixel to pixel: across, down, on a diagonal."""
        box = grey.crop((index * size + 4, 4, (index + 1) * size - 4, size - 4))
        rows = [[box.getpixel((x, y)) for x in range(box.width)] for y in range(box.height)]
        pairs = [
            (rows[y][x], rows[y][x + 1], rows[y + 1][x], rows[y + 1][x + 1])
            for y in range(box.height - 1)
            for x in range(box.width - 1)
        ]
        count = len(pairs)
        return (
            sum(map(sum, rows)) / sum(map(len, rows)),
            sum(abs(a - b) for a, b, _, _ in pairs) / count,
            sum(abs(a - c) for a, _, c, _ in pairs) / count,
            sum(abs(a - d) - abs(b - c) for a, b, c, d in pairs) / count,
        )

    seen = [texture(index) for index in range(len(styles))]
    for first in range(len(styles)):
        for second in range(first):
            tone, *textures = (abs(a - b) for a, b in zip(seen[first], seen[second], strict=True))
            told_apart = tone >= 15 or max(textures) >= 4
            assert told_apart, (styles[first].name, styles[second].name, tone, textures)
