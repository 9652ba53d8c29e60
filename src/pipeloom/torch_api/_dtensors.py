"""DTensors where a pipeline meets them: cut, joined, and taken across a boundary.

::

    stage 0 returns DTensor [8, 4] Shard(1) ──► local [8, 2] + _Origin ──► stage 1 gets the DTensor

Only the local part travels. The mesh is found on the other side: by ``get_mesh(names, layout)``, or
among the meshes that the stage has seen already. Both conversions are differentiable, so gradients
need no word of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from pipeloom.runtime.boundary import flatten, map_leaves
from pipeloom.torch_api._compat import layout_of

__all__ = ["MeshCache", "is_dtensor", "join_dtensors", "pack", "split_dtensor", "unpack"]

MeshKey = tuple[tuple[str, ...], Any]


def is_dtensor(value: Any) -> bool:
    """True for a DTensor."""
    return isinstance(value, DTensor)


def split_dtensor(tensor: Tensor, num_chunks: int, dim: int) -> list[Tensor]:
    """Cut a DTensor in place: every rank cuts its local part, placements stay."""
    assert isinstance(tensor, DTensor)
    sizes = [len(part) for part in torch.arange(tensor.shape[dim]).tensor_split(num_chunks)]
    return [
        DTensor.from_local(
            local,
            tensor.device_mesh,
            tensor.placements,
            shape=_with_size(tensor.shape, dim, size),
            stride=tensor.stride(),
            run_check=False,
        )
        for local, size in zip(tensor.to_local().tensor_split(num_chunks, dim), sizes, strict=True)
    ]


def join_dtensors(pieces: Sequence[Any], dim: int) -> Tensor:
    """Put DTensors of equal placements together along a dimension."""
    if not all(isinstance(piece, DTensor) for piece in pieces):
        raise AssertionError(
            "merge_chunks: expected all values to be DTensors or none to be DTensors, got a mix"
        )
    first = pieces[0]
    for number, piece in enumerate(pieces):
        if piece.placements != first.placements:
            raise AssertionError(
                f"merge_chunks: placement mismatch at chunk {number}: "
                f"expected {first.placements}, got {piece.placements}"
            )
    joined: Tensor = DTensor.from_local(
        torch.cat([piece.to_local() for piece in pieces], dim),
        first.device_mesh,
        first.placements,
        shape=_with_size(first.shape, dim, sum(piece.shape[dim] for piece in pieces)),
        stride=first.stride(),
        run_check=False,
    )
    return joined


def _with_size(shape: torch.Size, dim: int, size: int) -> torch.Size:
    sizes = list(shape)
    sizes[dim] = size
    return torch.Size(sizes)


class _Origin(NamedTuple):
    """What makes a DTensor of a local part again; compared and pickled as one Python value."""

    placements: tuple[Any, ...]
    mesh: MeshKey
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class _Local:
    """The local part of a DTensor on its way."""

    def __init__(self, tensor: Any, origin: _Origin) -> None:
        self.tensor = tensor
        self.origin = origin


pytree.register_pytree_node(
    _Local,
    lambda local: ([local.tensor], local.origin),
    lambda children, origin: _Local(next(iter(children)), origin),
)


class MeshCache:
    """The meshes a stage knows, by the names of their dimensions and their layout."""

    def __init__(self, get_mesh: Callable[..., Any] | None = None) -> None:
        self._get_mesh = get_mesh
        self._known: dict[MeshKey, Any] = {}

    def note(self, tensors: Sequence[Any]) -> None:
        """Remember the meshes of DTensors."""
        for tensor in tensors:
            if isinstance(tensor, DTensor):
                self._known.setdefault(_key_of(tensor), tensor.device_mesh)

    def find(self, key: MeshKey) -> Any:
        """The mesh of a DTensor that came from another stage."""
        mesh = self._known.get(key)
        if mesh is None:
            from pipeloom.torch_api._utils import PipeliningMetadataError

            names, layout = key
            if self._get_mesh is None:
                raise PipeliningMetadataError(
                    f"a DTensor arrived whose mesh {names} this stage does not know, and there is "
                    "no get_mesh callback: give PipelineStage get_mesh=…, or DTensors as input_args"
                )
            mesh = self._get_mesh(names, layout)
            if mesh is None:
                raise PipeliningMetadataError(
                    f"the get_mesh callback returned None for mesh_dim_names={names}, "
                    f"mesh_layout={layout}; it must return the DeviceMesh of that name and layout"
                )
            self._known[key] = mesh
        return mesh


def _key_of(tensor: DTensor) -> MeshKey:
    mesh = tensor.device_mesh
    return tuple(mesh.mesh_dim_names or ()), layout_of(mesh)


def pack(value: Any, meshes: MeshCache) -> Any:
    """A stage's output with the local parts of its DTensors; the value itself if it has none."""
    leaves = [value] if isinstance(value, Tensor) else flatten(value)[0]
    if not any(isinstance(leaf, DTensor) for leaf in leaves):
        return value
    meshes.note(leaves)
    return map_leaves(_take_local, value)


def _take_local(leaf: Any) -> Any:
    if not isinstance(leaf, DTensor):
        return leaf
    origin = _Origin(tuple(leaf.placements), _key_of(leaf), tuple(leaf.shape), leaf.stride())
    return _Local(leaf.to_local(), origin)


def unpack(value: Any, meshes: MeshCache) -> Any:
    """What arrived at a stage, with its DTensors made again."""

    def is_local(leaf: Any) -> bool:
        return isinstance(leaf, _Local)

    if not any(map(is_local, flatten(value, is_leaf=is_local)[0])):
        return value
    return map_leaves(lambda leaf: _restore(leaf, meshes), value, is_leaf=is_local)


def _restore(leaf: Any, meshes: MeshCache) -> Any:
    if not isinstance(leaf, _Local):
        return leaf
    origin = leaf.origin
    return DTensor.from_local(
        leaf.tensor,
        meshes.find(origin.mesh),
        origin.placements,
        shape=torch.Size(origin.shape),
        stride=origin.stride,
        run_check=False,
    )
