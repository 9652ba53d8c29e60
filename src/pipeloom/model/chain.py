"""Cutting a model that is a chain of modules, without tracing it.

::

    Sequential(0, 1, 2, 3)    0 ─► 1 ─┊─► 2 ─► 3         stage 0: {0, 1}    stage 1: {2, 3}
                                      cut

The model runs once; what is called, in which order and on what, is noted. Where each module's only
input is the very output of the one before, the modules between two cuts are a stage. Parameters
keep the names they have in the model, so state dicts of stages are parts of the model's.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from pipeloom.errors import ScheduleError

__all__ = ["ChainStage", "cut_chain", "mark_cut"]


@dataclass
class _Call:
    """One call of a module, or of the model itself."""

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    output: Any = None
    #: Calls inside, and ``None`` for each mark of a cut, in order.
    inner: list[_Call | None] = field(default_factory=list)
    #: A cut right after it.
    ends_stage: bool = False

    @property
    def is_cut(self) -> bool:
        """True if a cut lies somewhere inside."""
        return any(one is None or one.ends_stage or one.is_cut for one in self.inner)


#: Who hears the marks of cuts while a model is being recorded: ``listener(after=…)``.
_listener: ContextVar[Callable[[bool], None] | None] = ContextVar("_listener", default=None)


def mark_cut(*, after: bool = False) -> None:
    """Mark the boundary between two stages inside a ``forward``; nothing in an ordinary call.

    In a forward hook, ``after=True`` puts it behind the module that the hook belongs to.
    """
    listener = _listener.get()
    if listener is not None:
        listener(after)


class ChainStage(nn.Module):
    """Modules that run one after the other, under the names they have in the model."""

    def __init__(self, parts: Sequence[tuple[str, nn.Module]]) -> None:
        super().__init__()
        self._parts = [part for _, part in parts]
        for name, part in parts:
            *path, last = name.split(".")
            holder: nn.Module = self
            for step in path:
                if step not in holder._modules:
                    holder.add_module(step, nn.Module())
                holder = holder.get_submodule(step)
            holder.add_module(last, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        first, *others = self._parts
        value = first(*args, **kwargs)
        for part in others:
            value = part(value)
        return value


def cut_chain(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
) -> list[ChainStage]:
    """The stages of a model whose forward marks its cuts with :func:`mark_cut`.

    ``args`` and ``kwargs`` are an example of one microbatch. A model that is no chain where it is
    cut is refused.

    >>> class Model(nn.Sequential):
    ...     def forward(self, x):
    ...         x = self[0](x)
    ...         mark_cut()
    ...         return self[1](x)
    >>> stages = cut_chain(Model(nn.Linear(2, 3), nn.Linear(3, 2)), (torch.zeros(1, 2),))
    >>> [list(stage.state_dict()) for stage in stages]
    [['0.weight', '0.bias'], ['1.weight', '1.bias']]
    """
    call = _record(model, args, kwargs or {})
    groups: list[list[tuple[str, nn.Module]]] = [[]]
    for part in _flatten(call):
        if part is not None:
            groups[-1].append((part.name, part.module))
        elif groups[-1]:
            groups.append([])
    if not groups[-1]:
        groups.pop()
    if not groups:
        raise ScheduleError(f"{type(model).__name__} calls no module: there is nothing to cut")
    if len(groups) == 1 and groups[0][0][0] == "":
        return [_whole(model)]
    return [ChainStage(group) for group in groups]


def _whole(model: nn.Module) -> ChainStage:
    """A model without a cut is its only stage."""
    stage = ChainStage([(name, child) for name, child in model.named_children()])
    stage._parts = [model]
    return stage


def _record(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Call:
    names = {module: name for name, module in model.named_modules()}
    stack: list[_Call] = []
    finished: list[_Call] = []

    def enter(module: nn.Module, given: tuple[Any, ...]) -> None:
        call = _Call(names[module], module, given)
        if stack:
            stack[-1].inner.append(call)
        stack.append(call)

    def leave(module: nn.Module, given: tuple[Any, ...], output: Any) -> None:
        call = stack.pop()
        call.output = output
        if not stack:
            finished.append(call)

    def cut(after: bool) -> None:
        if stack and after:
            stack[-1].ends_stage = True
        elif stack:
            stack[-1].inner.append(None)

    with ExitStack() as exits:
        for module in names:
            exits.callback(module.register_forward_pre_hook(enter).remove)
            exits.callback(module.register_forward_hook(leave).remove)
        exits.enter_context(_heard(cut))
        exits.enter_context(torch.no_grad())
        model(*args, **kwargs)
    return finished[-1]


@contextmanager
def _heard(listener: Callable[[bool], None]) -> Iterator[None]:
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def _flatten(call: _Call) -> Iterator[_Call | None]:
    """The parts of a call between its cuts, and ``None`` for each cut."""
    if call.is_cut:
        _require_chain(call, [one for one in call.inner if one is not None])
        for one in call.inner:
            if one is None:
                yield None
            else:
                yield from _flatten(one)
    else:
        yield call
    if call.ends_stage:
        yield None


def _require_chain(call: _Call, calls: Sequence[_Call]) -> None:
    where = f"{call.name or 'the model'} ({type(call.module).__name__})"
    remedy = (
        "Cut at modules that follow each other directly, or write the stages as modules of your "
        "own and give them to PipelineStage"
    )
    if not calls:
        raise ScheduleError(f"{where} cannot be cut: it calls no modules. {remedy}")
    given, source = call.args, "its own arguments"
    for one in calls:
        same = len(one.args) == len(given) and all(map(operator.is_, one.args, given))
        if not same:
            raise ScheduleError(
                f"{where} cannot be cut: it does something between its parts, or gives "
                f"{one.name!r} something else than {source}. {remedy}"
            )
        given, source = (one.output,), f"the output of {one.name!r}"
    if calls[-1].output is not call.output:
        raise ScheduleError(
            f"{where} cannot be cut: what it returns is not the output of {calls[-1].name!r}. "
            f"{remedy}"
        )
