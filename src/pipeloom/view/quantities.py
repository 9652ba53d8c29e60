"""Times, bytes and shares as people read them."""

from __future__ import annotations

from math import ceil, floor, isfinite, log10

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_BYTE_UNITS = frozenset({"B", "byte", "bytes"})

#: How many seconds one unit of time is.
SECONDS_PER_UNIT = {
    "s": 1.0, "second": 1.0, "seconds": 1.0,
    "ms": 1e-3, "millisecond": 1e-3, "milliseconds": 1e-3,
    "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "microsecond": 1e-6, "microseconds": 1e-6,
    "ns": 1e-9, "nanosecond": 1e-9, "nanoseconds": 1e-9,
}  # fmt: skip


def format_number(value: float) -> str:
    """Four significant digits, no trailing zeros, no exponent in the everyday range.

    >>> format_number(25.5), format_number(1234567), format_number(0.1 + 0.2)
    ('25.5', '1234567', '0.3')
    """
    if not isfinite(value):
        return str(value)
    if value and not 1e-3 <= abs(value) < 1e9:
        return f"{value:.4g}"
    digits = max(0, 3 - floor(log10(abs(value)))) if value else 0
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def format_time(value: float, unit: str) -> str:
    """A time with its unit.

    >>> format_time(0.00125, "s"), format_time(33, "")
    ('1.25 ms', '33')
    """
    scale = SECONDS_PER_UNIT.get(unit)
    if scale is None or not value:
        return f"{format_number(value)} {unit}".strip()
    seconds = value * scale
    for name in ("s", "ms", "µs", "ns"):
        if abs(seconds) >= SECONDS_PER_UNIT[name]:
            break
    return f"{format_number(seconds / SECONDS_PER_UNIT[name])} {name}"


def format_memory(value: float, unit: str) -> str:
    """An amount of memory with its unit; bytes in binary multiples.

    >>> format_memory(3 * 2**30, "bytes"), format_memory(4.5, "")
    ('3 GiB', '4.5')
    >>> format_memory(0.5, "GiB"), format_memory(80, "GB")
    ('512 MiB', '80 GB')
    """
    if unit not in _BYTE_UNITS and unit not in _BINARY:
        return f"{format_number(value)} {unit}".strip()
    power = _BINARY.index(unit) if unit in _BINARY else 0
    while 0 < abs(value) < 1 and power > 0:
        value *= 1024
        power -= 1
    while abs(value) >= 1024 and power < len(_BINARY) - 1:
        value /= 1024
        power += 1
    return f"{format_number(value)} {_BINARY[power]}"


def format_share(value: float) -> str:
    """A share in per cent.

    >>> format_share(0.2727)
    '27.3 %'
    """
    return f"{100 * value:.1f} %"


def find_ticks(end: float, most: int) -> tuple[float, ...]:
    """Round times from 0 to at most ``end``, at most ``most`` of them besides 0.

    >>> find_ticks(33, 8)
    (0.0, 5.0, 10.0, 15.0, 20.0, 25.0, 30.0)
    """
    if not end > 0 or most < 1:
        return (0.0,)
    power = 10.0 ** floor(log10(end / most))
    step = next(
        factor * power
        for factor in (1, 2, 5, 10, 20)
        if ceil(end / (factor * power)) <= most + 1 and floor(end / (factor * power) + 1e-9) <= most
    )
    return tuple(float(f"{i * step:.12g}") for i in range(floor(end / step + 1e-9) + 1))
