"""Room for what is received.

A buffer is made when its receive is posted and belongs to whoever takes the message: the stage
keeps it while its backward needs it, and nobody else holds it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pipeloom.runtime.transport.protocol import TensorSpec

__all__ = ["allocate", "count_bytes"]


def allocate(specs: Sequence[TensorSpec], device: torch.device | str = "cpu") -> list[Tensor]:
    """One contiguous, uninitialised tensor per spec.

    >>> [buffer] = allocate([TensorSpec((2, 3), torch.bfloat16)])
    >>> buffer.shape, buffer.dtype
    (torch.Size([2, 3]), torch.bfloat16)
    """
    return [torch.empty(spec.shape, dtype=spec.dtype, device=device) for spec in specs]


def count_bytes(specs: Sequence[TensorSpec]) -> int:
    """How many bytes the tensors take on their way.

    >>> count_bytes([TensorSpec((2, 3), torch.float64)])
    48
    """
    total = 0
    for spec in specs:
        elements = 1
        for size in spec.shape:
            elements *= size
        total += elements * spec.dtype.itemsize
    return total
