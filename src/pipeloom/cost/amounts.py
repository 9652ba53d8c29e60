"""Which numbers are times, sizes and factors."""

from __future__ import annotations

#: What is larger is no cost of anything, and sums and ratios of it would leave the numbers' range.
LARGEST = 1e100


def is_amount(value: object, *, above: bool = False) -> bool:
    """True for a number from 0 up, or, with ``above``, above 0.

    >>> is_amount(0), is_amount(0, above=True), is_amount(True), is_amount(float("nan"))
    (True, False, False, False)
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return (1 / LARGEST if above else 0) <= value <= LARGEST
