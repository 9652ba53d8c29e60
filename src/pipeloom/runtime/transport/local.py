"""Every rank in this process: messages are handed over, nothing is copied, nothing waits.

::

    rank 0   post_send ──► queue of 0→1 ──► wait   rank 1
    rank 0   post_sum ───► ┐
    rank 1   post_sum ───► ┴ the last to arrive adds up for all

A rank that would have to wait is told so (``wait`` returns ``None``) and yields to the others, so
one thread runs them all, in an order that depends on the program alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from pipeloom.errors import StepError
from pipeloom.ir.schedule import Schedule
from pipeloom.runtime.transport.protocol import Edge, Header, Message, Progress

__all__ = ["LocalEndpoint", "LocalTransport"]

_DONE = Message(Header(()), [])


class _Receive:
    """A receive that was posted; messages of an edge are handed out in the order of posting."""

    __slots__ = ("edge", "message")

    def __init__(self, edge: Edge) -> None:
        self.edge = edge
        self.message: Message | None = None


class _Sum:
    """A sum over several ranks, until all have come."""

    __slots__ = ("contributions", "done", "ranks")

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        self.contributions: dict[int, Sequence[Tensor]] = {}
        self.done = False

    def add_up(self) -> None:
        columns = [self.contributions[rank] for rank in self.ranks]
        for tensors in zip(*columns, strict=True):
            total = tensors[0].clone()
            for tensor in tensors[1:]:
                total += tensor
            for tensor in tensors:
                tensor.copy_(total)
        self.contributions.clear()
        self.done = True


class LocalTransport:
    """The transport of :class:`pipeloom.LocalPipeline`: all ranks are local."""

    #: A message waits in its queue however late the receiver is; the queues of different edges are
    #: independent.
    sends = "buffered"
    channel = "edge"

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.local_ranks: Sequence[int] = range(num_ranks)
        self._endpoints = [LocalEndpoint(self, rank) for rank in range(num_ranks)]
        self._sent: dict[Edge, deque[Message]] = {}
        self._waiting: dict[Edge, deque[_Receive]] = {}
        self._headers: dict[Edge, Header] = {}
        self._sums: dict[int, _Sum] = {}

    def connect(self, schedule: Schedule) -> None:
        """Nothing to open: all ranks are here and run the same program."""

    def endpoint(self, rank: int) -> LocalEndpoint:
        return self._endpoints[rank]

    def begin_step(self, number: int) -> None:
        """Nothing to watch: a rank that stands still is seen by whoever drives the ranks."""

    def end_step(self) -> None:
        """All messages were taken, or the program would not have verified."""
        assert not any(self._sent.values()), "messages were left over"
        assert not any(self._waiting.values()), "receives were left over"

    def sum_over_processes(self, tensor: Tensor) -> Tensor:
        return tensor

    def gather_objects(self, values: Sequence[object]) -> list[Any]:
        return list(values)

    def clock_offsets(self) -> Sequence[float]:
        return (0.0,) * self.num_ranks

    def fail(self, error: StepError) -> StepError:
        """Forget what was under way, and with it every tensor."""
        for store in (self._sent, self._waiting, self._headers, self._sums):
            store.clear()
        return error

    def close(self) -> None:
        """Nothing to let go of."""

    # ── for the endpoints ────────────────────────────────────────────────────────────────────

    def _send(self, edge: Edge, tensors: Sequence[Tensor], header: Header | None) -> None:
        if header is None:
            header = self._headers[edge]
        else:
            self._headers[edge] = header
        # An alias of its own for the receiver, who will decide whether it needs a gradient.
        message = Message(header, [tensor.detach() for tensor in tensors])
        waiting = self._waiting.get(edge)
        if waiting:
            waiting.popleft().message = message
        else:
            self._sent.setdefault(edge, deque()).append(message)

    def _receive(self, edge: Edge) -> _Receive:
        ticket = _Receive(edge)
        sent = self._sent.get(edge)
        if sent:
            ticket.message = sent.popleft()
        else:
            self._waiting.setdefault(edge, deque()).append(ticket)
        return ticket

    def _sum(self, rank: int, stage: int, ranks: Sequence[int], tensors: Sequence[Tensor]) -> _Sum:
        ticket = self._sums.setdefault(stage, _Sum(ranks))
        ticket.contributions[rank] = tensors
        if len(ticket.contributions) == len(ticket.ranks):
            del self._sums[stage]
            ticket.add_up()
        return ticket


class LocalEndpoint:
    """What one rank sees of a :class:`LocalTransport`."""

    def __init__(self, transport: LocalTransport, rank: int) -> None:
        self.rank = rank
        self.progress = Progress()
        self._transport = transport

    def post_send(
        self, edge: Edge, microbatch: int, tensors: Sequence[Tensor], header: Header | None
    ) -> None:
        self._transport._send(edge, tensors, header)

    def post_receive(self, edge: Edge, microbatch: int, *, new_header: bool) -> _Receive:
        return self._transport._receive(edge)

    def post_sum(self, stage: int, ranks: Sequence[int], tensors: Sequence[Tensor]) -> _Sum:
        return self._transport._sum(self.rank, stage, ranks, tensors)

    def wait(self, ticket: _Receive | _Sum) -> Message | None:
        if isinstance(ticket, _Sum):
            return _DONE if ticket.done else None
        message = ticket.message
        ticket.message = None
        return message

    def flush(self) -> bool:
        return True
