"""Ranks as processes of this machine: started, heard, and ended together.

::

    this process ── starts ──► rank 0 … rank n−1        one process each, gloo or NCCL, loopback
                 ◄── messages of every rank ──
                 one fails, or Ctrl-C ─► all are gone before the error is raised here

The processes are forked from one that has imported torch, so that it is imported once.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from pipeloom.errors import RankLost, StepError, StepFailed

__all__ = ["Post", "run_ranks"]

#: How a rank tells the starting process something.
Post = Callable[[Any], None]

PRELOADED = ("torch", "torch.distributed", "pipeloom.runtime.pipeline")
#: How long the other ranks may take to say what they know after one has failed, and to end.
GRACE_SECONDS = 10.0


def run_ranks(
    function: Callable[..., None],
    *arguments: Any,
    ranks: int,
    on_message: Callable[[int, Any], None],
    backend: str = "gloo",
) -> None:
    """Call ``function(rank, post, *arguments)`` in a process per rank, in one process group.

    ``on_message(rank, message)`` is called here for all that they post. Returns when every rank has
    returned. When one raises or dies, the others are ended and its error is raised here.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    # Hosted here, so that it outlives any rank.
    store = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    processes: list[BaseProcess] = []
    pipes: dict[Any, int] = {}
    try:
        for rank in range(ranks):
            here, there = context.Pipe(duplex=False)
            process = context.Process(
                target=_serve,
                args=(rank, ranks, store.port, backend, there, function, arguments),
                daemon=True,
                name=f"pipeloom rank {rank}",
            )
            process.start()
            there.close()
            processes.append(process)
            pipes[here] = rank
        _listen(pipes, processes, on_message)
    finally:
        _end(processes)
        for pipe in pipes:
            pipe.close()


def _listen(
    pipes: dict[Any, int],
    processes: list[BaseProcess],
    on_message: Callable[[int, Any], None],
) -> None:
    """Hear all ranks until all have ended; raise for the one that failed."""
    open_pipes = dict(pipes)
    failure: StepError | None = None
    lost: list[int] = []
    deadline: float | None = None
    done: set[int] = set()
    while open_pipes:
        left = None if deadline is None else max(deadline - time.monotonic(), 0)
        ready = wait(list(open_pipes), timeout=left)
        if not ready:
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = open_pipes[pipe]
            try:
                kind, message = pipe.recv()
            except (EOFError, ConnectionResetError):
                del open_pipes[pipe]
                if rank not in done:
                    lost.append(rank)
            else:
                if kind == "message":
                    on_message(rank, message)
                    continue
                done.add(rank)
                if kind == "failed" and failure is None:
                    failure = message
        if (failure or lost) and deadline is None:
            deadline = time.monotonic() + GRACE_SECONDS
        if failure is not None:
            # Every rank raises the same error: the first one to tell it will do.
            raise failure
    if lost:
        processes[lost[0]].join(GRACE_SECONDS)
        raise RankLost(
            f"rank {lost[0]} went away without a word: {_tell_exit(processes[lost[0]].exitcode)}",
            rank=lost[0],
        )


def _tell_exit(code: int | None) -> str:
    """What an exit status says.

    >>> _tell_exit(-9), _tell_exit(3), _tell_exit(None)
    ('its process was ended by SIGKILL', 'its process ended with status 3', 'its process hangs')
    """
    if code is None:
        return "its process hangs"
    if code < 0:
        return f"its process was ended by {signal.Signals(-code).name}"
    return f"its process ended with status {code}"


def _end(processes: list[BaseProcess]) -> None:
    """Let processes that have finished end, and end the others."""
    for process in processes:
        if process.is_alive():
            # One that still works hears SIGTERM; one that is at its end has no handler for it left.
            process.terminate()
    deadline = time.monotonic() + GRACE_SECONDS
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0))
    for process in processes:
        if process.is_alive():
            process.kill()
        process.join()


def _serve(
    rank: int,
    ranks: int,
    port: int,
    backend: str,
    pipe: Any,
    function: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:
    """The life of one rank."""
    # Ctrl-C reaches every process of the terminal; the one that started them ends them in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Without it gloo looks up this host's name, which can take seconds.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch.distributed as dist
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    try:
        store = TCPStore("127.0.0.1", port, None, is_master=False, wait_for_workers=False)
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
        function(rank, lambda message: pipe.send(("message", message)), *arguments)
        dist.destroy_process_group()
        pipe.send(("done", None))
    except StepError as error:
        _say(pipe, error)
    except BaseException as error:
        _say(
            pipe,
            StepFailed(
                f"rank {rank} failed: {type(error).__name__}: {error}\n\n"
                f"The traceback on rank {rank}:\n{traceback.format_exc()}",
                rank=rank,
                origin=traceback.format_exc(),
            ),
        )
    pipe.close()
    sys.stdout.flush()
    # Nothing is left to do; threads that wait for ranks which are gone must not hold the end up.
    os._exit(0)


def _say(pipe: Any, error: StepError) -> None:
    try:
        pipe.send(("failed", error))
    except OSError:
        return  # the process that started this one is gone
