"""pipeloom: pipeline-parallel training for PyTorch.

>>> import pipeloom
>>> schedule = pipeloom.build_schedule("1f1b", ranks=2, microbatches=3)
>>> print(schedule)
# 1f1b · 2 ranks · 2 stages · 3 microbatches
rank 0   0F0  0F1  0B0  0F2  0B1  0B2
rank 1   1F0  1B0  1F1  1B1  1F2  1B2
>>> pipeloom.verify(schedule).ok
True

The names are loaded on use: ``import pipeloom`` is quick and works without torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pipeloom.errors import (
    CostFileError,
    MissingExtraError,
    ParseError,
    PipelineStalled,
    PipeloomError,
    RankLost,
    ScheduleError,
    ShapeError,
    StepError,
    StepFailed,
    VerificationError,
)

__version__ = "0.1.0"

_MODULE_OF = {
    "LocalPipeline": "pipeloom.runtime.pipeline",
    "Pipeline": "pipeloom.runtime.pipeline",
    "PreSplit": "pipeloom.runtime.microbatches",
    "REPLICATE": "pipeloom.runtime.microbatches",
    "Routed": "pipeloom.runtime.boundary",
    "StepResult": "pipeloom.runtime.result",
    "Action": "pipeloom.ir.action",
    "Kind": "pipeloom.ir.action",
    "Placement": "pipeloom.ir.placement",
    "Schedule": "pipeloom.ir.schedule",
    "make_schedule": "pipeloom.ir.schedule",
    "Topology": "pipeloom.ir.topology",
    "format_grid": "pipeloom.ir.notation",
    "parse_action": "pipeloom.ir.notation",
    "parse_grid": "pipeloom.ir.notation",
    "load_schedule": "pipeloom.ir.serialization",
    "build_schedule": "pipeloom.schedules.registry",
    "list_schedules": "pipeloom.schedules.registry",
    "register_schedule": "pipeloom.schedules.registry",
    "PassPipeline": "pipeloom.passes.pipeline",
    "lower": "pipeloom.passes.pipeline",
    "Report": "pipeloom.verify.report",
    "Violation": "pipeloom.verify.report",
    "verify": "pipeloom.verify.verifier",
    "StageCosts": "pipeloom.cost.constant",
    "UniformCosts": "pipeloom.cost.constant",
    "costs_from_timelines": "pipeloom.cost.from_profile",
    "load_costs": "pipeloom.cost.files",
    "save_costs": "pipeloom.cost.files",
    "Link": "pipeloom.cost.network",
    "Network": "pipeloom.cost.network",
    "Span": "pipeloom.ir.timeline",
    "Timeline": "pipeloom.ir.timeline",
    "align_timeline": "pipeloom.ir.timeline_comparison",
    "compare_timelines": "pipeloom.ir.timeline_comparison",
    "load_timeline": "pipeloom.ir.timeline_json",
    "simulate": "pipeloom.simulate.engine",
    "analyse": "pipeloom.simulate.analysis",
}

if TYPE_CHECKING:
    from pipeloom.cost.constant import StageCosts, UniformCosts
    from pipeloom.cost.files import load_costs, save_costs
    from pipeloom.cost.from_profile import costs_from_timelines
    from pipeloom.cost.network import Link, Network
    from pipeloom.ir.action import Action, Kind
    from pipeloom.ir.notation import format_grid, parse_action, parse_grid
    from pipeloom.ir.placement import Placement
    from pipeloom.ir.schedule import Schedule, make_schedule
    from pipeloom.ir.serialization import load_schedule
    from pipeloom.ir.timeline import Span, Timeline
    from pipeloom.ir.timeline_comparison import align_timeline, compare_timelines
    from pipeloom.ir.timeline_json import load_timeline
    from pipeloom.ir.topology import Topology
    from pipeloom.passes.pipeline import PassPipeline, lower
    from pipeloom.runtime.boundary import Routed
    from pipeloom.runtime.microbatches import REPLICATE, PreSplit
    from pipeloom.runtime.pipeline import LocalPipeline, Pipeline
    from pipeloom.runtime.result import StepResult
    from pipeloom.schedules.registry import build_schedule, list_schedules, register_schedule
    from pipeloom.simulate.analysis import analyse
    from pipeloom.simulate.engine import simulate
    from pipeloom.verify.report import Report, Violation
    from pipeloom.verify.verifier import verify

__all__ = [
    "Action",
    "CostFileError",
    "Kind",
    "Link",
    "LocalPipeline",
    "MissingExtraError",
    "Network",
    "ParseError",
    "PassPipeline",
    "Pipeline",
    "PipelineStalled",
    "PipeloomError",
    "Placement",
    "PreSplit",
    "REPLICATE",
    "RankLost",
    "Report",
    "Routed",
    "Schedule",
    "ScheduleError",
    "ShapeError",
    "Span",
    "StageCosts",
    "StepError",
    "StepFailed",
    "StepResult",
    "Timeline",
    "Topology",
    "UniformCosts",
    "VerificationError",
    "Violation",
    "align_timeline",
    "analyse",
    "build_schedule",
    "compare_timelines",
    "costs_from_timelines",
    "format_grid",
    "list_schedules",
    "load_costs",
    "load_schedule",
    "load_timeline",
    "lower",
    "make_schedule",
    "parse_action",
    "parse_grid",
    "register_schedule",
    "save_costs",
    "simulate",
    "verify",
]


class _Package(ModuleType):
    """Keeps a name for the function where a package has it too: importing the package
    ``pipeloom.verify`` would bind it here, in place of the function."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _MODULE_OF and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'pipeloom' has no attribute {name!r}")
    try:
        value = getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingExtraError("torch", extra="torch", purpose=f"pipeloom.{name}") from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
