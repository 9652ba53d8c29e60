"""Cutting a model into stages: the names of torch's tracing frontend.

::

    pipe = pipeline(model, mb_args=(x,), split_spec={"layers.4": SplitPoint.BEGINNING})
    stage = pipe.build_stage(rank, device, group)

Models that are a chain of modules where they are cut are cut (:mod:`pipeloom.model.chain`), with
the names their parameters have; others are refused, and need stages of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from pipeloom.errors import ScheduleError
from pipeloom.model.chain import cut_chain, mark_cut
from pipeloom.torch_api._utils import PipeInfo
from pipeloom.torch_api.stage import _PipelineStage

__all__ = [
    "Pipe",
    "PipeSequential",
    "SplitPoint",
    "annotate_split_points",
    "pipe_split",
    "pipeline",
]

PP_SUBMOD_PREFIX = "submod_pp"


def get_submod_name(stage_idx: int) -> str:
    """The name under which a Pipe holds a stage's module."""
    return f"{PP_SUBMOD_PREFIX}_{stage_idx}"


def pipe_split() -> None:
    """Mark the boundary between two stages inside a ``forward``."""
    mark_cut()


class SplitPoint(Enum):
    """Where to cut at a submodule: before it, or after it."""

    BEGINNING = 1
    END = 2


class PipeSplitWrapper:
    """Where ``SplitPoint`` is found in old programs."""

    SplitPoint = SplitPoint


class PipeSequential(nn.Sequential):
    """A Sequential whose every child is a stage."""

    @staticmethod
    def from_sequential(sequential_instance: nn.Sequential) -> PipeSequential:
        """The same children, each a stage."""
        return PipeSequential(*sequential_instance)

    def forward(self, input: Any) -> Any:
        for number, module in enumerate(self):
            if number:
                pipe_split()
            input = module(input)
        return input


def annotate_split_points(mod: nn.Module, spec: dict[str, SplitPoint]) -> None:
    """Cut at submodules, by their names."""
    for name, point in spec.items():
        try:
            part = mod.get_submodule(name)
        except AttributeError as error:
            known = [known for known, _ in mod.named_modules() if known]
            raise AttributeError(
                f"Specified target {name} referenced nonexistent module: {error}; "
                f"the modules are {', '.join(known[:20])}{', …' if len(known) > 20 else ''}"
            ) from None
        if not isinstance(point, SplitPoint):
            raise ValueError(f"Unknown split point type {point!r}; it is a SplitPoint.")
        if point is SplitPoint.BEGINNING:
            part.register_forward_pre_hook(lambda *_: mark_cut())
        else:
            part.register_forward_hook(lambda *_: mark_cut(after=True))


class Pipe(nn.Module):
    """A model cut into stages; called, it runs all of them."""

    def __init__(self, stages: list[nn.Module]) -> None:
        super().__init__()
        self.num_stages = len(stages)
        self.has_loss_and_backward = False
        for index, stage in enumerate(stages):
            self.add_module(get_submod_name(index), stage)
        #: Parameters that several stages have: submodule → name there. Their gradients are the
        #: program's to add up.
        self.replicated_params = _find_replicated(stages)

    @staticmethod
    def from_tracing(
        mod: nn.Module,
        example_args: tuple[Any, ...],
        example_kwargs: dict[str, Any] | None = None,
        split_policy: Callable[..., Any] | None = None,
    ) -> Pipe:
        """Cut a model where its forward says :func:`pipe_split`."""
        if split_policy is not None:
            raise ScheduleError(
                "split_policy works on a traced graph, and here models are cut without tracing: "
                "say split_spec={name: SplitPoint.BEGINNING} or call pipe_split() in forward"
            )
        return Pipe(list(cut_chain(mod, example_args, example_kwargs)))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        value = self.get_stage_module(0)(*args, **kwargs)
        for index in range(1, self.num_stages):
            value = self.get_stage_module(index)(value)
        return value

    def get_stage_module(self, stage_idx: int) -> nn.Module:
        """The module of a stage."""
        if not 0 <= stage_idx < self.num_stages:
            raise ValueError(
                f"Invalid stage index {stage_idx}! The stages are 0..{self.num_stages - 1}"
            )
        return self.get_submodule(get_submod_name(stage_idx))

    def info(self) -> PipeInfo:
        """What :func:`~pipeloom.torch_api.build_stage` needs."""
        return PipeInfo(None, self.num_stages, self.has_loss_and_backward)

    def build_stage(
        self, stage_index: int, device: torch.device, group: ProcessGroup | None = None
    ) -> _PipelineStage:
        """A stage for a schedule, its module moved to the device."""
        return _PipelineStage(
            self.get_stage_module(stage_index), stage_index, self.info(), device, group
        )


def _find_replicated(stages: list[nn.Module]) -> list[dict[str, str]]:
    places: dict[nn.Parameter, dict[str, str]] = {}
    for index, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            places.setdefault(parameter, {})[get_submod_name(index)] = name
    return [users for users in places.values() if len(users) > 1]


def pipeline(
    module: nn.Module,
    mb_args: tuple[Any, ...],
    mb_kwargs: dict[str, Any] | None = None,
    split_spec: dict[str, SplitPoint] | None = None,
    split_policy: Callable[..., Any] | None = None,
) -> Pipe:
    """Cut a model at submodules, or where its forward says :func:`pipe_split`.

    ``mb_args`` and ``mb_kwargs`` are an example of one microbatch.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> pipe = pipeline(model, (torch.zeros(1, 2),), split_spec={"2": SplitPoint.BEGINNING})
    >>> pipe.num_stages, list(pipe.get_stage_module(1).state_dict())
    (2, ['2.weight', '2.bias'])
    """
    if split_spec is not None and split_policy is not None:
        raise ValueError(
            "Cannot specify both `split_spec` and `split_policy`. Please use only one of them."
        )
    if split_spec is not None:
        annotate_split_points(module, split_spec)
    return Pipe.from_tracing(module, mb_args, mb_kwargs, split_policy)
