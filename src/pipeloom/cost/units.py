"""Amounts of memory with units: "40GiB"."""

from __future__ import annotations

import math
import re

from pipeloom.errors import CostFileError

#: Bytes in a unit.
MEMORY_UNITS: dict[str, int] = {
    "B": 1,
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)},
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", 1)},
}

_AMOUNT = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z]*)\s*")


def parse_memory(amount: float | str, unit: str) -> float:
    """An amount of memory in the given unit (that of the costs).

    >>> parse_memory("40GiB", "MiB")
    40960.0
    >>> parse_memory(8, "")
    8.0
    """
    if isinstance(amount, str):
        match = _AMOUNT.fullmatch(amount)
        if match is None:
            raise CostFileError(f"{amount!r} is no amount of memory; write 8 or 40GiB")
        number, said = float(match[1]), match[2]
    elif isinstance(amount, bool) or not isinstance(amount, (int, float)):
        raise CostFileError(f"an amount of memory is a number or a text, not {amount!r}")
    else:
        number, said = float(amount), ""
    if not 0 <= number < math.inf:
        raise CostFileError(f"an amount of memory is a number from 0 up, not {amount!r}")
    if not said:
        return number
    known = {name.lower(): size for name, size in MEMORY_UNITS.items()}
    if said.lower() not in known:
        raise CostFileError(
            f"{amount!r}: unknown unit {said!r}; known are {', '.join(MEMORY_UNITS)}"
        )
    if unit.lower() not in known:
        have = f"in {unit!r}" if unit else "without a memory unit"
        raise CostFileError(
            f"{amount!r} says bytes, but the costs are {have}, so they cannot be compared; "
            'give the costs a "memory_unit" such as "GiB", or the limit as a plain number'
        )
    return number * known[said.lower()] / known[unit.lower()]
