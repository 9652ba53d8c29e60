"""Who records what a function does on a device, and plays it again."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, TypeVar

import torch

from pipeloom.errors import PipeloomError

__all__ = ["CannotRecord", "CudaRecorder", "Recorder", "explain"]

Result = TypeVar("Result")


class CannotRecord(Exception):
    """Something in a function cannot be part of a recording; says what."""


class Recorder(Protocol):
    """Records on one device."""

    device: torch.device

    def aside(self) -> AbstractContextManager[object]:
        """Where warm-up and recordings run, apart from the caller's work, and after it."""

    def strictly(self) -> AbstractContextManager[object]:
        """Where what cannot be recorded raises :class:`CannotRecord`, though nothing is recorded:
        what fails in the middle of a recording may take the device along.
        """

    def new_pool(self) -> Any:
        """Memory for recordings that are always played in one order."""

    def record(
        self, function: Callable[[], Result], pool: Any
    ) -> tuple[Result, Callable[[], object]]:
        """What the function returned, and what does the same again into the same memory."""

    def before_replay(self) -> None:
        """Called before anything of a slot is written or played: recordings share memory, so they
        play one after another.
        """


class CudaRecorder:
    """CUDA graphs."""

    def __init__(self, device: torch.device) -> None:
        if device == torch.device("cuda"):
            device = torch.device("cuda", torch.cuda.current_device())
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
            try:
                with torch.cuda.stream(self._stream):
                    yield
            finally:
                # Also where it failed: what was changed is then put back, after the warm-up's work.
                caller.wait_stream(self._stream)
                self._played_on = caller

    @contextmanager
    def strictly(self) -> Iterator[None]:
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        except RuntimeError as error:
            if "synchronizing" not in str(error):
                raise
            raise CannotRecord(
                "its code waits for the device or copies from the host (item(), a branch on a "
                "tensor's values, torch.tensor(…, device=…)); the traceback says where"
            ) from error
        finally:
            torch.cuda.set_sync_debug_mode(before)

    def new_pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def record(
        self, function: Callable[[], Result], pool: Any
    ) -> tuple[Result, Callable[[], object]]:
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process (data loaders, process groups) go on calling CUDA meanwhile.
        mode = "thread_local"
        try:
            with warnings.catch_warnings():
                # I of a first stage may have nothing to compute.
                warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
                with torch.cuda.graph(
                    graph, pool=pool, stream=self._stream, capture_error_mode=mode
                ):
                    result = function()
        except (PipeloomError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            raise CannotRecord(explain(error)) from error
        return result, graph.replay

    def before_replay(self) -> None:
        current = torch.cuda.current_stream(self.device)
        if self._played_on is not None and self._played_on != current:
            current.wait_stream(self._played_on)
        self._played_on = current


def explain(error: RuntimeError) -> str:
    """What went wrong while something was recorded, and what to do."""
    # The end of a recording that failed raises an error of its own.
    first = error.__context__ if isinstance(error.__context__, RuntimeError) else error
    if "CUDAGeneratorImpl" in str(first):
        return (
            "a checkpoint in it saves the state of the random numbers, which a recording cannot; "
            "give it preserve_rng_state=False"
        )
    summary = str(first).strip().partition("\n")[0]
    return (
        f"recording failed: {summary}; an operation in it may wait for the device or copy from the "
        "host. CUDA may be of no more use to this process: begin a new one"
    )
