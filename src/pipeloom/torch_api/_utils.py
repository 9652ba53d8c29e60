"""Small things that the other modules share: placements, errors, the description of a Pipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, fx
from torch.distributed.device_mesh import DeviceMesh

from pipeloom.errors import StepFailed
from pipeloom.ir.placement import Placement
from pipeloom.runtime.boundary import flatten, unflatten

__all__ = [
    "GetMeshCallback",
    "PipeInfo",
    "PipeliningMetadataError",
    "PipeliningShapeError",
    "flatten_args",
    "flatten_args_detach",
    "generate_rank_to_stage_mapping",
    "generate_stage_to_rank_mapping",
]


class GetMeshCallback(Protocol):
    """Finds the mesh of a DTensor that comes from another stage."""

    def __call__(self, mesh_dim_names: tuple[str, ...], mesh_layout: Any) -> DeviceMesh: ...


class PipeliningMetadataError(RuntimeError):
    """What crosses the boundary of a stage is not what was declared or seen before."""


#: The name that older releases of torch raise.
PipeliningShapeError = PipeliningMetadataError


class MetadataStepFailed(StepFailed, PipeliningMetadataError):
    """The same, found while a step ran, here or on another rank."""


def flatten_args(args: Any, *, detach: bool = False) -> Any:
    """The leaves of arguments; with ``detach`` also the arguments with detached tensors.

    >>> flatten_args(({"a": 1}, [2, 3]))
    [1, 2, 3]
    """
    flat, tree = flatten(args)
    if not detach:
        return flat
    detached = [
        leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
        for leaf in flat
    ]
    return unflatten(detached, tree), detached


def flatten_args_detach(args: Any) -> Any:
    """``flatten_args(args, detach=True)``."""
    return flatten_args(args, detach=True)


def _place(pp_size: int, num_stages: int, style: str) -> Placement:
    if style == "loop":
        return Placement(tuple(stage % pp_size for stage in range(num_stages)), pp_size)
    if style != "v":
        raise ValueError(f"Style {style} is not supported; it is 'loop' or 'v'.")
    if num_stages % pp_size:
        raise ValueError(
            f"num_stages {num_stages} must be evenly divisible by pp_size {pp_size} for V schedules"
        )
    return Placement.zigzag(pp_size, num_stages // pp_size)


def generate_stage_to_rank_mapping(
    pp_size: int, num_stages: int, style: str = "loop"
) -> dict[int, int]:
    """Which rank holds each stage.

    >>> generate_stage_to_rank_mapping(2, 4, style="v")
    {0: 0, 1: 1, 2: 1, 3: 0}
    """
    placement = _place(pp_size, num_stages, style)
    return {stage: placement.rank_of(stage) for stage in range(num_stages)}


def generate_rank_to_stage_mapping(
    pp_size: int, num_stages: int, style: str = "loop"
) -> dict[int, list[int]]:
    """Which stages each rank holds.

    >>> generate_rank_to_stage_mapping(2, 4)
    {0: [0, 2], 1: [1, 3]}
    """
    placement = _place(pp_size, num_stages, style)
    return {
        rank: list(placement.stages_on(rank))
        for rank in range(pp_size)
        if placement.stages_on(rank)
    }


@dataclass(slots=True)
class PipeInfo:
    """What a stage has to know of the Pipe it was cut from."""

    graph: fx.Graph | None
    num_stages: int
    has_loss_and_backward: bool
