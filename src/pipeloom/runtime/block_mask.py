"""Splitting the block masks of flex attention along their batch.

A block mask numbers the rows of its batch, and its ``mask_mod`` is asked by that number; the part
of a microbatch counts from 0 again, so its function adds where the part began::

    rows of the batch    0 1 2 │ 3 4 5         mask_mod(b, h, q, k)
    microbatch 1                 0 1 2   ──►   mask_mod(b + 3, h, q, k)
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["is_block_mask", "split_block_mask"]

_MODULE = "torch.nn.attention.flex_attention"


def is_block_mask(value: Any) -> bool:
    """True for a ``BlockMask``, without importing flex attention for those who do not use it."""
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(value, module.BlockMask)


def split_block_mask(mask: Any, num_microbatches: int) -> list[Any]:
    """One mask per microbatch; a mask of one row serves every row and goes to all of them."""
    rows = mask.kv_num_blocks.shape[0]
    if rows == 1:
        return [mask] * num_microbatches
    parts = torch.tensor_split(torch.arange(rows), num_microbatches)
    return [_take_rows(mask, int(part[0]), int(part[-1]) + 1) for part in parts]


def _take_rows(mask: Any, start: int, stop: int) -> Any:
    def rows_of(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor[start:stop]

    return type(mask).from_kv_blocks(
        rows_of(mask.kv_num_blocks),
        rows_of(mask.kv_indices),
        rows_of(mask.full_kv_num_blocks),
        rows_of(mask.full_kv_indices),
        BLOCK_SIZE=mask.BLOCK_SIZE,
        mask_mod=_shift_batch(mask.mask_mod, start),
        seq_lengths=mask.seq_lengths,
    )


def _shift_batch(mask_mod: Callable[..., Any], start: int) -> Callable[..., Any]:
    def shifted(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return mask_mod(batch + start, head, query, key)

    return shifted
