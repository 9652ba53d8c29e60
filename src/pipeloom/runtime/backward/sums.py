"""Adding a product of matrices to a sum that may be of a wider type.

::

    .grad (float32)  +=  dYᵀ (bfloat16) · X (bfloat16)

In one type that is ``addmm_``. A float32 sum of half-precision products is one call as well where
the device has it (CUDA): the product is then added as it is, not rounded to half precision before.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["HALF", "add_product", "takes_products"]

HALF = (torch.float16, torch.bfloat16)


def takes_products(total_type: torch.dtype, grad: Tensor) -> bool:
    """Whether products of ``grad`` with its like can be added to such a sum by one call."""
    if total_type == grad.dtype:
        return True
    if total_type != torch.float32 or grad.dtype not in HALF:
        return False
    return grad.device.type != "meta" and _adds_wide(grad.device, grad.dtype, grad.dim() == 3)


def add_product(total: Tensor, left: Tensor, right: Tensor, scale: Any = 1) -> None:
    """``total += scale · left · right``, for matrices or batches of them.

    >>> total = torch.ones(2, 2)
    >>> add_product(total, torch.eye(2), torch.tensor([[1.0, 2.0], [3.0, 4.0]]), 10)
    >>> total
    tensor([[11., 21.],
            [31., 41.]])
    """
    if total.dtype != left.dtype:
        add = torch.addmm if total.dim() == 2 else torch.baddbmm
        add(total, left, right, out_dtype=total.dtype, alpha=scale, out=total)
    elif total.dim() == 2:
        total.addmm_(left, right, alpha=scale)
    else:
        total.baddbmm_(left, right, alpha=scale)


@lru_cache
def _adds_wide(device: torch.device, dtype: torch.dtype, batched: bool) -> bool:
    """Try it: versions of torch and devices differ, and a wrong sum would be silent."""
    shape = (2, 16, 16) if batched else (16, 16)
    numbers = torch.arange(1.0, torch.Size(shape).numel() + 1, device=device).view(shape)
    left, right = (numbers / 256).to(dtype).mT, (numbers.flip(-1) / 512).to(dtype)
    total = numbers.clone()
    try:
        add_product(total, left, right, 0.5)
    except (RuntimeError, TypeError):  # NotImplementedError among them
        return False
    expected = numbers.double() + 0.5 * torch.matmul(left.double(), right.double())
    return bool(torch.allclose(total.double(), expected, rtol=1e-6, atol=1e-6))
