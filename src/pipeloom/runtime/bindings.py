"""Programs bound to what runs them, kept for the next step.

::

    (8 microbatches, training, not watched) ──► one Executor per rank of this process
    (8 microbatches, training, watched)     ──► others, whose calls have hooks around them

Nobody watching costs nothing: what is watched is bound a second time.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pipeloom.ir.schedule import Schedule
from pipeloom.runtime.executor import Executor, RankParts
from pipeloom.runtime.hooks import Hooks
from pipeloom.runtime.messages import Promises
from pipeloom.runtime.observer import Observer, somebody_follows
from pipeloom.runtime.options import Options
from pipeloom.runtime.recorder import RankRecorder
from pipeloom.runtime.transport.protocol import Transport

__all__ = ["Bindings"]

#: Bindings are kept for this many programs.
MOST_BOUND = 32


class Bindings:
    """The executors of one pipeline's programs."""

    def __init__(
        self,
        transport: Transport,
        hooks: Hooks,
        promises: Mapping[int, Promises],
        recorders: Mapping[int, RankRecorder],
    ) -> None:
        self._transport = transport
        self._hooks = hooks
        self._promises = promises
        self._recorders = recorders
        #: (microbatches, training) of the programs that the transport is ready for.
        self._connected: set[tuple[int, bool]] = set()
        #: (microbatches, training, watched) → executors and what they were bound for.
        self._bound: dict[tuple[int, bool, bool], tuple[object, list[Executor]]] = {}

    def find(
        self, program: Schedule, parts: RankParts, options: Options, *, is_recorded: bool
    ) -> list[Executor]:
        """The program of every local rank, bound."""
        watched = bool(self._hooks) or is_recorded or _profiler_is_on() or somebody_follows()
        key = (program.num_microbatches, program.has_backward, watched)
        stamp = (program, self._hooks.version, is_recorded) if watched else (program,)
        known = self._bound.get(key)
        if known is not None and known[0] == stamp:
            return known[1]
        if key[:2] not in self._connected:
            # All ranks together: what one of them watches or forgets must not matter here.
            self._transport.connect(program)
            self._connected.add(key[:2])
        executors = [
            Executor(
                rank,
                program,
                self._transport.endpoint(rank),
                parts,
                handlers=options.handlers_by_kind(),
                promises=self._promises[rank],
                observer=self._observe(rank, options, is_recorded) if watched else None,
            )
            for rank in self._transport.local_ranks
        ]
        if len(self._bound) >= MOST_BOUND:
            self._bound.pop(next(iter(self._bound)))
        self._bound[key] = (stamp, executors)
        return executors

    def _observe(self, rank: int, options: Options, is_recorded: bool) -> Observer:
        recorder = self._recorders[rank] if is_recorded else None
        return Observer(self._hooks, recorder, options.profiler_name)

    def clear(self) -> None:
        """Bind anew: parts or handlers are others now."""
        self._bound.clear()


def _profiler_is_on() -> bool:
    return bool(torch._C._autograd._profiler_enabled())
