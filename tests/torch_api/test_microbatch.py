"""Cutting and merging: what torch cuts and merges."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.pipelining.microbatch as theirs
from torch.utils import _pytree as pytree

import pipeloom.torch_api.microbatch as ours


def specs(module: Any) -> list[tuple[Any, Any, Any, Any]]:
    """(args, kwargs, args_chunk_spec, kwargs_chunk_spec)."""
    x, y = torch.arange(24.0).view(6, 4), torch.arange(6)
    cut, whole = module.TensorChunkSpec, module._Replicate()
    return [
        ((x,), {"y": y}, None, None),
        ((x, 3, None), {}, None, None),
        (({"a": x, "b": [y, "text"]},), None, None, None),
        ((x, x), {"y": y}, (cut(1), cut(0)), {"y": whole}),
        ((x,), {"y": y, "n": 2}, cut.from_tuple((1,)), {"y": cut(0), "n": whole}),
        ((), {"y": y}, None, cut.from_dict({"y": 0})),
        ((x[:2],), {"y": y}, None, None),
    ]


@pytest.mark.parametrize("number", range(len(specs(ours))))
@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_cuts_of_torch(number: int, chunks: int) -> None:
    results = []
    for module in (theirs, ours):
        args, kwargs, args_spec, kwargs_spec = specs(module)[number]
        split = module.split_args_kwargs_into_chunks(args, kwargs, chunks, args_spec, kwargs_spec)
        results.append(pytree.tree_flatten(split))
    (expected, tree), (found, other) = results
    assert tree == other
    for one, two in zip(expected, found, strict=True):
        assert torch.equal(one, two) if isinstance(one, torch.Tensor) else one == two


def test_merges_of_torch() -> None:
    chunks = [{"a": torch.full((2, 3), float(i)), "n": torch.tensor(float(i))} for i in range(3)]
    for module in (theirs, ours):
        spec = {"a": module.TensorChunkSpec(1), "n": module.sum_reducer}
        merged = module.merge_chunks(chunks, spec)
        assert merged["a"].shape == (2, 9)
        assert merged["n"].item() == 3.0
        rows = module.merge_chunks([(chunk["a"],) for chunk in chunks], None)
        assert rows[0].shape == (6, 3)
        assert module.merge_chunks([(1, "x")] * 3, (None, None)) == (1, "x")
    assert ours.merge_chunks([chunk["n"] for chunk in chunks], None).tolist() == [0.0, 1.0, 2.0]


def test_what_cannot_be_cut_or_merged_is_told() -> None:
    x = torch.zeros(6, 2)
    with pytest.raises(AssertionError, match="smaller than num_chunks"):
        ours._split_tensor(x, ours.TensorChunkSpec(1), 4)
    with pytest.raises(ValueError, match=r"no dimension 0 .* _Replicate"):
        ours.split_args_kwargs_into_chunks((torch.tensor(1.0),), None, 2)
    with pytest.raises(ValueError, match="Unsupported chunk spec"):
        ours.split_args_kwargs_into_chunks((3,), None, 2, (ours.TensorChunkSpec(0),))
    with pytest.raises(AssertionError, match=r"chunk specs are for \['b'\]|chunk specs"):
        ours.split_args_kwargs_into_chunks((), {"a": x, "b": x}, 2, None, {"b": None})
    with pytest.raises(ValueError, match="did not match chunk spec"):
        ours.merge_chunks([(x, x)], (ours.TensorChunkSpec(0),))
    with pytest.raises(AssertionError, match="Expected 1, got 2"):
        ours.merge_chunks([(1,), (2,)], (None,))


def test_block_masks_are_cut_along_their_batch() -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q >= k + b

    mask = create_block_mask(causal, 4, 1, 128, 128, device="cpu")
    parts, _ = ours.split_args_kwargs_into_chunks((mask,), None, 2)
    assert [part[0].shape[0] for part in parts] == [2, 2]
    one = create_block_mask(causal, 1, 1, 128, 128, device="cpu")
    assert ours._split_block_mask(one, 3) == [one] * 3
