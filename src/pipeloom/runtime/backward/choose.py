"""From what a user asks for to the object that runs a stage's backward."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

from pipeloom.errors import BackwardMethodError
from pipeloom.runtime.backward.compiled.backend import leaves_weights
from pipeloom.runtime.backward.hook_count import HookCount
from pipeloom.runtime.backward.method import BackwardMethod
from pipeloom.runtime.backward.split import SplitBackward
from pipeloom.runtime.backward.sums import HALF
from pipeloom.runtime.backward.whole import UserWeightBackward, WholeBackward

__all__ = ["METHODS", "check_compiled", "choose_method"]

METHODS = ("auto", "deferred", "graph", "whole")
SELF_CHECKS = ("structural", "numeric", "off")


def choose_method(
    module: nn.Module,
    *,
    method: str = "auto",
    weight_backward: Callable[[], Callable[[], object]] | None = None,
    self_check: str = "structural",
    strict: bool = False,
    accumulate_fp32: bool = False,
    hold_at_most: float | None = 0.9,
    stage: int | None = None,
    hooks: HookCount | None = None,
) -> BackwardMethod:
    """The backward of one stage.

    ``method``
        ``"auto"`` decides per shape of graph; ``"deferred"`` computes weight products at W,
        ``"graph"`` runs nodes of the autograd graph again at W, ``"whole"`` does all at I.
    ``weight_backward``
        For a module that defers its own weight gradients: called after each backward of the stage,
        returns what W is to run.
    ``self_check``
        ``"structural"`` checks every plan, ``"numeric"`` also compares the first microbatch of
        every plan with a full backward (not where a part of it can run only once, such as code
        compiled by other backends), ``"off"`` trusts.
    ``strict``
        Raise, instead of warning, where a backward cannot be split as asked.
    ``accumulate_fp32``
        Keep ``.grad`` of half-precision parameters in float32.
    ``hold_at_most``
        The share of what F kept that may stay between I and W. Where weight products hold more,
        those that hold most for their work are computed at the end of I, into ``.grad``, if that
        moves no more than an eighth of the work; ``None`` defers them all.
    ``hooks``
        Shared by the stages of a process, so that the hooks that one registers for itself do not
        look like a user's to the others.

    >>> choose_method(torch.nn.Linear(2, 2), method="later")
    Traceback (most recent call last):
    pipeloom.errors.BackwardMethodError: method 'later' is none of auto, deferred, graph, whole
    """
    for value, name, known in (
        (method, "method", METHODS),
        (self_check, "self_check", SELF_CHECKS),
    ):
        if value not in known:
            raise BackwardMethodError(f"{name} {value!r} is none of {', '.join(known)}")
    _require_share(hold_at_most)
    if accumulate_fp32:
        _accumulate_in_fp32(module)
    if weight_backward is not None:
        if method != "auto":
            raise BackwardMethodError(
                f"weight_backward and method={method!r} exclude each other: the stage's own "
                "runner replaces the split; leave out one of them"
            )
        return UserWeightBackward(weight_backward, stage=stage)
    if method == "whole":
        return WholeBackward(stage=stage, reason="asked for")
    if any(getattr(part, "static_graph", False) for part in module.modules() if _is_ddp(part)):
        reason = "DDP with static_graph=True reduces when I's run of the engine ends"
        if method != "auto":
            raise BackwardMethodError(
                f"method={method!r} cannot split this stage: {reason}, before W; leave out "
                'static_graph, or use method="auto", which then runs the stage whole'
            )
        return WholeBackward(stage=stage, reason=reason)
    check_compiled(module, method)
    return SplitBackward(
        module,
        method=method,
        self_check=self_check,
        strict=strict,
        hold_at_most=hold_at_most,
        stage=stage,
        hooks=hooks or HookCount(),
    )


def _is_ddp(module: nn.Module) -> bool:
    return isinstance(module, nn.parallel.DistributedDataParallel)


def _require_share(hold_at_most: object) -> None:
    is_number = isinstance(hold_at_most, (int, float)) and not isinstance(hold_at_most, bool)
    if hold_at_most is not None and not (is_number and 0 < float(str(hold_at_most)) < math.inf):
        raise BackwardMethodError(
            f"hold_at_most {hold_at_most!r} is no share of what F kept: give a number above 0, "
            "such as 0.9, or None to defer everything"
        )


def _accumulate_in_fp32(module: nn.Module) -> None:
    half = [(n, p) for n, p in module.named_parameters() if p.requires_grad and p.dtype in HALF]
    narrow = [n for n, p in half if p.grad is not None and p.grad.dtype != torch.float32]
    if narrow:
        raise BackwardMethodError(
            "accumulate_fp32 cannot change the type of gradients that are there already: "
            f"{', '.join(narrow)}; call zero_grad() before"
        )
    for _, parameter in half:
        parameter.grad_dtype = torch.float32


def check_compiled(module: nn.Module, method: str) -> None:
    """Refuse, when a pipeline is built, what cannot work on compiled code.

    ========== ============================ =============================== =======================
    method     a compiled block inside      the stage itself compiled       ``backend="pipeloom"``
               the stage                                                    for either
    ========== ============================ =============================== =======================
    auto       what is outside is deferred  works as ``whole``              deferred
    deferred   what is outside is deferred  refused: nothing is outside     deferred
    graph      refused: needs the graph     refused                         refused
               kept, which compiled code
               does not do
    whole      works                        works                           works
    ========== ============================ =============================== =======================

    Compiled functions that are no module's ``forward`` show only in the graph: there ``deferred``
    works around them, and ``graph`` runs whole, with a warning.
    """
    compiled = [(name, part) for name, part in module.named_modules() if is_compiled(part)]
    if not compiled or method in ("auto", "whole"):
        return
    first, part = compiled[0]
    where = "the stage itself" if first == "" else f"its part {first!r}"
    if method == "graph":
        raise BackwardMethodError(
            f'method="graph" cannot split a stage with compiled code ({where}): it keeps the graph '
            "through I, and compiled backwards reuse their saved memory at once; "
            'use method="auto", which defers what is outside the compiled code'
        )
    if first == "" and not leaves_weights(part):
        raise BackwardMethodError(
            'method="deferred" finds nothing to defer when the stage itself is compiled: its '
            "backward computes the gradients of inputs and weights in one call; compile it with "
            'torch.compile(…, backend="pipeloom"), whose backward comes in halves, or use '
            'method="auto", which then runs it whole'
        )


def is_compiled(module: nn.Module) -> bool:
    """Whether calling the module runs what ``torch.compile`` made: of the module, of its call
    (``module.compile()``), or of its ``forward`` alone.
    """
    return (
        hasattr(module, "_orig_mod")
        or getattr(module, "_compiled_call_impl", None) is not None
        or hasattr(module.forward, "_torchdynamo_orig_callable")
    )
