"""How colours look to different eyes, and how much two colours differ (CIEDE2000).

The matrices are those of Machado, Oliveira and Fernandes (2009) at severity 1, for linear RGB.
"""

from __future__ import annotations

from math import atan2, cos, degrees, exp, hypot, radians, sin, sqrt

Lab = tuple[float, float, float]
Rgb = tuple[float, float, float]

DEFICIENCIES = {
    "protan": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deutan": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritan": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}


def to_linear(colour: str) -> Rgb:
    """Linear RGB of "#RRGGBB"."""

    def expand(value: float) -> float:
        return value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4

    red, green, blue = (expand(int(colour[i : i + 2], 16) / 255) for i in (1, 3, 5))
    return red, green, blue


def simulate_deficiency(colour: str, deficiency: str) -> Rgb:
    """The linear RGB that someone with the deficiency sees; "none" changes nothing."""
    rgb = to_linear(colour)
    if deficiency == "none":
        return rgb
    red, green, blue = (
        min(1.0, max(0.0, sum(weight * value for weight, value in zip(row, rgb, strict=True))))
        for row in DEFICIENCIES[deficiency]
    )
    return red, green, blue


def to_lab(rgb: Rgb) -> Lab:
    """CIELAB (D65) of linear RGB."""
    red, green, blue = rgb
    x = (0.4124564 * red + 0.3575761 * green + 0.1804375 * blue) / 0.95047
    y = 0.2126729 * red + 0.7151522 * green + 0.0721750 * blue
    z = (0.0193339 * red + 0.1191920 * green + 0.9503041 * blue) / 1.08883

    def bend(value: float) -> float:
        return value ** (1 / 3) if value > 216 / 24389 else (24389 / 27 * value + 16) / 116

    return 116 * bend(y) - 16, 500 * (bend(x) - bend(y)), 200 * (bend(y) - bend(z))


def find_lightness(colour: str) -> float:
    """L* from 0 to 100: what remains in grey."""
    return to_lab(to_linear(colour))[0]


def contrast(first: str, second: str) -> float:
    """The contrast ratio of WCAG, 1 to 21."""
    weights = (0.2126, 0.7152, 0.0722)
    dark, bright = sorted(
        sum(w * v for w, v in zip(weights, to_linear(colour), strict=True))
        for colour in (first, second)
    )
    return (bright + 0.05) / (dark + 0.05)


def difference(first: Lab, second: Lab) -> float:
    """CIEDE2000."""
    (l1, a1, b1), (l2, a2, b2) = first, second
    mean_chroma = (hypot(a1, b1) + hypot(a2, b2)) / 2
    stretch = 1.5 - 0.5 * sqrt(mean_chroma**7 / (mean_chroma**7 + 25**7))
    c1, c2 = hypot(a1 * stretch, b1), hypot(a2 * stretch, b2)
    h1 = degrees(atan2(b1, a1 * stretch)) % 360 if c1 else 0.0
    h2 = degrees(atan2(b2, a2 * stretch)) % 360 if c2 else 0.0
    turn = (h2 - h1 + 180) % 360 - 180 if c1 * c2 else 0.0
    delta_l, delta_c = l2 - l1, c2 - c1
    delta_h = 2 * sqrt(c1 * c2) * sin(radians(turn / 2))
    lightness, chroma = (l1 + l2) / 2, (c1 + c2) / 2
    if not c1 * c2:
        hue = h1 + h2
    elif abs(h1 - h2) <= 180:
        hue = (h1 + h2) / 2
    else:
        hue = (h1 + h2 + (360 if h1 + h2 < 360 else -360)) / 2
    weight = (
        1
        - 0.17 * cos(radians(hue - 30))
        + 0.24 * cos(radians(2 * hue))
        + 0.32 * cos(radians(3 * hue + 6))
        - 0.20 * cos(radians(4 * hue - 63))
    )
    s_l = 1 + 0.015 * (lightness - 50) ** 2 / sqrt(20 + (lightness - 50) ** 2)
    s_c = 1 + 0.045 * chroma
    s_h = 1 + 0.015 * chroma * weight
    twist = -2 * sqrt(chroma**7 / (chroma**7 + 25**7))
    twist *= sin(radians(60 * exp(-(((hue - 275) / 25) ** 2))))
    return sqrt(
        (delta_l / s_l) ** 2
        + (delta_c / s_c) ** 2
        + (delta_h / s_h) ** 2
        + twist * (delta_c / s_c) * (delta_h / s_h)
    )
