"""Who records what a function does on a device, and plays it again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, TypeVar

import torch

__all__ = ["CudaRecorder", "Recorder"]

Result = TypeVar("Result")


class Recorder(Protocol):
    """Records on one device."""

    device: torch.device

    def aside(self) -> AbstractContextManager[object]:
        """Where warm-up and recordings run, apart from the caller's work, and after it."""

    def new_pool(self) -> Any:
        """Memory for recordings that are always played in one order."""

    def record(
        self, function: Callable[[], Result], pool: Any
    ) -> tuple[Result, Callable[[], object]]:
        """What the function returned, and what does the same again into the same memory."""

    def before_replay(self) -> None:
        """Called by whoever plays: recordings share memory, so they play one after another."""


class CudaRecorder:
    """CUDA graphs."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: torch.cuda.Stream | None = None
        self._played_on: torch.cuda.Stream | None = None

    @contextmanager
    def aside(self) -> Iterator[None]:
        # The engine runs backwards on the streams of their forwards: all on this one.
        with torch.cuda.device(self.device):
            self._stream = self._stream or torch.cuda.Stream(self.device)
            caller = torch.cuda.current_stream(self.device)
            self._stream.wait_stream(caller)
            with torch.cuda.stream(self._stream):
                yield
            caller.wait_stream(self._stream)

    def new_pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def record(
        self, function: Callable[[], Result], pool: Any
    ) -> tuple[Result, Callable[[], object]]:
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process (data loaders, process groups) go on calling CUDA meanwhile.
        mode = "thread_local"
        with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode=mode):
            result = function()
        return result, graph.replay

    def before_replay(self) -> None:
        current = torch.cuda.current_stream(self.device)
        if self._played_on is not None and self._played_on != current:
            current.wait_stream(self._played_on)
        self._played_on = current
