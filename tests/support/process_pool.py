"""Processes that stay alive between tests: one gloo process group on loopback.

::

    test ── pool.run(function, *args) ──► rank 0: function(*args) ┐
                                          rank 1: function(*args) ├─► [result 0, result 1, …]
                                          …                       ┘

The processes are forked from one that has imported torch already, so that a pool is there in a
fraction of a second. A test that takes too long fails with the stacks of all ranks; after that, or
when a rank died, the next test gets new processes.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

PRELOADED = ("torch", "torch.distributed", "torch.distributed.fsdp", "pipeloom.runtime.pipeline")

#: So much of what a rank printed is shown when it fails.
LOG_CHARACTERS = 6000

Function = Callable[..., Any]


class RankError(AssertionError):
    """A rank raised where it should not have; the message is its traceback."""


@dataclass
class Died:
    """The result of a rank whose process ended, as a test may expect."""

    exitcode: int | None


@dataclass
class ProcessPool:
    """``size`` ranks. With ``rank_0_hosts_store`` the store dies with rank 0, as it does where
    nobody but the ranks is there; otherwise it lives on, as it does under torchrun."""

    size: int
    rank_0_hosts_store: bool = False
    _processes: list[BaseProcess] = field(default_factory=list)
    _pipes: list[Connection] = field(default_factory=list)
    _logs: list[Path] = field(default_factory=list)
    _store: Any = None

    def run(
        self,
        function: Function,
        *args: Any,
        timeout: float = 60.0,
        may_die: Sequence[int] = (),
    ) -> list[Any]:
        """Call the function on every rank; what each returned, in order of ranks."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args))
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        deadline = time.monotonic() + timeout
        while missing := [r for r in range(self.size) if r not in results and r not in errors]:
            by_handle: dict[Any, int] = {self._pipes[rank]: rank for rank in missing}
            ready = wait(list(by_handle), timeout=max(deadline - time.monotonic(), 0))
            if not ready:
                stacks = self._stop_and_tell_stacks(missing)
                raise AssertionError(f"ranks {missing} took longer than {timeout:g} s\n{stacks}")
            for handle in ready:
                rank = by_handle[handle]
                try:
                    kind, value = self._pipes[rank].recv()
                except (EOFError, ConnectionResetError):
                    self._processes[rank].join(10)
                    kind, value = "died", Died(self._processes[rank].exitcode)
                if kind == "raised" or (kind == "died" and rank not in may_die):
                    errors[rank] = f"{value}\n{self._log_of(rank)}"
                    # The others may wait for this rank; they get a moment to say what they know.
                    deadline = min(deadline, time.monotonic() + 10)
                else:
                    results[rank] = value
        if errors or any(isinstance(result, Died) for result in results.values()):
            self.stop()
        if errors:
            raise RankError("\n".join(f"── rank {r}\n{text}" for r, text in errors.items()))
        return [results[rank] for rank in range(self.size)]

    def stop(self) -> None:
        """End the processes; the next run starts new ones."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        for log in self._logs:
            log.unlink(missing_ok=True)
        self._processes, self._pipes, self._logs, self._store = [], [], [], None

    def pid_of(self, rank: int) -> int:
        """The process id of a rank."""
        if not self._processes:
            self._start()
        pid = self._processes[rank].pid
        assert pid is not None
        return pid

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOADED))
        port = 0 if self.rank_0_hosts_store else self._host_store()
        for rank in range(self.size):
            here, there = context.Pipe()
            handle, log = tempfile.mkstemp(prefix=f"pool-rank-{rank}-", suffix=".log")
            os.close(handle)
            process = context.Process(
                target=_serve, args=(rank, self.size, port, there, log), daemon=True
            )
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)
            self._logs.append(Path(log))
            if port == 0:
                port = here.recv()

    def _host_store(self) -> int:
        from torch.distributed import TCPStore

        self._store = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        return int(self._store.port)

    def _stop_and_tell_stacks(self, ranks: Sequence[int]) -> str:
        for rank in ranks:
            os.kill(self.pid_of(rank), signal.SIGUSR1)
        time.sleep(0.5)
        text = "\n".join(self._log_of(rank) for rank in range(self.size))
        self.stop()
        return text

    def _log_of(self, rank: int) -> str:
        text = self._logs[rank].read_text(errors="replace")
        return f"── output of rank {rank}\n{text[-LOG_CHARACTERS:]}"


def _serve(rank: int, size: int, port: int, pipe: Connection, log: str) -> None:
    """The life of one rank: join the group, then do what is asked."""
    output = Path(log).open("w", buffering=1)  # noqa: SIM115 - as long as the process lives
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    sys.stdout = sys.stderr = output
    faulthandler.register(signal.SIGUSR1, file=output, all_threads=True)
    # Without it gloo looks up this host's name, which can take seconds.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, None, is_master=port == 0, wait_for_workers=False)
    if port == 0:
        pipe.send(store.port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            pipe.send(("returned", function(*args)))
        except BaseException:
            pipe.send(("raised", traceback.format_exc()))
