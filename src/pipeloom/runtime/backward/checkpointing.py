"""Activations that are only there while a checkpoint recomputes.

A non-reentrant checkpoint drops the activations of its block and runs the block again when the
backward first asks for one of them, once per engine run. Asking before I would recompute the block
once more. Instead, while I runs, the inputs of the block's linear layers are noted as the
recomputation passes through them::

    I:  … ─► GeluBackward ─► "where is my input?" ─► block(x) again ─► noted: inputs of its linears

The first time a graph with such layers is met, their gradients come out of I and the notes are only
compared with what was hoped for; from then on they are used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["is_recomputed", "linear_owners", "noted_inputs", "saves_recomputed"]


def is_recomputed(node: Any, attribute: str | None) -> bool:
    """Whether a node's saved tensor is one that a checkpoint will recompute."""
    if attribute is None:
        return False
    saved = getattr(node, attribute, None)
    return any(
        getattr(getattr(one, "unpack_hook", None), "__module__", None)
        == torch.utils.checkpoint.__name__
        for one in (saved if isinstance(saved, (list, tuple)) else (saved,))
    )


def saves_recomputed(node: Any) -> bool:
    """Whether a checkpoint will recompute any tensor that the node saved."""
    return any(is_recomputed(node, name) for name in dir(node) if name.startswith("_raw_saved_"))


def linear_owners(module: nn.Module) -> dict[int, nn.Linear]:
    """Weight → the one linear layer that owns it."""
    owners: dict[int, nn.Linear] = {}
    shared: set[int] = set()
    for layer in module.modules():
        if isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward:
            if id(layer.weight) in owners:
                shared.add(id(layer.weight))
            owners[id(layer.weight)] = layer
    return {key: layer for key, layer in owners.items() if key not in shared}


@contextmanager
def noted_inputs(layers: Mapping[int, nn.Linear]) -> Iterator[dict[int, list[Tensor]]]:
    """Note what each layer is called with, while gradients are recorded."""
    notes: dict[int, list[Tensor]] = {key: [] for key in layers}

    def note(key: int) -> Any:
        def hook(layer: nn.Module, args: tuple[Any, ...]) -> None:
            if torch.is_grad_enabled() and args:
                notes[key].append(args[0].detach())

        return hook

    with ExitStack() as registered:
        for key, layer in layers.items():
            handle = layer.register_forward_pre_hook(note(key))
            registered.callback(handle.remove)
        yield notes
