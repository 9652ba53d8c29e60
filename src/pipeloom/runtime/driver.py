"""Drives the ranks of this process, and says what went wrong on which of them.

::

    rank 0  ▶──────▌      ▶────▌     ▶──┤        ▌ has to wait: the next rank's turn
    rank 1         ▶────▌      ▶────▌   ▶───┤    ┤ done

One rank that can block runs straight to its end.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence

from pipeloom.errors import PipelineStalled, StepError, StepFailed
from pipeloom.runtime.executor import Executor

__all__ = ["drive", "make_failure"]


def drive(executors: Sequence[Executor]) -> None:
    """Run every executor to its end, each until it has to wait."""
    running: list[tuple[Executor, Iterator[None]]] = [(one, one.run()) for one in executors]
    while running:
        before = _where(executors)
        waiting = []
        for executor, steps in running:
            try:
                next(steps)
            except StopIteration:
                continue
            except StepError:
                raise
            except Exception as error:
                raise make_failure(error, executor) from error
            waiting.append((executor, steps))
        if len(waiting) == len(running) and before == _where(executors):
            raise _make_stall(executors)
        running = waiting


def _where(executors: Sequence[Executor]) -> list[tuple[int, object]]:
    return [(e.endpoint.progress.position, e.endpoint.progress.waits_for) for e in executors]


def _make_stall(executors: Sequence[Executor]) -> PipelineStalled:
    lines = []
    for executor in executors:
        progress = executor.endpoint.progress
        action = progress.current
        if action is None:
            lines.append(f"rank {executor.rank} has finished its program")
        else:
            lines.append(f"rank {executor.rank} waits at {action} for {progress.waits_for}")
    return PipelineStalled("no rank can go on: " + "; ".join(lines))


def make_failure(
    error: BaseException, executor: Executor, *, is_running: bool = True
) -> StepFailed:
    """The error that all ranks will raise for an exception on one of them."""
    action = executor.endpoint.progress.current if is_running else None
    stage = microbatch = None
    where = "outside of its program"
    if action is not None:
        stage, microbatch = action.stage, action.microbatch
        where = f"in {action}"
        if stage is not None:
            where += f" (stage {stage}"
            where += ")" if microbatch is None else f", microbatch {microbatch})"
    origin = "".join(traceback.format_exception(error))
    return StepFailed(
        f"rank {executor.rank} failed {where}: {type(error).__name__}: {error}\n\n"
        f"The traceback on rank {executor.rank}:\n{origin}",
        rank=executor.rank,
        stage=stage,
        microbatch=microbatch,
        action=None if action is None else str(action),
        origin=origin,
    )
