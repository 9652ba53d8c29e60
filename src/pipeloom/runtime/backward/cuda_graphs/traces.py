"""What a run of a forward leaves behind besides its results, and a replay would not.

::

    forward ──► results
        ├─────► random numbers: drawn on the device, or on the host
        └─────► tensors put in the place of buffers, or kept as attributes
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.runtime.backward.checkpointing import saves_recomputed
from pipeloom.runtime.backward.decide import REENTRANT_CHECKPOINT
from pipeloom.runtime.backward.walk import Graph

__all__ = ["Traces"]


class Traces:
    """Made before a run; tells afterwards what in it stands in the way of a capture."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module, self._device = module, device
        self._buffers = dict(module.named_buffers())
        self._attributes = dict(_attributes(module))
        self._drawn, self._drawn_on_host = _on_device(device), _on_host(device)

    def obstacles(self, graph: Graph, *, is_first: bool) -> list[str]:
        """``graph`` is that of the run. The first may fill tables that later ones find."""
        found: list[str] = []
        if self._drawn != _on_device(self._device) and any(
            saves_recomputed(node) or type(node).__name__ == REENTRANT_CHECKPOINT
            for node in graph.nodes
        ):
            found.append(
                "a checkpoint in it recomputes random numbers, which come out differently at a "
                "replay; leave out the checkpoint, or what is random"
            )
        if self._drawn_on_host != _on_host(self._device):
            found.append(
                "its forward draws random numbers on the host, and what it did with them would be "
                "the same at every replay; draw them on the device, or outside of the stage"
            )
        found += [
            f"its forward puts another tensor in the place of buffer {name}; change it in place"
            for name, buffer in self._module.named_buffers()
            if not is_first and self._buffers.get(name) is not buffer
        ]
        found += [
            f"its forward keeps a new tensor as {name}, where a replay would leave that of another "
            "microbatch; return it instead"
            for name, tensor in _attributes(self._module)
            if not is_first and self._attributes.get(name) is not tensor
        ]
        return found


def _attributes(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Tensors that the parts of a module keep beside parameters and buffers."""
    for part_name, part in module.named_modules():
        for name, value in vars(part).items():
            if isinstance(value, Tensor):
                yield f"{part_name}.{name}" if part_name else name, value


def _on_device(device: torch.device) -> list[int]:
    on_cuda = device.type == "cuda"
    state = torch.cuda.get_rng_state(device) if on_cuda else torch.get_rng_state()
    return list(state.tolist())


def _on_host(device: torch.device) -> tuple[Any, ...]:
    """The states of all generators whose numbers the device does not make."""
    states: list[Any] = [random.getstate()]
    if device.type != "cpu":
        states.append(_on_device(torch.device("cpu")))
    if "numpy" in sys.modules:
        states.append(repr(sys.modules["numpy"].random.get_state(legacy=False)))
    return tuple(states)
