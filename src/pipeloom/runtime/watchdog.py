"""The failure watcher of a process: who failed, who died, who stands still.

::

    rank 1   raises in 1B3 ──► store: first error wins ──► "failed" to all ──► hangs up
    rank 0   watcher hears "failed", or the silence of a closed connection
             ──► hangs up its channels ──► the main thread, woken where it waits, raises

One thread per process listens on a control connection to every other process. It sleeps until
something comes in, or until it is time to look whether this rank still moves. When this rank has
not moved for the timeout, it asks the others; when nobody has, that is a stall.

The first error anywhere becomes the error of all ranks: the store of the process group decides
between errors that happen at the same time.
"""

from __future__ import annotations

import base64
import pickle
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pipeloom.errors import RankLost, StepError
from pipeloom.runtime.stall import RankReport, explain_stall
from pipeloom.runtime.transport.connections import hang_up

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["Watcher"]

_LENGTH = struct.Struct("!I")
#: How long the store may take to decide between errors; it may be gone with its host.
_STORE_SECONDS = 2.0
#: How long others may take to tell what they are doing, or to notice what this rank noticed.
_ANSWER_SECONDS = 3.0
#: How long a control message may take to leave; a process that is stopped takes none.
_SEND_SECONDS = 1.0


class Watcher:
    """Watches the other processes through control connections, and this one through ``report``."""

    def __init__(
        self,
        rank: int,
        connections: Mapping[int, socket.socket],
        descriptions: Sequence[str],
        *,
        store: Store,
        failure_key: str,
        timeout: float,
        report: Callable[[], RankReport],
        on_failure: Callable[[], None],
    ) -> None:
        self.rank = rank
        self.timeout = timeout
        self.failure: StepError | None = None
        self._connections = dict(connections)
        self._descriptions = descriptions
        self._store = store
        self._failure_key = failure_key
        self._report = report
        self._on_failure = on_failure
        self._news = threading.Condition()
        self._settling = threading.Lock()
        self._sending = threading.Lock()
        self._left: set[int] = set()
        self._step: str | None = None
        self._last_step: str | None = None
        self._closed = threading.Event()
        # Of the watcher's thread alone.
        self._incoming = {peer: bytearray() for peer in connections}
        self._last_seen: tuple[object, ...] = ()
        self._still_since = time.monotonic()
        self._question: float | None = None
        self._answers: dict[int, RankReport] = {}
        self._ask_not_before = 0.0
        self._alarm, self._alarm_bell = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._alarm, selectors.EVENT_READ, None)
        for peer, connection in self._connections.items():
            connection.settimeout(_SEND_SECONDS)
            self._selector.register(connection, selectors.EVENT_READ, peer)
        self._thread = threading.Thread(
            target=self._watch, name="pipeloom watches for failures", daemon=True
        )
        self._thread.start()

    # ── for the main thread ──────────────────────────────────────────────────────────────────

    def begin(self, step: str) -> None:
        """From here on standing still counts; raises if a rank failed.

        A rank that left may have done its part of this step already: it is missed when this rank
        waits for it.
        """
        self.raise_failure()
        self._step = step

    def end(self) -> None:
        """Between steps nobody has to move."""
        self._step, self._last_step = None, self._step

    def fail(self, error: StepError) -> StepError:
        """Tell everybody; the error that all ranks raise, which another rank may have been first
        to have."""
        self._settle(error)
        assert self.failure is not None
        return self.failure

    def raise_failure(self) -> None:
        """Raise the error of all ranks if there is one."""
        if self.failure is not None:
            raise pickle.loads(pickle.dumps(self.failure))

    def explain_lost_connection(self, peer: int, error: BaseException) -> StepError:
        """What happened when the connection to a peer broke: usually the watcher hears why."""
        with self._news:
            self._news.wait_for(
                lambda: self.failure is not None or peer in self._left, _ANSWER_SECONDS
            )
        if self.failure is None:
            if peer in self._left:
                self._settle(self._say_left(peer))
            else:
                self._settle(
                    RankLost(
                        f"rank {self.rank} lost its connection to {self._name(peer)}: {error}",
                        rank=peer,
                    )
                )
        assert self.failure is not None
        return self.failure

    def close(self) -> None:
        """Say good-bye and stop watching. May be called twice."""
        if self._closed.is_set():
            return
        self._closed.set()
        if self.failure is None:
            self._tell_all(("bye", self.rank))
        with suppress(OSError):
            self._alarm_bell.send(b"!")
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=_ANSWER_SECONDS)
        for connection in self._connections.values():
            hang_up(connection)
        if not self._thread.is_alive():
            self._let_go()

    def _let_go(self) -> None:
        """Close what the watcher's thread used. What a peer said last is read before, since closing
        with something unread would take back the good-bye that is still on its way to it."""
        for connection in self._connections.values():
            with suppress(OSError):
                while connection.recv(1 << 16, socket.MSG_DONTWAIT):
                    pass
            connection.close()
        self._alarm.close()
        self._alarm_bell.close()

    def forget_connections(self) -> None:
        """In a forked child: its copies of the connections must not keep them open."""
        self._closed.set()
        for connection in self._connections.values():
            connection.close()

    # ── the thread ───────────────────────────────────────────────────────────────────────────

    def _watch(self) -> None:
        while not self._closed.is_set():
            for key, _ in self._selector.select(self._seconds_until_next_look()):
                if key.data is not None:
                    self._read(key.data)
            if not self._closed.is_set() and self.failure is None:
                self._look_for_stall()
        self._selector.close()

    def _read(self, peer: int) -> None:
        connection = self._connections[peer]
        data = b""
        with suppress(ConnectionError, TimeoutError):
            data = connection.recv(1 << 16)
        if not data:
            self._selector.unregister(connection)
            if peer not in self._left and self.failure is None and not self._closed.is_set():
                self._settle(self._say_lost(peer))
            return
        buffer = self._incoming[peer]
        buffer += data
        while len(buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer)
            if len(buffer) < _LENGTH.size + length:
                break
            frame = bytes(buffer[_LENGTH.size : _LENGTH.size + length])
            del buffer[: _LENGTH.size + length]
            self._understand(peer, *pickle.loads(frame))

    def _understand(self, peer: int, word: str, content: Any) -> None:
        if word == "failed":
            self._settle(content, decided=True)
        elif word == "bye":
            with self._news:
                self._left.add(peer)
                self._news.notify_all()
        elif word == "what are you doing?":
            self._tell(peer, ("answer", self._report_myself()))
        elif word == "answer" and self._question is not None:
            self._answers[peer] = content

    # ── standing still ───────────────────────────────────────────────────────────────────────

    def _seconds_until_next_look(self) -> float:
        if self._question is not None:
            return 0.05
        return min(max(self.timeout / 8, 0.02), 10.0)

    def _look_for_stall(self) -> None:
        mine = self._report_myself()
        if mine.step is None or mine.still_for < self.timeout:
            self._question = None
            return
        if self._left:
            self._settle(self._say_left(min(self._left)))
            return
        now = time.monotonic()
        if self._question is None:
            if now >= self._ask_not_before:
                self._question = now
                self._answers = {}
                self._tell_all(("what are you doing?", None))
            return
        missing = self._connections.keys() - self._answers.keys()
        if missing and now - self._question < _ANSWER_SECONDS:
            return
        asked, self._question = self._question, None
        reports = [mine, *self._answers.values()]
        reports += [RankReport(rank=peer, answered=False) for peer in missing]
        moved = [r.still_for for r in reports if r.answered and r.still_for < 0.9 * self.timeout]
        if moved:
            self._ask_not_before = asked + self.timeout - min(moved)
            return
        self._settle(explain_stall(reports, timeout=self.timeout, step=mine.step))

    def _report_myself(self) -> RankReport:
        """What this rank is doing, and for how long, as far as this thread has seen."""
        report = self._report()
        seen = (self._step, self._last_step, report)
        now = time.monotonic()
        if seen != self._last_seen:
            self._last_seen, self._still_since = seen, now
        return replace(
            report,
            step=self._step,
            last_step=self._last_step,
            still_for=now - self._still_since,
        )

    # ── failing ──────────────────────────────────────────────────────────────────────────────

    def _settle(self, error: StepError, *, decided: bool = False) -> None:
        """Make an error the one of this process, tell the others, wake the main thread."""
        with self._settling:
            if self.failure is not None:
                return
            if not decided:
                error = self._agree_on_first_error(error)
            with self._news:
                self.failure = error
                self._news.notify_all()
            if not decided:
                self._tell_all(("failed", error))
        self._on_failure()

    def _agree_on_first_error(self, error: StepError) -> StepError:
        """Publish the error; the one that some rank published first. Without a store, this one."""
        winner = [error]

        def publish() -> None:
            with suppress(RuntimeError):
                mine = base64.b64encode(pickle.dumps(error)).decode()
                published = self._store.compare_set(self._failure_key, "", mine)
                winner[0] = pickle.loads(base64.b64decode(published))

        # In a thread of its own: the host of the store may be stopped, and then nothing returns.
        thread = threading.Thread(target=publish, name="pipeloom publishes an error", daemon=True)
        thread.start()
        thread.join(_STORE_SECONDS)
        return winner[0]

    def _say_lost(self, peer: int) -> RankLost:
        when = f"in {self._step}" if self._step is not None else "between steps"
        return RankLost(
            f"{self._name(peer)} went away without a word {when}: it was killed or crashed, or "
            f"its host is gone. Its own output and the system's log (out of memory?) may say why.",
            rank=peer,
        )

    def _say_left(self, peer: int) -> RankLost:
        return RankLost(
            f"{self._name(peer)} closed its pipeline or ended its program while rank {self.rank} "
            f"still needed it for a step. All ranks must run the same number of steps.",
            rank=peer,
        )

    def _name(self, peer: int) -> str:
        return f"rank {peer} ({self._descriptions[peer]})"

    def _tell_all(self, frame: tuple[str, object]) -> None:
        for peer in self._connections:
            self._tell(peer, frame)

    def _tell(self, peer: int, frame: tuple[str, object]) -> None:
        data = pickle.dumps(frame)
        with self._sending, suppress(OSError):
            self._connections[peer].sendall(_LENGTH.pack(len(data)) + data)
