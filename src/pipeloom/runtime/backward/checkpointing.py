"""Activations that are not there until their node runs.

A non-reentrant checkpoint drops the activations of its block and runs the block again when the
backward first asks for one of them, once per engine run. Other hooks on saved tensors bring them
back from the host, say. What W needs of such a node is therefore taken when the engine runs it::

    I:  … ─► TanhBackward ─► "where is my input?" ─► block(x) again
         ─► AddmmBackward ─► its input is taken for W ─► and given to the node

So a tensor is asked for twice: by us, and by the node. A checkpoint gives out each tensor once and
remembers that, and is made to forget. What hooks of somebody else would do is not known.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from pipeloom.runtime.backward.boxes import Box

__all__ = [
    "allow_second_use",
    "allows_second_use",
    "forget_recomputed",
    "is_packed",
    "keeps_elsewhere",
    "runs_once",
    "saves_for_one_use",
    "saved_names",
    "saves_recomputed",
    "tensors_saved",
]

SavedTensor: Any = torch._C._autograd.SavedTensor
CHECKPOINT = torch.utils.checkpoint.__name__
OFFLOADING = torch.autograd.graph.__name__  # save_on_cpu


def is_packed(node: Any, attribute: str | None) -> bool:
    """Whether hooks keep a node's saved tensor in a form of their own; ours do not count."""
    saved: Any = getattr(node, attribute, None) if attribute is not None else None
    if type(saved) is SavedTensor:  # nearly always, and this is asked very often
        hook = saved.unpack_hook
        return hook is not None and hook is not Box.open
    return any(_hook(one) is not None for one in saved or ())


def runs_once(node: Any) -> bool:
    """Whether a node's saved tensors may not be asked for in a later run."""
    return any(_source(one) not in (None, OFFLOADING) for one in _saved(node))


def saves_recomputed(node: Any) -> bool:
    """Whether a checkpoint will recompute any tensor that the node saved."""
    return any(_source(one) == CHECKPOINT for one in _saved(node))


def saves_for_one_use(node: Any) -> bool:
    """Whether hooks that nobody knows keep any tensor of the node, and may give it out once."""
    return any(_source(one) not in (None, CHECKPOINT, OFFLOADING) for one in _saved(node))


def keeps_elsewhere(node: Any) -> bool:
    """Whether hooks other than a checkpoint's keep any tensor of the node."""
    return any(_source(one) not in (None, CHECKPOINT) for one in _saved(node))


def allows_second_use(node: Any) -> bool:
    """Whether all that the node saved can be asked for by us and by the node itself."""
    return not saves_for_one_use(node) and all(
        isinstance(getattr(place, "handles", None), dict) for place in _places(node)
    )


@contextmanager
def allow_second_use(node: Any) -> Iterator[None]:
    """What checkpoints give out meanwhile does not count as given out."""
    places = list(_places(node))
    for place in places:
        place.handles = _Forgetful(place.handles)
    try:
        yield
    finally:
        for place in places:
            place.handles = dict(place.handles)


def forget_recomputed(nodes: Iterable[Any]) -> None:
    """Let go of what was recomputed for nodes that stay."""
    for node in nodes:
        for place in _places(node):
            place.handles.clear()


class _Forgetful(dict[Any, Any]):
    """Which tensor belongs to which run of the engine; ``None`` would mean that it is gone."""

    def __setitem__(self, run: Any, handle: Any) -> None:
        if handle is not None:
            super().__setitem__(run, handle)


def _places(node: Any) -> Iterator[Any]:
    """What checkpoints left with the node in place of its tensors."""
    return (one.data for one in _saved(node) if _source(one) == CHECKPOINT)


def _saved(node: Any) -> Iterator[Any]:
    kind: Any = type(node)
    for name in saved_names(kind):
        saved = getattr(node, name, None)
        yield from saved if isinstance(saved, (list, tuple)) else (saved,)


def saved_names(kind: Any) -> tuple[str, ...]:
    """Under which names nodes of a kind have what they saved."""
    # Functions written in Python all have the same; their classes may hold what they compiled.
    return _saved_names(BackwardCFunction if issubclass(kind, BackwardCFunction) else kind)


@lru_cache(maxsize=256)
def _saved_names(kind: Any) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def tensors_saved(nodes: Iterable[Any]) -> list[Tensor]:
    """What nodes keep as it is, as far as it may be looked at."""
    tensors: list[Tensor] = []
    for node in nodes:
        for name in saved_names(type(node)):
            if is_packed(node, name):
                continue
            plain = name.replace("_raw", "", 1)
            try:
                if plain == "_saved_tensors":  # a custom Function has them under their own name
                    plain = "saved_tensors" if hasattr(node, "saved_tensors") else plain
                found = getattr(node, plain, None)
            except RuntimeError:  # freed, or changed since: a backward that needs it will say so
                continue
            many = found if isinstance(found, (list, tuple)) else (found,)
            tensors += [one for one in many if isinstance(one, Tensor)]
    return tensors


def _hook(saved: Any) -> Any:
    hook = getattr(saved, "unpack_hook", None)
    return None if hook is Box.open else hook


def _source(saved: Any) -> str | None:
    """The module whose hooks keep a tensor; ``None`` if it is kept as it is."""
    hook = _hook(saved)
    return None if hook is None else str(getattr(hook, "__module__", ""))
