"""Colours differ for every eye, and patterns or lightness where there is no colour."""

from __future__ import annotations

from itertools import combinations

import pytest

from pipeloom.ir.action import Kind
from pipeloom.simulate.idle_time import COMMUNICATION, DRAIN, OVERHEAD, WAITING, WARM_UP
from pipeloom.view.palette import (
    DARK,
    LIGHT,
    PATTERNS,
    STYLE_OF_CAUSE,
    STYLE_OF_KIND,
    Style,
    style_of_cause,
)
from support.colour_vision import (
    DEFICIENCIES,
    contrast,
    difference,
    find_lightness,
    simulate_deficiency,
    to_lab,
)

STYLES = [*STYLE_OF_KIND.values(), *STYLE_OF_CAUSE.values()]
COLOURS = {style.colour: style.name for style in STYLES}
LEAST_DIFFERENCE = 15.0


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        # From the published test data of the formula.
        ((50.0, 2.6772, -79.7751), (50.0, 0.0, -82.7485), 2.0425),
        ((50.0, -1.3802, -84.2814), (50.0, 0.0, -82.7485), 1.0000),
        ((50.0, 2.5, 0.0), (73.0, 25.0, -18.0), 27.1492),
        ((50.0, 2.5, 0.0), (58.0, 24.0, 15.0), 19.4535),
        ((60.2574, -34.0099, 36.2677), (60.4626, -34.1751, 39.4387), 1.2644),
        ((22.7233, 20.0904, -46.6940), (23.0331, 14.9730, -42.5619), 2.0373),
        ((2.0776, 0.0795, -1.1350), (0.9033, -0.0636, -0.5514), 0.9082),
    ],
)
def test_the_measure_is_the_published_one(
    first: tuple[float, float, float], second: tuple[float, float, float], expected: float
) -> None:
    assert difference(first, second) == pytest.approx(expected, abs=5e-5)
    assert difference(second, first) == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize("deficiency", ["none", *DEFICIENCIES])
def test_any_two_colours_differ_for_every_eye(deficiency: str) -> None:
    seen = {name: to_lab(simulate_deficiency(hex_, deficiency)) for hex_, name in COLOURS.items()}
    distances = {(a, b): difference(seen[a], seen[b]) for a, b in combinations(seen, 2)}
    closest = min(distances, key=lambda pair: distances[pair])
    assert distances[closest] >= LEAST_DIFFERENCE, (closest, distances[closest])


def test_the_measure_tells_colours_that_some_eyes_confuse() -> None:
    """Unchanged Okabe–Ito colours would not do: orange and yellow without green cones."""
    orange, yellow = (to_lab(simulate_deficiency(c, "deutan")) for c in ("#E69F00", "#F0E442"))
    assert difference(orange, yellow) < LEAST_DIFFERENCE


def test_in_grey_a_pattern_or_lightness_tells_styles_apart() -> None:
    def alike(first: Style, second: Style) -> bool:
        same_pattern = first.pattern == second.pattern
        near = abs(find_lightness(first.colour) - find_lightness(second.colour)) < 10
        return same_pattern and near

    for first, second in combinations(STYLES, 2):
        assert not alike(first, second), (first.name, second.name)


def test_every_kind_and_every_cause_has_a_row_of_its_own() -> None:
    assert set(STYLE_OF_KIND) == set(Kind)
    assert set(STYLE_OF_CAUSE) == {WARM_UP, WAITING, COMMUNICATION, DRAIN, OVERHEAD}
    assert len({style.letter for style in STYLES}) == len(STYLES)
    assert len({style.name for style in STYLES}) == len(STYLES)
    for style in STYLES:
        assert style.pattern in PATTERNS
        assert len(style.letter) == 1
        assert style.letter.isascii()


def test_text_can_be_read_on_every_colour() -> None:
    for style in STYLE_OF_KIND.values():
        assert contrast(style.ink, style.colour) >= 4.0, style.name
    for theme in (LIGHT, DARK):
        assert contrast(theme.text, theme.paper) >= 12
        assert contrast(theme.muted, theme.paper) >= 4.5
        assert contrast(theme.limit, theme.paper) >= 4.5


def test_an_unknown_cause_has_a_look() -> None:
    assert style_of_cause("strike").name == "strike"
