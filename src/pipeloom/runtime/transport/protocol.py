"""What the runtime asks of a transport, and nothing more.

::

    rank 0                                     rank 1
    ──────────────────────────────             ──────────────────────────────
    0F0                                        ticket = post_receive(edge 0→1, 0, new_header=True)
    post_send(edge 0→1, 0, tensors, header) ─►   … computes something else …
    0F1                                        message = wait(ticket)      # header and tensors
    post_send(edge 0→1, 1, tensors, None)   ─► 1F0 with message.tensors

A :class:`Transport` belongs to a process and offers one :class:`Endpoint` for every rank that
lives there: all of them on the local transport, one under torch.distributed.

Rules both sides rely on
------------------------
- The order of ``post_send`` on a directed pair of ranks is the order of ``post_receive`` at the
  other end; the verifier proved it under the transport's ``sends`` and ``channel``.
- A header precedes the tensors it describes, travels on the host, and holds for the later messages
  of its edge until the next one. The sender passes ``header`` exactly where the receiver passes
  ``new_header=True``: with the first message of an edge in a step (``shapes="per_step"``), in the
  first step (``"fixed"``) or with every message (``"per_microbatch"``). A header may describe no
  tensors at all; then only the header travels, and later messages of the edge are empty.
- Microbatches of unequal sizes are announced: a message whose microbatch is in ``renewed`` of the
  header that holds for its edge brings a new header too, although the receiver passed
  ``new_header=False``. The sender passes ``header`` then; the receiving transport looks it up.
- Posting never blocks. ``wait`` returns ``None`` when what it waits for is not there yet and the
  transport cannot block; the executor then yields to the other ranks of the process and asks again.
  A transport that can block does so in ``wait`` and never returns ``None``.
- Whoever waits is woken by a failure, which ``wait`` raises.
- The transport drops a sent tensor when its send has finished, and keeps no tensor it delivered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from pipeloom.errors import StepError
from pipeloom.ir.action import Action
from pipeloom.ir.schedule import Schedule

__all__ = ["Edge", "Endpoint", "Header", "Message", "Progress", "TensorSpec", "Transport"]


class Edge(NamedTuple):
    """The way from one stage to another on another rank.

    An output goes from ``source=0`` to ``target=1``, its gradient from ``1`` to ``0``.
    """

    source: int
    target: int
    source_rank: int
    target_rank: int

    def __str__(self) -> str:
        return f"{self.source}→{self.target} (rank {self.source_rank} to {self.target_rank})"


class TensorSpec(NamedTuple):
    """What a receiver must know to make room for one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Header:
    """What the messages of an edge look like. Can be pickled."""

    tensors: tuple[TensorSpec, ...]
    #: How the tensors make up a value; the transport hands it on unread.
    structure: Any = None
    #: Microbatches whose message on this edge brings a header of its own.
    renewed: frozenset[int] = frozenset()


class Message(NamedTuple):
    """What arrived: the header that holds for it, and contiguous tensors that nobody else uses
    (on the local transport: that nobody else will change)."""

    header: Header
    tensors: list[Tensor]


class Progress:
    """What one rank is doing; the executor writes it before every action and wait.

    Read from other threads to tell people what a stalled rank was at.
    """

    __slots__ = ("actions", "position", "waits_for")

    def __init__(self, actions: Sequence[Action] = ()) -> None:
        self.actions = actions
        #: Index of the current action; ``len(actions)`` while the step is being finished.
        self.position = 0
        #: The edge, or the stage of an exchange between copies, that the rank is waiting for.
        self.waits_for: Edge | int | None = None

    @property
    def current(self) -> Action | None:
        """The current action, ``None`` between the last action and the end of the step."""
        position = self.position
        return self.actions[position] if position < len(self.actions) else None


class Endpoint(Protocol):
    """What the executor of one rank asks. Tickets are opaque, and waited for at most once."""

    rank: int
    #: Set by the executor when it begins a program.
    progress: Progress

    def post_send(
        self, edge: Edge, microbatch: int, tensors: Sequence[Tensor], header: Header | None
    ) -> None:
        """Begin to send contiguous tensors that do not require grad and will not change."""

    def post_receive(self, edge: Edge, microbatch: int, *, new_header: bool) -> Any:
        """Begin to receive the next message of an edge; the ticket is for :meth:`wait`."""

    def post_sum(self, stage: int, ranks: Sequence[int], tensors: Sequence[Tensor]) -> Any:
        """Begin to replace the tensors by their sum over ``ranks`` (ascending, this one among
        them), added up in that order. ``stage`` is the lowest stage of the copies: all the ranks
        name the same. On a device, ordered after the work queued so far."""

    def wait(self, ticket: Any) -> Message | None:
        """The message of a receive; for a sum, a message without tensors once it is done.

        On a device the message may be used by work queued from now on; the host does not wait.
        """

    def flush(self) -> bool:
        """Wait for the remaining sends of the step; ``False`` as ``wait`` returns ``None``."""


class Transport(Protocol):
    """What a pipeline asks of the transport of its process."""

    num_ranks: int
    #: The communication model under which programs must verify: arguments of ``pipeloom.verify``.
    sends: str
    channel: str

    @property
    def local_ranks(self) -> Sequence[int]:
        """The ranks that live in this process, ascending."""

    def connect(self, schedule: Schedule) -> None:
        """Get ready for a complete program: open what its edges need, and make sure that all ranks
        are about to run the same one (:meth:`Schedule.fingerprint`). Called before the first
        step of every program."""

    def endpoint(self, rank: int) -> Endpoint:
        """The endpoint of a rank that lives here."""

    def begin_step(self, number: int) -> None:
        """A step begins. From here to :meth:`end_step` a rank that stands still is a stall."""

    def end_step(self) -> None:
        """The step has ended on the ranks of this process, without failure."""

    def sum_over_processes(self, tensor: Tensor) -> Tensor:
        """The sum over the processes of a small host or device tensor (losses)."""

    def gather_objects(self, values: Sequence[object]) -> list[Any]:
        """One value per local rank in, one per rank out, on every process. Host side."""

    def clock_offsets(self) -> Sequence[float]:
        """Per rank: what to add to its ``time.perf_counter()`` to get the time of rank 0."""

    def fail(self, error: StepError) -> StepError:
        """A rank that lives here failed: tell the others, then stop all traffic for good. Returns
        the error that every rank raises: the first one anywhere, which may be another rank's."""

    def close(self) -> None:
        """Let go of connections and threads. May be called twice."""
