"""Short descriptions of values, for messages."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pipeloom.runtime.boundary import map_leaves


def friendly_debug_info(v: object) -> Any:
    """A tensor's form in words, anything else as it is.

    >>> import torch
    >>> friendly_debug_info(torch.zeros(2, 3))
    'Tensor(torch.Size([2, 3]), grad=False, dtype=torch.float32)'
    """
    if isinstance(v, Tensor):
        return f"Tensor({v.shape}, grad={v.requires_grad}, dtype={v.dtype})"
    return v


def map_debug_info(a: Any) -> Any:
    """The same for every leaf of a value."""
    return map_leaves(friendly_debug_info, a)
