"""Records the operations of a function, and plays them again into the same memory.

What a CUDA graph does, on any device: operations are remembered with the memory that they read and
wrote, and playing them runs no code but theirs. Python values, hooks and branches of the first time
are as frozen as in a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from pipeloom.runtime.backward.cuda_graphs.recorder import CannotRecord

# What a device could not do without asking the host.
ASKS_THE_HOST = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal")


class Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(name in str(func) for name in ASKS_THE_HOST):
            raise CannotRecord(f"{func} asks the host")
        result = func(*args, **(kwargs or {}))
        # The memory, not the tensors, which Python may change afterwards.
        self.operations.append(tree_map_only(Tensor, Tensor.detach, (func, args, kwargs, result)))
        return result

    @torch.no_grad()
    def play(self) -> None:
        for func, args, kwargs, result in self.operations:
            again = func(*args, **(kwargs or {}))
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class OpRecorder:
    """A recorder for captured stages on the CPU."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.num_recorded = 0
        self.num_played = 0

    def aside(self) -> Any:
        return nullcontext()

    def strictly(self) -> Any:
        return Recording()

    def new_pool(self) -> None:
        return None

    def record(self, function: Callable[[], Any], pool: None) -> tuple[Any, Callable[[], None]]:
        self.num_recorded += 1
        with Recording() as recording:
            result = function()
        return result, recording.play

    def before_replay(self) -> None:
        self.num_played += 1
