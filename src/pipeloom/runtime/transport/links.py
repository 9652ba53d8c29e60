"""All that leads from the rank of this process to the others, and what the rank is doing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from pipeloom.errors import ShapeError, StepError
from pipeloom.runtime.stall import RankReport
from pipeloom.runtime.transport.channels import Receiver, Sender, Ticket
from pipeloom.runtime.transport.collectives import Collectives
from pipeloom.runtime.transport.protocol import Edge, Header, Message, Progress, TensorSpec

if TYPE_CHECKING:
    from pipeloom.runtime.transport.nccl import DeviceReceiver, DeviceSender

__all__ = ["Links", "SumOfCopies"]

T = TypeVar("T")


class Links:
    """Senders and receivers by peer, the lanes of sums by stage and peer, and the collectives."""

    def __init__(self, rank: int, collectives: Collectives) -> None:
        self.rank = rank
        self.collectives = collectives
        self.progress = Progress()
        self.senders: dict[int, Sender | DeviceSender] = {}
        self.receivers: dict[int, Receiver | DeviceReceiver] = {}
        self.sum_lanes: dict[int, dict[int, tuple[Sender, Receiver]]] = {}
        #: Turns a lost connection into the error of all ranks; set once there is a watcher.
        self.explain: Callable[[int, BaseException], StepError]

    def together(self, work: Callable[[Collectives], T]) -> T:
        """Do something that all processes do together; a lost connection is explained."""
        try:
            return work(self.collectives)
        except (OSError, EOFError) as error:
            raise self.explain(self.collectives.waits_for or 0, error) from None

    def report(self) -> RankReport:
        """What the rank is doing right now. Called by the watcher's thread."""
        progress = self.progress
        action, waits_for = progress.current, progress.waits_for
        ranks: tuple[int, ...] = ()
        if (peer := self.collectives.waits_for) is not None:
            ranks = (peer,)
        elif isinstance(waits_for, Edge):
            is_receiver = waits_for.target_rank == self.rank
            ranks = (waits_for.source_rank if is_receiver else waits_for.target_rank,)
        elif waits_for is not None:
            ranks = tuple(self.sum_lanes.get(waits_for, ()))
        return RankReport(
            rank=self.rank,
            action="the end of the step" if action is None else str(action),
            stage=None if action is None else action.stage,
            microbatch=None if action is None else action.microbatch,
            waits_for=ranks,
        )

    def hang_up(self) -> None:
        """Wake every thread that waits for a message, here and in the other processes."""
        self.collectives.hang_up()
        for channel in self._channels():
            channel.hang_up()

    def close(self) -> None:
        """End the helpers and close the connections. The rank itself no longer waits."""
        self.hang_up()
        self.collectives.close()
        for channel in self._channels():
            channel.close()

    def forget(self) -> None:
        """In a forked child: close its copies of the connections, without a word to the others."""
        self.collectives.close()
        for channel in self._channels():
            channel.forget()

    def _channels(self) -> list[Sender | DeviceSender | Receiver | DeviceReceiver]:
        lanes = [channel for peers in self.sum_lanes.values() for channel in peers.values()]
        return [
            *self.senders.values(),
            *self.receivers.values(),
            *(end for lane in lanes for end in lane),
        ]


class SumOfCopies:
    """A sum over the ranks that hold copies of a stage, on its way.

    ::

        rank 0   mine ──► rank 3        total = rank 0's + rank 3's, in this order on both
        rank 3   mine ──► rank 0
    """

    def __init__(
        self,
        stage: int,
        rank: int,
        tensors: Sequence[Tensor],
        lanes: dict[int, tuple[Sender, Receiver]],
    ) -> None:
        self._stage = stage
        self._rank = rank
        self._tensors = tensors
        self._lanes = lanes
        self._header = Header(tuple(TensorSpec(tuple(t.shape), t.dtype) for t in tensors))
        self._tickets: dict[int, Ticket] = {}
        contiguous = [tensor.detach().contiguous() for tensor in tensors]
        for peer, (sender, receiver) in lanes.items():
            self.edge = Edge(stage, stage, peer, rank)
            sender.post(Edge(stage, stage, rank, peer), 0, contiguous, self._header)
            self._tickets[peer] = receiver.post(self.edge, 0, True)

    @property
    def channel(self) -> SumOfCopies:
        return self

    def finish(self, ticket: object) -> Message:
        """Wait for the others' tensors and add everything up, in the order of the ranks."""
        contributions: dict[int, Sequence[Tensor]] = {self._rank: self._tensors}
        for peer, ticket_of_peer in self._tickets.items():
            self.edge = ticket_of_peer.edge
            message = self._lanes[peer][1].finish(ticket_of_peer)
            if message.header != self._header:
                raise ShapeError(
                    f"the copies of stage {self._stage} differ: rank {self._rank} has gradients of "
                    f"{self._header.tensors}, rank {peer} of {message.header.tensors}"
                )
            contributions[peer] = message.tensors
        # What is being sent must not change; the others have read theirs by now or are about to.
        for sender, _ in self._lanes.values():
            sender.flush()
        columns = [contributions[rank] for rank in sorted(contributions)]
        with torch.no_grad():
            for mine, *parts in zip(self._tensors, *columns, strict=True):
                total = parts[0]
                for part in parts[1:]:
                    total += part
                if total is not mine:
                    mine.copy_(total)
        return Message(Header(()), [])
