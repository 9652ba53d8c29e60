"""Predicts when everything runs, why ranks wait, and where memory peaks.

The names are loaded on use, because ``import pipeloom`` imports this package.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_MODULE_OF = {
    "analyse": "pipeloom.simulate.analysis",
    "find_lower_bounds": "pipeloom.simulate.bounds",
    "find_makespan": "pipeloom.simulate.engine",
    "simulate": "pipeloom.simulate.engine",
}

if TYPE_CHECKING:
    from pipeloom.simulate.analysis import analyse
    from pipeloom.simulate.bounds import find_lower_bounds
    from pipeloom.simulate.engine import find_makespan, simulate

__all__ = ["analyse", "find_lower_bounds", "find_makespan", "simulate"]


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'pipeloom.simulate' has no attribute {name!r}")
    value = getattr(import_module(module), name)
    globals()[name] = value
    return value
