"""Has a tensor been written to? torch counts that, and everything that W will use is looked at."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

__all__ = ["versions"]


def versions(tensors: Sequence[Tensor]) -> list[int]:
    """How often each was written to; nobody counts that of tensors made for inference."""
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]
