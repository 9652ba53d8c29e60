"""Cutting a batch into microbatches and putting outputs together, as torch declares it.

::

    args_chunk_spec    (TensorChunkSpec(0), TensorChunkSpec(1))     by position
    kwargs_chunk_spec  {"mask": _Replicate()}                       by name
    nothing said       tensors along dimension 0, everything else goes to every microbatch
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pipeloom.runtime.block_mask import is_block_mask, split_block_mask
from pipeloom.runtime.boundary import flatten, map_leaves, unflatten
from pipeloom.torch_api._dtensors import is_dtensor, join_dtensors, split_dtensor

__all__ = [
    "TensorChunkSpec",
    "merge_chunks",
    "split_args_kwargs_into_chunks",
]

DEFAULT_CHUNK_DIM = 0


class _CustomReducer:
    """Puts an output of all microbatches together with a function: ``init + a + b + …``."""

    def __init__(self, init_value: Any, reduce_fn: Callable[[Any, Any], Any]) -> None:
        self.init_value = init_value
        self.reduce_fn = reduce_fn


class _LossReducer(_CustomReducer):
    """A reducer of losses."""


sum_reducer = _LossReducer(torch.tensor(0.0), operator.add)


class TensorChunkSpec:
    """Cut along a dimension.

    >>> print(TensorChunkSpec.from_tuple((0, 1))[1])
    TensorChunkSpec(1)
    """

    split_dim: int

    def __init__(self, split_dim: int) -> None:
        self.split_dim = split_dim

    def __repr__(self) -> str:
        return f"{type(self).__module__}.{type(self).__name__}({self.split_dim})"

    def __str__(self) -> str:
        return f"TensorChunkSpec({self.split_dim})"

    @staticmethod
    def from_tuple(chunk_dims: tuple[int, ...]) -> Any:
        """One for each positional argument, of their dimensions."""
        return map_leaves(TensorChunkSpec, chunk_dims)

    @staticmethod
    def from_dict(chunk_dims: dict[str, int]) -> Any:
        """One for each keyword, of their dimensions."""
        return map_leaves(TensorChunkSpec, chunk_dims)


class _Replicate:
    """Every microbatch gets the whole value."""


def _is_leaf(value: Any) -> bool:
    return is_block_mask(value)


def _is_replicated(spec: Any) -> bool:
    return spec is _Replicate or isinstance(spec, _Replicate)


def _split_block_mask(block_mask: Any, num_chunks: int) -> list[Any]:
    """One block mask for each microbatch."""
    return split_block_mask(block_mask, num_chunks)


def _split_tensor(tensor: Tensor, spec: TensorChunkSpec, num_chunks: int) -> Sequence[Tensor]:
    """Cut a tensor; sizes differ by one at most. DTensors keep their placements."""
    size = tensor.size(spec.split_dim)
    if size < num_chunks:
        raise AssertionError(
            f"Tensor size {size} is smaller than num_chunks {num_chunks}: shape "
            f"{list(tensor.shape)} cannot be cut along dimension {spec.split_dim}"
        )
    if is_dtensor(tensor):
        return split_dtensor(tensor, num_chunks, spec.split_dim)
    return torch.tensor_split(tensor, num_chunks, spec.split_dim)


def _default_spec(value: Any) -> Any:
    if isinstance(value, Tensor) or is_block_mask(value):
        return TensorChunkSpec(DEFAULT_CHUNK_DIM)
    return _Replicate()


def _shard_dict_of_args(
    args_dict: Mapping[Any, Any], args_chunk_spec: Mapping[Any, Any], num_chunks: int
) -> list[dict[Any, Any]]:
    """Cut every argument as its spec says; into fewer parts where one is too small."""
    if not args_dict:
        return [{} for _ in range(num_chunks)]
    if len(args_dict) != len(args_chunk_spec):
        raise AssertionError(
            f"the arguments are {list(args_dict)}, but the chunk specs are for "
            f"{list(args_chunk_spec)}"
        )
    values, tree = flatten(dict(args_dict), is_leaf=_is_leaf)
    specs, _ = flatten(dict(args_chunk_spec), is_leaf=_is_leaf)
    if len(values) != len(specs):
        raise ValueError(
            f"the arguments {list(args_dict)} have {len(values)} leaves, but the chunk specs "
            f"{len(specs)}; give one spec for each"
        )
    pairs = list(zip(values, specs, strict=True))
    number = min([num_chunks, *(_most_chunks(*pair, num_chunks) for pair in pairs)])
    columns = [_cut(value, spec, number) for value, spec in pairs]
    return [unflatten(list(leaves), tree) for leaves in zip(*columns, strict=True)]


def _most_chunks(value: Any, spec: Any, num_chunks: int) -> int:
    """Into how many microbatches a value could be cut."""
    if _is_replicated(spec):
        return num_chunks
    if not isinstance(spec, TensorChunkSpec):
        raise ValueError(f"Unsupported chunk spec: {spec} and value: {value} combination.")
    if isinstance(value, Tensor):
        if not -value.dim() <= spec.split_dim < value.dim():
            raise ValueError(
                f"a tensor of shape {list(value.shape)} has no dimension {spec.split_dim} to cut "
                "along; give args_chunk_spec or kwargs_chunk_spec with _Replicate() or another "
                "dimension for it"
            )
        return value.size(spec.split_dim)
    if is_block_mask(value):
        if spec.split_dim != 0:
            raise AssertionError("BlockMask only supports split_dim=0")
        rows = int(value.kv_num_blocks.size(0))
        return num_chunks if rows == 1 else rows
    raise ValueError(f"Unsupported chunk spec: {spec} and value: {value} combination.")


def _cut(value: Any, spec: Any, number: int) -> Sequence[Any]:
    if _is_replicated(spec):
        return [value] * number
    if isinstance(value, Tensor):
        return _split_tensor(value, spec, number)
    return _split_block_mask(value, number)


def split_args_kwargs_into_chunks(
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    chunks: int,
    args_chunk_spec: tuple[TensorChunkSpec, ...] | None = None,
    kwargs_chunk_spec: dict[str, TensorChunkSpec] | None = None,
) -> tuple[list[tuple], list[dict]]:
    """The positional and the keyword arguments of every microbatch.

    >>> split_args_kwargs_into_chunks((torch.arange(3),), {"scale": 2.0}, 2)
    ([(tensor([0, 1]),), (tensor([2]),)], [{'scale': 2.0}, {'scale': 2.0}])
    """
    kwargs = kwargs or {}
    args_spec = _fill_in(args_chunk_spec, args)
    kwargs_spec = _fill_in(kwargs_chunk_spec, kwargs)

    def split_args(number: int) -> list[dict[Any, Any]]:
        return _shard_dict_of_args(dict(enumerate(args)), dict(enumerate(args_spec)), number)

    split = split_args(chunks)
    kwargs_split = _shard_dict_of_args(kwargs, kwargs_spec, len(split))
    if len(kwargs_split) < len(split):
        split = split_args(len(kwargs_split))
    return [tuple(one[i] for i in range(len(args))) for one in split], kwargs_split


def _fill_in(spec: Any, value: Any) -> Any:
    if spec is not None:
        return spec
    leaves, tree = flatten(value, is_leaf=_is_leaf)
    return unflatten([_default_spec(leaf) for leaf in leaves], tree)


def merge_chunks(chunks: list[Any], chunk_spec: Any) -> Any:
    """Put the outputs of all microbatches together: along dimension 0 unless a spec says otherwise.

    >>> merge_chunks([torch.zeros(2, 1), torch.ones(1, 1)], None).shape
    torch.Size([3, 1])
    """
    if chunk_spec is None:
        leaves, tree = flatten(chunks[0])
        specs: list[Any] = [TensorChunkSpec(DEFAULT_CHUNK_DIM)] * len(leaves)
    else:
        specs, tree = flatten(chunk_spec)
    rows = [flatten(chunk)[0] for chunk in chunks]
    for chunk, row in zip(chunks, rows, strict=True):
        if len(row) != len(specs):
            raise ValueError(
                f"Chunk {chunk} did not match chunk spec {chunk_spec}: it has {len(row)} leaves, "
                f"not {len(specs)}"
            )
    columns = zip(*rows, strict=True)
    return unflatten([_merge(list(c), spec) for c, spec in zip(columns, specs, strict=True)], tree)


def _merge(pieces: list[Any], spec: Any) -> Any:
    if isinstance(spec, _CustomReducer):
        reduced = spec.init_value
        for piece in pieces:
            reduced = spec.reduce_fn(reduced, piece)
        return reduced
    if isinstance(spec, TensorChunkSpec) and all(isinstance(piece, Tensor) for piece in pieces):
        if any(is_dtensor(piece) for piece in pieces):
            return join_dtensors(pieces, spec.split_dim)
        return torch.cat(pieces, spec.split_dim) if pieces[0].dim() else torch.stack(pieces)
    for piece in pieces[1:]:
        if not piece == pieces[0]:
            raise AssertionError(
                f"an output that is not cut must be the same in every microbatch: "
                f"Expected {pieces[0]}, got {piece}"
            )
    return pieces[0]
