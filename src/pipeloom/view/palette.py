"""Colours, letters and patterns: one row per kind of action and per cause of idle time.

::

    F  ████  blue                 warm-up        ░ almost white
    I  ████  orange               waiting        ▒ mauve grey, falling lines
    W  ████  yellow, dots         communication  ░ mint, lines
    B  ▨▨▨▨  vermilion, lines     drain          ▒ warm grey, dots
                                  overhead       ▒ olive grey, crossed lines

The colours are those of Okabe and Ito, moved by as little as makes any two of them differ by at
least 15 (CIEDE2000) to eyes without red, green or blue cones. In grey, where blue and vermilion
are alike, the pattern tells them apart; a letter stands wherever there is room.
"""

from __future__ import annotations

from typing import NamedTuple

from pipeloom.ir.action import Action, Kind

#: The patterns that every renderer with pixels can draw over a colour.
PATTERNS = ("plain", "rising", "falling", "cross", "dots", "horizontal", "vertical")


class Style(NamedTuple):
    """How one kind of action, or one cause of idle time, looks."""

    name: str
    letter: str
    colour: str
    pattern: str
    #: The colour of text, and of the pattern's lines, on it.
    ink: str
    meaning: str


_DARK, _LIGHT = "#10151B", "#FFFFFF"

FORWARD = "#0072B2"
INPUT_BACKWARD = "#E59E00"
WEIGHT_BACKWARD = "#FFF661"
FULL_BACKWARD = "#C85802"
COMMUNICATION = "#56B4E9"
GATHER = "#0C593F"
REDUCE = "#882C69"

STYLE_OF_KIND: dict[Kind, Style] = {
    Kind.F: Style("F", "F", FORWARD, "plain", _LIGHT, "forward"),
    Kind.I: Style("I", "I", INPUT_BACKWARD, "plain", _DARK, "backward of inputs"),
    Kind.W: Style("W", "W", WEIGHT_BACKWARD, "dots", _DARK, "backward of weights"),
    Kind.B: Style("B", "B", FULL_BACKWARD, "rising", _LIGHT, "full backward"),
    Kind.OVERLAP_F_B: Style(
        "OVERLAP_F_B", "O", _DARK, "plain", _LIGHT, "forward and backward as one"
    ),
    Kind.SEND_F: Style("SEND_F", ">", COMMUNICATION, "vertical", _DARK, "send an output"),
    Kind.RECV_F: Style("RECV_F", ")", COMMUNICATION, "falling", _DARK, "receive an output"),
    Kind.SEND_B: Style("SEND_B", "<", COMMUNICATION, "horizontal", _DARK, "send a gradient"),
    Kind.RECV_B: Style("RECV_B", "(", COMMUNICATION, "rising", _DARK, "receive a gradient"),
    Kind.UNSHARD: Style("UNSHARD", "U", GATHER, "plain", _LIGHT, "gather parameters"),
    Kind.RESHARD: Style("RESHARD", "S", GATHER, "falling", _LIGHT, "release parameters"),
    Kind.REDUCE_GRAD: Style("REDUCE_GRAD", "R", REDUCE, "cross", _LIGHT, "reduce gradients"),
}

STYLE_OF_CAUSE: dict[str, Style] = {
    "warm-up": Style("warm-up", ".", "#EDF3FF", "plain", "#5B6675", "nothing has arrived yet"),
    "waiting": Style("waiting", "-", "#8C7A89", "falling", "#EDE7EC", "for another rank's action"),
    "communication": Style("communication", "~", "#C0FFD6", "vertical", "#2C6B47", "for a message"),
    "drain": Style("drain", "_", "#B9B1AF", "dots", "#5E5856", "nothing is left to do"),
    "overhead": Style(
        "overhead", "+", "#84906C", "cross", "#3E4433", "though all inputs are there"
    ),
}

_UNKNOWN_CAUSE = Style("idle", ".", "#E3E5EA", "plain", "#5B6675", "idle")


class Theme(NamedTuple):
    """What surrounds the boxes."""

    name: str
    paper: str
    text: str
    muted: str
    grid: str
    lane: str
    memory: str
    limit: str
    critical: str
    arrow: str


LIGHT = Theme(
    "light", "#FFFFFF", "#17202A", "#5B6675", "#E3E7EC", "#F6F7F9", "#7A8CA3", "#B00020",
    "#10151B", "#44505E",
)  # fmt: skip
DARK = Theme(
    "dark", "#12161C", "#E8ECF1", "#9AA7B5", "#2A313B", "#191F27", "#8FA3BC", "#FF8A80",
    "#FFFFFF", "#C5CFDA",
)  # fmt: skip
THEMES = {theme.name: theme for theme in (LIGHT, DARK)}


def style_of(action: Action) -> Style:
    """The look of an action.

    >>> style_of(Action(Kind.F, 2, 0)).colour
    '#0072B2'
    """
    return STYLE_OF_KIND[action.kind]


def style_of_cause(cause: str) -> Style:
    """The look of idle time; a cause that is not in the table is shown as plain idle time."""
    return STYLE_OF_CAUSE.get(cause, _UNKNOWN_CAUSE._replace(name=cause))
