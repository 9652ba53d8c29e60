"""What has no public name in every supported release of torch (2.11 and newer), in one place."""

from __future__ import annotations

from typing import Any

__all__ = ["is_optimized_module", "layout_of"]


def layout_of(mesh: Any) -> Any:
    """The layout of a DeviceMesh, as torch hands it to ``get_mesh``; ``None`` where it has none."""
    return getattr(mesh, "_layout", None)


def is_optimized_module(module: Any) -> bool:
    """True for what ``torch.compile(module)`` returns."""
    return hasattr(module, "_orig_mod")
