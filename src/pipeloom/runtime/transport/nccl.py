"""Device tensors, moved by the process group's own backend: one communicator per direction.

::

    rank 0 ══ communicator "0→1" ══► rank 1       header, on the host, when it is new
    rank 0 ◄══ communicator "1→0" ══ rank 1       then isend and irecv, in the order of posting

Sends and receives of one communicator run in issue order, and those of different communicators do
not wait for each other: the model (rendezvous, edge) that programs are verified under. Waiting for
a message makes the device's current stream wait, never the host.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeloom.runtime.transport.buffers import allocate
from pipeloom.runtime.transport.channels import Receiver, Sender, Ticket
from pipeloom.runtime.transport.protocol import Edge, Header, Message

__all__ = ["DeviceGroups", "DeviceReceiver", "DeviceSender", "DeviceSum"]

#: Backends that send and receive host tensors only, whatever devices they are registered for.
_HOST_BACKENDS = frozenset({"gloo", "mpi", "undefined"})


class DeviceGroups:
    """The communicators of a pipeline, opened before they are needed."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, *, timeout: float) -> None:
        self.group = group
        self._device = device
        self._timeout = timedelta(seconds=timeout)
        self._opened: dict[str, dist.ProcessGroup] = {}
        self.is_active = device.type != "cpu" and _moves_device_tensors(group, device)

    def open(self, groups: Iterable[tuple[str, Sequence[int]]]) -> None:
        """Open a communicator per name among ranks of the pipeline, and run it once.

        All ranks name the same groups in the same order, so that nobody waits for somebody who
        waits for another. Whatever hangs runs into the timeout of a group that says its name.
        """
        if not self.is_active:
            return
        for name, ranks in groups:
            if self.group.rank() in ranks and name not in self._opened:
                opened = dist.new_group(
                    [dist.get_global_rank(self.group, rank) for rank in sorted(ranks)],
                    timeout=self._timeout,
                    use_local_synchronization=True,
                    group_desc=f"pipeloom {name}",
                    device_id=self._device,
                )
                dist.all_reduce(torch.zeros(1, device=self._device), group=opened)
                self._opened[name] = opened

    def named(self, name: str) -> dist.ProcessGroup:
        """A communicator that was opened."""
        return self._opened[name]


class DeviceSender:
    """The sending end of a direction."""

    def __init__(self, headers: Sender, group: dist.ProcessGroup, peer: int) -> None:
        self._headers = headers
        self._group = group
        self._peer = peer
        self._under_way: deque[tuple[Any, Tensor]] = deque()

    def post(
        self, edge: Edge, microbatch: int, tensors: Sequence[Tensor], header: Header | None
    ) -> None:
        """Begin to send what the current stream has queued so far."""
        under_way = self._under_way
        while under_way and under_way[0][0].is_completed():
            under_way.popleft()
        if header is not None:
            self._headers.post(edge, microbatch, (), header)
        for tensor in tensors:
            work: Any = dist.isend(tensor, group=self._group, group_dst=self._peer)
            under_way.append((work, tensor))

    def flush(self) -> None:
        """Let the current stream wait for the sends that are under way."""
        self._headers.flush()
        while self._under_way:
            self._under_way.popleft()[0].wait()

    @property
    def is_busy(self) -> bool:
        return self._headers.is_busy

    @property
    def last_edge(self) -> Edge | None:
        return self._headers.last_edge

    def hang_up(self) -> None:
        self._headers.hang_up()

    def close(self) -> None:
        self._under_way.clear()
        self._headers.close()

    def forget(self) -> None:
        self._headers.forget()


class _DeviceTicket(Ticket):
    """A receive, and the works that fill its tensors once the header is known."""

    __slots__ = ("works",)

    def __init__(self, channel: Any, edge: Edge, microbatch: int, new_header: bool) -> None:
        super().__init__(channel, edge, microbatch, new_header)
        self.works: list[Any] = []


class DeviceReceiver:
    """The receiving end of a direction."""

    def __init__(
        self, headers: Receiver, group: dist.ProcessGroup, peer: int, device: torch.device
    ) -> None:
        self._headers = headers
        self._group = group
        self._peer = peer
        self._device = device
        #: Receives that stand behind a header which nobody has read yet.
        self._waiting: deque[_DeviceTicket] = deque()

    def post(self, edge: Edge, microbatch: int, new_header: bool) -> Ticket:
        """Begin to receive, now if the header is known, or else when somebody waits."""
        ticket = _DeviceTicket(self, edge, microbatch, new_header)
        if self._waits_for_header(ticket) or self._waiting:
            self._waiting.append(ticket)
        else:
            self._start(ticket)
        return ticket

    def finish(self, ticket: _DeviceTicket) -> Message:
        """Let the current stream wait for a message."""
        while ticket.message is None:
            self._start(self._waiting.popleft())
        while self._waiting and not self._waits_for_header(self._waiting[0]):
            self._start(self._waiting.popleft())
        for work in ticket.works:
            work.wait()
        message, ticket.message = ticket.message, None
        assert message is not None
        return message

    def _waits_for_header(self, ticket: _DeviceTicket) -> bool:
        if not ticket.new_header:
            self._headers.expect_renewal(ticket)
        return ticket.new_header

    def _start(self, ticket: _DeviceTicket) -> None:
        if self._waits_for_header(ticket):
            self._headers.read_header(ticket)
        header = self._headers.header_of(ticket.edge)
        tensors = allocate(header.tensors, self._device)
        for tensor in tensors:
            ticket.works.append(dist.irecv(tensor, group=self._group, group_src=self._peer))
        ticket.message = Message(header, tensors)

    def hang_up(self) -> None:
        self._headers.hang_up()

    def close(self) -> None:
        self._waiting.clear()
        self._headers.close()

    def forget(self) -> None:
        self._headers.forget()


class DeviceSum:
    """The sum of gradients over the ranks that hold copies of a stage."""

    def __init__(self, tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
        self._works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]

    def finish(self, ticket: object) -> Message:
        """Let the current stream wait for the sum."""
        for work in self._works:
            work.wait()
        return Message(Header(()), [])

    @property
    def channel(self) -> DeviceSum:
        return self


def _moves_device_tensors(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the group has a backend that sends tensors of the device themselves."""
    config = dist.get_backend_config(group)
    backends = dict(entry.split(":") for entry in config.split(",") if ":" in entry)
    return backends.get(device.type, "undefined") not in _HOST_BACKENDS
