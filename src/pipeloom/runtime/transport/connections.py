"""Connections between the processes of a group: how they find each other and stay in touch.

::

    rank 0  listens ◄──── rank 1 connects: "key of the group, rank 1, messages"
            listens ◄──── rank 2 connects: "key of the group, rank 2, control"
    rank 1  listens ◄──── rank 2 connects …

The store of the process group tells where everybody listens, so that whatever brought the group
together (torchrun, a file, an address) brings these connections together as well. The higher rank
connects to the lower one. A connection opens with a key that only members of the group can read in
the store, and is confirmed; any other caller is hung up on.

Why not the group's own sends and receives: a receive that waits in gloo cannot be woken, neither by
``abort()`` nor by destroying the group while the peer waits too, only by the peer's exit. A socket
is woken by :meth:`socket.socket.shutdown` at either end, and by the death of either process.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from torch.distributed import ProcessGroup

from pipeloom.errors import RankLost

__all__ = ["Connections", "Member", "Purpose"]

_KEY_BYTES = 32
_OPENING = struct.Struct(f"!{_KEY_BYTES}sIH")
_WELCOME = b"!"
_IO_BUFFERS = 1024
#: How long one of several addresses of a peer may take to answer at all.
_CONNECT_SECONDS = 10.0

#: What a connection is for: "control", "messages" or "sum of stage 3".
Purpose = str


class Member(NamedTuple):
    """What a process publishes about itself."""

    addresses: tuple[str, ...]
    port: int
    #: Equal for processes that run on the same machine, where clocks agree and loopback works.
    machine: str
    description: str

    def to_text(self) -> str:
        return json.dumps(self)

    @classmethod
    def from_text(cls, text: str) -> Member:
        addresses, *others = json.loads(text)
        return cls(tuple(addresses), *others)


class Connections:
    """The sockets of one process to the others of its group, by peer and purpose."""

    def __init__(self, group: ProcessGroup, *, timeout: float) -> None:
        self.rank = group.rank()
        self.num_ranks = group.size()
        self._timeout = timeout
        store = group.get_group_store()
        # The n-th transport of this rank meets the n-th transport of the others.
        number = store.add(f"pipeloom/{group.group_name}/{self.rank}", 1)
        self._prefix = f"pipeloom/{group.group_name}/transport {number}"
        self.store = store
        self._accepted: dict[tuple[int, Purpose], socket.socket] = {}
        self._listener = _listen()
        if self.rank == 0:
            store.set(self.name("key"), secrets.token_hex(_KEY_BYTES // 2))
        store.set(self.name(f"member {self.rank}"), self._introduce_myself().to_text())
        self._key = self._await_value("key", of_rank=0)
        self.members: list[Member] = [
            Member.from_text(self._await_value(f"member {rank}", of_rank=rank).decode())
            for rank in range(self.num_ranks)
        ]

    def name(self, key: str) -> str:
        """A key of this transport in the store."""
        return f"{self._prefix}/{key}"

    def open(
        self, wanted: Iterable[tuple[int, Purpose]]
    ) -> dict[tuple[int, Purpose], socket.socket]:
        """Open one connection per (peer, purpose); the peers ask for the same at the same time."""
        wanted = list(wanted)
        deadline = time.monotonic() + self._timeout
        opened = {
            (peer, purpose): self._connect(peer, purpose, deadline)
            for peer, purpose in wanted
            if peer < self.rank
        }
        expected = [pair for pair in wanted if pair[0] > self.rank]
        while missing := [pair for pair in expected if pair not in self._accepted]:
            self._accept(missing, deadline)
        for pair in expected:
            opened[pair] = self._accepted.pop(pair)
        return opened

    def close(self) -> None:
        """Stop listening. Open connections belong to whoever asked for them."""
        self._listener.close()
        for connection in self._accepted.values():
            connection.close()
        self._accepted.clear()

    def _introduce_myself(self) -> Member:
        return Member(
            addresses=tuple(_own_addresses()),
            port=self._listener.getsockname()[1],
            machine=_machine_identity(),
            description=f"process {os.getpid()} on {socket.gethostname()}",
        )

    def _await_value(self, key: str, *, of_rank: int) -> bytes:
        try:
            self.store.wait([self.name(key)], timedelta(seconds=self._timeout))
            return self.store.get(self.name(key))
        except RuntimeError as error:
            raise RankLost(
                f"rank {of_rank} did not come to build the pipeline within {self._timeout:g} s: "
                f"rank {self.rank} waited for it in vain. Every rank of the group must build its "
                f"pipelines in the same order; a longer start is allowed with connect_timeout=.",
                rank=of_rank,
            ) from error

    def _connect(self, peer: int, purpose: Purpose, deadline: float) -> socket.socket:
        member = self.members[peer]
        # Loopback is the surest way on one machine and a wrong one everywhere else.
        loopback = ["127.0.0.1"] if member.machine == self.members[self.rank].machine else []
        tried = []
        for address in loopback + [one for one in member.addresses if not one.startswith("127.")]:
            remaining = max(deadline - time.monotonic(), 0.1)
            try:
                return self._call(address, member.port, purpose, remaining)
            except (OSError, EOFError) as error:
                tried.append(f"{address}: {error}")
        raise RankLost(
            f"rank {self.rank} cannot connect to rank {peer} ({member.description}, port "
            f"{member.port}): {'; '.join(tried) or 'it published no address'}. Set "
            f"GLOO_SOCKET_IFNAME to the network interface that the ranks share.",
            rank=peer,
        )

    def _call(self, address: str, port: int, purpose: Purpose, seconds: float) -> socket.socket:
        """Connect, and say who is calling what for."""
        connection = socket.create_connection(
            (address, port), timeout=min(seconds, _CONNECT_SECONDS)
        )
        try:
            connection.settimeout(seconds)
            name = purpose.encode()
            connection.sendall(_OPENING.pack(self._key, self.rank, len(name)) + name)
            receive_exactly(connection, len(_WELCOME))
        except BaseException:
            connection.close()
            raise
        return _prepare(connection)

    def _accept(self, missing: Sequence[tuple[int, Purpose]], deadline: float) -> None:
        """Take one caller in, or say who did not call."""
        self._listener.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            connection, _ = self._listener.accept()
        except TimeoutError:
            peers = ", ".join(f"rank {peer} ({purpose})" for peer, purpose in missing)
            raise RankLost(
                f"rank {self.rank} waited {self._timeout:g} s in vain for a connection from "
                f"{peers}. All ranks must run the same program at the same time.",
                rank=missing[0][0],
            ) from None
        connection.settimeout(self._timeout)
        with suppress(OSError, EOFError):
            opening = receive_exactly(connection, _OPENING.size)
            key, peer, length = _OPENING.unpack(opening)
            if hmac.compare_digest(key, self._key):
                purpose = receive_exactly(connection, length).decode()
                connection.sendall(_WELCOME)
                self._accepted[peer, purpose] = _prepare(connection)
                return
        connection.close()


def receive_exactly(connection: socket.socket, num_bytes: int) -> bytearray:
    """Read so many bytes; ``EOFError`` if the other end closed before."""
    buffer = bytearray(num_bytes)
    receive_into(connection, [memoryview(buffer)])
    return buffer


def receive_into(connection: socket.socket, buffers: list[memoryview]) -> None:
    """Fill all the buffers; ``EOFError`` if the other end closed before."""
    while buffers:
        received = connection.recvmsg_into(buffers[:_IO_BUFFERS], 0, socket.MSG_WAITALL)[0]
        if received == 0:
            if not any(buffer.nbytes for buffer in buffers):
                return
            raise EOFError("the other end closed the connection")
        buffers = skip_bytes(buffers, received)


def send_all(connection: socket.socket, buffers: list[memoryview]) -> None:
    """Send all the buffers, however long it takes."""
    while buffers:
        buffers = skip_bytes(buffers, connection.sendmsg(buffers[:_IO_BUFFERS]))


def send_without_waiting(connection: socket.socket, buffers: list[memoryview]) -> list[memoryview]:
    """Send what the connection takes at once; what is left."""
    try:
        sent = connection.sendmsg(buffers[:_IO_BUFFERS], (), socket.MSG_DONTWAIT)
    except BlockingIOError:
        return buffers
    return skip_bytes(buffers, sent)


def skip_bytes(buffers: list[memoryview], count: int) -> list[memoryview]:
    """What is left of the buffers after so many bytes; empty ones go too.

    >>> [bytes(rest) for rest in skip_bytes([memoryview(b"abc"), memoryview(b"de")], 4)]
    [b'e']
    """
    for index, buffer in enumerate(buffers):
        if count < buffer.nbytes:
            return [buffer[count:], *buffers[index + 1 :]]
        count -= buffer.nbytes
    return []


def hang_up(connection: socket.socket) -> None:
    """Wake everybody who waits on the connection, in this process and in the other."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _prepare(connection: socket.socket) -> socket.socket:
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A host that vanished without closing its connections is noticed after half a minute.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)
    return connection


def _listen() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", 0), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True
        )
    return socket.create_server(("", 0), backlog=1024)


def _own_addresses() -> list[str]:
    """Where others may reach this process, the likeliest first."""
    found: dict[str, None] = {}
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        found.update(dict.fromkeys(_addresses_of_interface(interface)))
    towards = os.environ.get("MASTER_ADDR", "")
    if towards:
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((towards, 9))
            found[probe.getsockname()[0]] = None
    # Asking the interfaces, because looking up one's own name can take seconds.
    with suppress(OSError):
        for _, name in socket.if_nameindex():
            found.update(dict.fromkeys(_addresses_of_interface(name)))
    return list(found)


def _addresses_of_interface(interface: str) -> list[str]:
    import fcntl

    get_address = 0x8915  # SIOCGIFADDR of Linux
    request = struct.pack("256s", interface.encode()[:15])
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        reply = fcntl.ioctl(probe.fileno(), get_address, request)
        return [socket.inet_ntoa(reply[20:24])]
    return []


def _machine_identity() -> str:
    """The running kernel, and the clock it shows to this process."""
    identity = []
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/timens_offsets"):
        with suppress(OSError):
            identity.append(Path(path).read_text(encoding="ascii"))
    return "".join(identity) or f"{socket.gethostname()} {secrets.token_hex(8)}"
