"""What all processes of a group do together on the host: share values, compare clocks.

::

    rank 1 ──value──►┐
    rank 2 ──value──►├ rank 0 ──all values──► rank 1, rank 2, rank 3
    rank 3 ──value──►┘

Small things at the ends of steps; tensors between stages do not come this way. Every method is
called by all ranks, in the same order.
"""

from __future__ import annotations

import pickle
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any

from pipeloom.runtime.transport.connections import hang_up, receive_exactly

__all__ = ["Collectives"]

_LENGTH = struct.Struct("!Q")
_TIME = struct.Struct("!d")
_NUM_CLOCK_READINGS = 16


class Collectives:
    """The connections of rank 0 to all others, or of another rank to rank 0."""

    def __init__(self, rank: int, connections: Mapping[int, socket.socket]) -> None:
        self.rank = rank
        self._connections = dict(sorted(connections.items()))
        #: Whom this rank is waiting for; read by the watcher.
        self.waits_for: int | None = None

    def gather(self, value: object) -> list[Any]:
        """One value per rank, on every rank."""
        if self.rank != 0:
            self._send(0, pickle.dumps(value, pickle.HIGHEST_PROTOCOL))
            return pickle.loads(self._receive(0))
        values = [value]
        values += [pickle.loads(self._receive(peer)) for peer in self._connections]
        everything = pickle.dumps(values, pickle.HIGHEST_PROTOCOL)
        for peer in self._connections:
            self._send(peer, everything)
        return values

    def compare_clocks(self, *, same_clock: Mapping[int, bool]) -> list[float]:
        """Per rank: what to add to its ``time.perf_counter()`` to get that of rank 0.

        Of several readings the one with the shortest way there and back counts: its error is at
        most half of that time. Processes that share a clock are 0 apart.
        """
        if self.rank != 0:
            connection = self._connections[0]
            for _ in range(_NUM_CLOCK_READINGS):
                self._receive_bytes(0, _TIME.size)
                connection.sendall(_TIME.pack(time.perf_counter()))
            return list(self.gather(None)[0])
        offsets = [0.0]
        for peer, connection in self._connections.items():
            readings = []
            for _ in range(_NUM_CLOCK_READINGS):
                sent = time.perf_counter()
                connection.sendall(_TIME.pack(sent))
                (theirs,) = _TIME.unpack(self._receive_bytes(peer, _TIME.size))
                received = time.perf_counter()
                readings.append((received - sent, (sent + received) / 2 - theirs))
            offsets.append(0.0 if same_clock[peer] else min(readings)[1])
        return list(self.gather(offsets)[0])

    def hang_up(self) -> None:
        """Wake whoever waits, here and there."""
        for connection in self._connections.values():
            hang_up(connection)

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()

    def _send(self, peer: int, data: bytes) -> None:
        self._connections[peer].sendall(_LENGTH.pack(len(data)) + data)

    def _receive(self, peer: int) -> bytearray:
        (length,) = _LENGTH.unpack(self._receive_bytes(peer, _LENGTH.size))
        return self._receive_bytes(peer, length)

    def _receive_bytes(self, peer: int, num_bytes: int) -> bytearray:
        self.waits_for = peer
        data = receive_exactly(self._connections[peer], num_bytes)
        self.waits_for = None
        return data
