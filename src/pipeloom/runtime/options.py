"""What a pipeline can be told, checked when it is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from pipeloom.errors import ScheduleError
from pipeloom.ir.action import Action, Kind
from pipeloom.runtime.executor import Handler
from pipeloom.runtime.loss import LossFunction
from pipeloom.runtime.messages import SHAPES, Shapes
from pipeloom.runtime.microbatches import Merge
from pipeloom.runtime.observer import name_for_profiler

__all__ = ["Options"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What both pipelines can be told; :class:`pipeloom.LocalPipeline` says what each means."""

    loss_fn: LossFunction | None = None
    loss_weight: Callable[[Any], float | Tensor] | None = None
    share_loss: bool = True
    require_finite_loss: bool = False
    split: Mapping[str | int, Any] = field(default_factory=dict)
    merge: Merge = 0
    shapes: Shapes = "per_step"
    backward: str | Mapping[int, str] = "auto"
    weight_backward: Mapping[int, Callable[[], Callable[[], object]]] = field(default_factory=dict)
    backward_options: Mapping[str, Any] = field(default_factory=dict)
    handlers: Mapping[Kind | str, Handler] = field(default_factory=dict)
    profiler_name: Callable[[Action], str] = name_for_profiler

    def __post_init__(self) -> None:
        problems = []
        if self.shapes not in SHAPES:
            problems.append(f"shapes is one of {', '.join(SHAPES)}, not {self.shapes!r}")
        problems += [
            f"handlers names {kind!r}, but the kinds are {', '.join(Kind.__members__)}"
            for kind in self.handlers
            if str(kind) not in Kind.__members__
        ]
        if problems:
            raise ScheduleError("; ".join(problems))

    def handlers_by_kind(self) -> dict[Kind, Handler]:
        """The handlers by kind, also where they were given by its text."""
        return {Kind[str(kind)]: handler for kind, handler in self.handlers.items()}
