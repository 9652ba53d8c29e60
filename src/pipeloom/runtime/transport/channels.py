"""Messages between two processes over a connection: one sender and one receiver per direction.

::

    message   ┌ prefix: stages of the edge, microbatch, sizes ┬ header, if any ┬ tensors' bytes ┐

Nothing here blocks the rank that posts. A small message goes straight into the connection and is
read by the rank that waits for it: the kernel's buffers carry it while both compute. A large one,
and what the kernel does not take at once, is moved by a helper thread of the channel, which lets go
of a sent tensor when the last byte is out. Whoever waits, rank or helper, waits inside the
connection, so hanging up wakes them all.
"""

from __future__ import annotations

import ctypes
import pickle
import socket
import struct
import threading
from collections import deque
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from pipeloom.runtime.transport.buffers import allocate, count_bytes
from pipeloom.runtime.transport.connections import (
    hang_up,
    receive_exactly,
    receive_into,
    send_all,
    send_without_waiting,
)
from pipeloom.runtime.transport.protocol import Edge, Header, Message

__all__ = ["LARGE_MESSAGE", "Receiver", "Sender", "Ticket", "WrongMessage"]

#: From this size on a helper thread moves a message, so that the rank computes meanwhile.
LARGE_MESSAGE = 1 << 20

_PREFIX = struct.Struct("!IIIIQ")
_NO_HEADER = 0
#: The header is the last one of this edge again; it need not travel.
_SAME_HEADER = 0xFFFF_FFFF


class WrongMessage(ConnectionError):
    """Another message came than the one expected: the ranks do not run the same program."""


class Ticket:
    """A receive that was posted."""

    __slots__ = ("arrived", "channel", "edge", "error", "message", "microbatch", "new_header")

    def __init__(self, channel: Any, edge: Edge, microbatch: int, new_header: bool) -> None:
        self.channel = channel
        self.edge = edge
        self.microbatch = microbatch
        self.new_header = new_header
        self.message: Message | None = None
        self.error: BaseException | None = None
        #: Held until the helper has read the message; ``None`` if the rank reads it itself.
        self.arrived: threading.Lock | None = None


class Sender:
    """The sending end of a directed pair of ranks."""

    def __init__(self, connection: socket.socket, name: str) -> None:
        self._connection = connection
        self._name = name
        self._last_headers: dict[Edge, Header] = {}
        self._queue: SimpleQueue[Any] = SimpleQueue()
        self._helper: threading.Thread | None = None
        self._state = threading.Condition()
        self._num_pending = 0
        self._error: OSError | None = None
        #: The edge of the newest message, to tell what a rank waits for at the end of a step.
        self.last_edge: Edge | None = None

    def post(
        self, edge: Edge, microbatch: int, tensors: Sequence[Tensor], header: Header | None
    ) -> None:
        """Begin to send; ``OSError`` if the connection is known to be gone."""
        if header is None and not tensors:
            return
        self.last_edge = edge
        described = b""
        header_length = _NO_HEADER
        if header is not None:
            if self._last_headers.get(edge) == header:
                header_length = _SAME_HEADER
            else:
                self._last_headers[edge] = header
                described = pickle.dumps(header, pickle.HIGHEST_PROTOCOL)
                header_length = len(described)
        ready = None
        if tensors and tensors[0].device.type != "cpu":
            tensors, ready = _copy_to_host(tensors)
        views = view_bytes(tensors)
        num_bytes = sum(view.nbytes for view in views)
        prefix = _PREFIX.pack(edge.source, edge.target, microbatch, header_length, num_bytes)
        buffers = [memoryview(prefix + described), *views]
        if not self._num_pending and ready is None and num_bytes < LARGE_MESSAGE:
            buffers = send_without_waiting(self._connection, buffers)
            if not buffers:
                return
        self._hand_over(buffers, tensors, ready)

    def flush(self) -> None:
        """Wait until everything posted is out; ``OSError`` if the connection is gone."""
        if self._num_pending:
            with self._state:
                self._state.wait_for(lambda: not self._num_pending)
        if self._error is not None:
            raise self._error

    @property
    def is_busy(self) -> bool:
        """True while the helper has something to send."""
        return self._num_pending > 0

    def hang_up(self) -> None:
        """Wake whoever sends; what was not sent is dropped."""
        hang_up(self._connection)

    def close(self) -> None:
        """End the helper and close the connection."""
        if self._helper is not None:
            self._queue.put(None)
            self._helper.join()
        self._connection.close()

    def forget(self) -> None:
        """Close a forked child's copy of the connection."""
        self._connection.close()

    def _hand_over(self, buffers: list[memoryview], owners: object, ready: Any) -> None:
        with self._state:
            self._num_pending += 1
        self._queue.put((buffers, owners, ready))
        if self._helper is None:
            self._helper = threading.Thread(
                target=self._send_queued, name=f"pipeloom sends {self._name}", daemon=True
            )
            self._helper.start()

    def _send_queued(self) -> None:
        while (item := self._queue.get()) is not None:
            buffers, owners, ready = item
            try:
                if ready is not None:
                    ready.synchronize()
                send_all(self._connection, buffers)
            except OSError as error:
                self._error = error
            # The tensors are not to live until the next message.
            del item, buffers, owners, ready
            with self._state:
                self._num_pending -= 1
                if not self._num_pending:
                    self._state.notify_all()


class Receiver:
    """The receiving end of a directed pair of ranks. Messages come in the order of posting."""

    def __init__(self, connection: socket.socket, name: str, device: torch.device) -> None:
        self._connection = connection
        self._name = name
        self._device = device
        self._headers: dict[Edge, Header] = {}
        self._is_large: dict[Edge, bool] = {}
        #: What the rank reads when it waits.
        self._unread: deque[Ticket] = deque()
        #: What the helper reads. Each counter is written by one thread only.
        self._queue: SimpleQueue[Ticket | None] = SimpleQueue()
        self._num_handed_over = 0
        self._num_read_by_helper = 0
        self._helper: threading.Thread | None = None

    def post(self, edge: Edge, microbatch: int, new_header: bool) -> Ticket:
        """Begin to receive the next message of an edge."""
        ticket = Ticket(self, edge, microbatch, new_header)
        self._unread.append(ticket)
        helper_is_reading = self._num_handed_over != self._num_read_by_helper
        if helper_is_reading or self._is_large.get(edge, False):
            self._hand_over()
        return ticket

    def finish(self, ticket: Ticket) -> Message:
        """Wait for a message; ``OSError`` or ``EOFError`` if the connection is gone."""
        if ticket.arrived is not None:
            ticket.arrived.acquire()
            if ticket.error is not None:
                raise ticket.error
        else:
            while ticket.message is None:
                self._read(self._unread.popleft())
        message, ticket.message = ticket.message, None
        assert message is not None, "a ticket is waited for once"
        return message

    def hang_up(self) -> None:
        """Wake whoever reads."""
        hang_up(self._connection)

    def close(self) -> None:
        """End the helper and close the connection."""
        if self._helper is not None:
            self._queue.put(None)
            self._helper.join()
        self._connection.close()

    def forget(self) -> None:
        """Close a forked child's copy of the connection."""
        self._connection.close()

    def _hand_over(self) -> None:
        """Let the helper read everything posted so far."""
        while self._unread:
            ticket = self._unread.popleft()
            ticket.arrived = threading.Lock()
            ticket.arrived.acquire()
            self._num_handed_over += 1
            self._queue.put(ticket)
        if self._helper is None:
            self._helper = threading.Thread(
                target=self._read_queued, name=f"pipeloom receives {self._name}", daemon=True
            )
            self._helper.start()

    def _read_queued(self) -> None:
        while (ticket := self._queue.get()) is not None:
            try:
                self._read(ticket)
            except BaseException as error:
                ticket.error = error
            self._num_read_by_helper += 1
            assert ticket.arrived is not None
            ticket.arrived.release()
            del ticket

    def read_header(self, ticket: Ticket) -> None:
        """Read the header that precedes a message."""
        edge = ticket.edge
        header_length = self._check(ticket, receive_exactly(self._connection, _PREFIX.size))
        if header_length != _SAME_HEADER:
            header = pickle.loads(receive_exactly(self._connection, header_length))
            self._headers[edge] = header
            self._is_large[edge] = count_bytes(header.tensors) >= LARGE_MESSAGE

    def expect_renewal(self, ticket: Ticket) -> None:
        """The header that holds may say that this message brings a new one."""
        header = self._headers.get(ticket.edge)
        if header is not None and ticket.microbatch in header.renewed:
            ticket.new_header = True

    def header_of(self, edge: Edge) -> Header:
        """The header that holds for the messages of an edge."""
        return self._headers[edge]

    def _read(self, ticket: Ticket) -> None:
        prefix = None
        self.expect_renewal(ticket)
        if ticket.new_header:
            self.read_header(ticket)
        header = self._headers[ticket.edge]
        tensors = []
        if header.tensors:
            tensors = allocate(header.tensors)
            views = view_bytes(tensors)
            if not ticket.new_header:
                prefix = bytearray(_PREFIX.size)
                views.insert(0, memoryview(prefix))
            receive_into(self._connection, views)
            if prefix is not None:
                self._check(ticket, prefix)
        if self._device.type != "cpu":
            tensors = [tensor.to(self._device) for tensor in tensors]
        ticket.message = Message(header, tensors)

    def _check(self, ticket: Ticket, prefix: bytearray) -> int:
        """Compare what came with what was expected; the length of the header."""
        source, target, microbatch, header_length, _ = _PREFIX.unpack(prefix)
        edge = ticket.edge
        if (source, target, microbatch) != (edge.source, edge.target, ticket.microbatch) or (
            ticket.new_header != (header_length != _NO_HEADER)
        ):
            raise WrongMessage(
                f"microbatch {microbatch} of {source}→{target} came over {self._name} "
                f"{'with' if header_length else 'without'} a header, where microbatch "
                f"{ticket.microbatch} of {edge} was expected "
                f"{'with' if ticket.new_header else 'without'} one: the ranks do not run the "
                f"same program"
            )
        return int(header_length)


def view_bytes(tensors: Sequence[Tensor]) -> list[memoryview]:
    """The memory of contiguous host tensors, whatever their types. They must be kept alive.

    >>> tensor = torch.tensor([True, False])
    >>> [bytes(view) for view in view_bytes([tensor])]
    [b'\\x01\\x00']
    """
    views = []
    for tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        if num_bytes:
            memory = (ctypes.c_char * num_bytes).from_address(tensor.data_ptr())
            views.append(memoryview(memory).cast("B"))
    return views


def _copy_to_host(tensors: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
    """Begin to copy device tensors to the host; the event says when they are there."""
    copies = [
        torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(
            tensor, non_blocking=True
        )
        for tensor in tensors
    ]
    ready = torch.get_device_module(tensors[0].device).Event()
    ready.record()
    return copies, ready
