"""Ranks in processes of their own, brought together by ``torch.distributed``.

::

    process of rank 0                                      process of rank 1
    main thread ── post_send ──► Sender ═══ messages ═══► Receiver ── wait ──► main thread
                                                  (or NCCL, one communicator per direction)
    main thread ── Collectives ◄═══ losses, fingerprints ═══► Collectives ── main thread
    watcher thread ◄═════════════ control: failures, what are you doing? ═════► watcher thread

The process group says who takes part and carries device tensors where its backend can. Host tensors
and headers travel over connections of pipeloom's own (:mod:`.connections` says why); device tensors
do the same, staged in pinned host memory, where the backend moves host tensors only.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from pipeloom.errors import ScheduleError, StepError
from pipeloom.ir.dependencies import Role
from pipeloom.ir.questions import role_of
from pipeloom.ir.schedule import Schedule
from pipeloom.runtime.transport.channels import Receiver, Sender, Ticket, WrongMessage
from pipeloom.runtime.transport.collectives import Collectives
from pipeloom.runtime.transport.connections import Connections
from pipeloom.runtime.transport.links import Links, SumOfCopies
from pipeloom.runtime.transport.nccl import (
    DeviceGroups,
    DeviceReceiver,
    DeviceSender,
    DeviceSum,
)
from pipeloom.runtime.transport.protocol import Edge, Header, Message, Progress
from pipeloom.runtime.watchdog import Watcher

__all__ = ["TorchEndpoint", "TorchTransport", "resolve_group"]


def resolve_group(group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup:
    """The process group of a pipeline: given, one dimension of a mesh, or all processes."""
    if not dist.is_initialized():
        raise ScheduleError(
            "Pipeline needs torch.distributed: call torch.distributed.init_process_group() first "
            "and start one process per rank, for example with torchrun; to run all ranks in one "
            "process use pipeloom.LocalPipeline"
        )
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            names = group.mesh_dim_names or tuple(f"dimension {i}" for i in range(group.ndim))
            raise ScheduleError(
                f"group= is a DeviceMesh of {group.ndim} dimensions ({', '.join(names)}); pass the "
                f"one that the pipeline runs along, for example group=mesh[{names[0]!r}]"
            )
        group = group.get_group()
    if group is None:
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise ScheduleError("this process is not a member of the group that was passed as group=")
    return group


class TorchTransport:
    """The transport of :class:`pipeloom.Pipeline`. Built by all processes of the group together.

    ``timeout`` is how long nothing may move within a step, ``connect_timeout`` how long the others
    may take to come when the transport is built or a new program begins. Received tensors are put
    on ``device``, or that of the ``modules``.
    """

    sends = "rendezvous"
    channel = "edge"

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        modules: Iterable[nn.Module] = (),
        device: torch.device | None = None,
        timeout: float = 300.0,
        connect_timeout: float = 120.0,
    ) -> None:
        group = resolve_group(group)
        parameters = (parameter for module in modules for parameter in module.parameters())
        own = next((p.device for p in parameters), torch.device("cpu"))
        self.device = own if device is None else device
        self.num_ranks = group.size()
        rank = group.rank()
        self.local_ranks = (rank,)
        self._connections = Connections(group, timeout=connect_timeout)
        members = self._connections.members
        self._same_clock = {
            peer: member.machine == members[rank].machine for peer, member in enumerate(members)
        }
        peers = [peer for peer in range(self.num_ranks) if peer != rank]
        opened = self._connections.open(
            [(peer, "control") for peer in peers]
            + [(peer, "collectives") for peer in (peers if rank == 0 else [0])]
        )
        collectives = Collectives(
            rank, {peer: c for (peer, what), c in opened.items() if what == "collectives"}
        )
        self._groups = DeviceGroups(group, self.device, timeout=connect_timeout)
        self._links = Links(rank, collectives)
        self._watcher = Watcher(
            rank,
            {peer: c for (peer, what), c in opened.items() if what == "control"},
            [member.description for member in members],
            store=self._connections.store,
            failure_key=self._connections.name("failure"),
            timeout=timeout,
            report=self._links.report,
            on_failure=self._links.hang_up,
        )
        self._links.explain = self._watcher.explain_lost_connection
        self._endpoint = TorchEndpoint(rank, self._links, self._groups)
        self._close = weakref.finalize(self, _close, self._watcher, self._links, self._connections)
        os.register_at_fork(after_in_child=_forgetter(weakref.ref(self)))

    def connect(self, schedule: Schedule) -> None:
        """Compare programs with the other ranks, then open what this one needs."""
        self._watcher.begin(f"the preparation of {schedule.name!r}")
        try:
            self._compare_programs(schedule)
            directions, sums = _find_directions(schedule), _find_sums(schedule)
            self._groups.open(
                [(_name_direction(*pair), pair) for pair in directions]
                + [(_name_sum(stage), ranks) for stage, ranks in sums.items()]
            )
            self._open_channels(directions, sums)
        finally:
            self._watcher.end()

    def endpoint(self, rank: int) -> TorchEndpoint:
        assert rank == self._endpoint.rank
        return self._endpoint

    def begin_step(self, number: int) -> None:
        self._watcher.begin(f"step {number}")

    def end_step(self) -> None:
        self._watcher.end()

    def sum_over_processes(self, tensor: Tensor) -> Tensor:
        if self._groups.is_active and tensor.device.type == self.device.type:
            total = tensor.clone()
            dist.all_reduce(total, group=self._groups.group)
            return total
        values = self._links.together(lambda collectives: collectives.gather(tensor.tolist()))
        total = tensor.new_tensor(values[0])
        for value in values[1:]:
            total += tensor.new_tensor(value)
        return total

    def gather_objects(self, values: Sequence[object]) -> list[Any]:
        [value] = values
        return self._links.together(lambda collectives: collectives.gather(value))

    def clock_offsets(self) -> Sequence[float]:
        return self._links.together(
            lambda collectives: collectives.compare_clocks(same_clock=self._same_clock)
        )

    def fail(self, error: StepError) -> StepError:
        return self._watcher.fail(error)

    def close(self) -> None:
        self._close()

    def _open_channels(
        self, directions: Sequence[tuple[int, int]], sums: Mapping[int, Sequence[int]]
    ) -> None:
        rank, links = self._endpoint.rank, self._links
        wanted = [
            (peer, "messages")
            for sender, peer in directions
            if sender == rank and peer not in links.senders
        ]
        for stage, ranks in sums.items():
            if rank in ranks and stage not in links.sum_lanes:
                wanted += [(peer, _name_sum(stage)) for peer in ranks if peer != rank]
        stage_of = {_name_sum(stage): stage for stage in sums}
        for (peer, purpose), connection in self._connections.open(wanted).items():
            sender = Sender(connection, f"{purpose} to rank {peer}")
            receiver = Receiver(connection, f"{purpose} from rank {peer}", self.device)
            if purpose in stage_of:
                links.sum_lanes.setdefault(stage_of[purpose], {})[peer] = (sender, receiver)
            elif self._groups.is_active:
                out, back = (
                    self._groups.named(_name_direction(*pair))
                    for pair in ((rank, peer), (peer, rank))
                )
                place = int(peer > rank)
                links.senders[peer] = DeviceSender(sender, out, place)
                links.receivers[peer] = DeviceReceiver(receiver, back, place, self.device)
            else:
                links.senders[peer], links.receivers[peer] = sender, receiver

    def _compare_programs(self, schedule: Schedule) -> None:
        mine = (schedule.fingerprint(), repr(schedule))
        programs = self._links.together(lambda collectives: collectives.gather(mine))
        if any(fingerprint != programs[0][0] for fingerprint, _ in programs):
            ranks_of: dict[tuple[str, str], list[int]] = {}
            for rank, program in enumerate(programs):
                ranks_of.setdefault(program, []).append(rank)
            lines = [
                f"  ranks {ranks}: {description}, fingerprint {fingerprint}"
                for (fingerprint, description), ranks in ranks_of.items()
            ]
            raise ScheduleError(
                "the ranks are about to run different programs:\n"
                + "\n".join(lines)
                + "\nGive every rank the same schedule, microbatches and options."
            )


class TorchEndpoint:
    """What the executor of this process's rank asks."""

    def __init__(self, rank: int, links: Links, groups: DeviceGroups) -> None:
        self.rank = rank
        self._links = links
        self._groups = groups
        # The dictionaries themselves, which grow when a program needs more.
        self._senders, self._receivers = links.senders, links.receivers

    @property
    def progress(self) -> Progress:
        return self._links.progress

    @progress.setter
    def progress(self, progress: Progress) -> None:
        self._links.progress = progress

    def post_send(
        self, edge: Edge, microbatch: int, tensors: Sequence[Tensor], header: Header | None
    ) -> None:
        try:
            self._senders[edge.target_rank].post(edge, microbatch, tensors, header)
        except OSError as error:
            raise self._links.explain(edge.target_rank, error) from None

    def post_receive(self, edge: Edge, microbatch: int, *, new_header: bool) -> Ticket:
        return self._receivers[edge.source_rank].post(edge, microbatch, new_header)

    def post_sum(self, stage: int, ranks: Sequence[int], tensors: Sequence[Tensor]) -> Any:
        if self._groups.is_active:
            return DeviceSum(tensors, self._groups.named(_name_sum(stage)))
        try:
            return SumOfCopies(stage, self.rank, tensors, self._links.sum_lanes[stage])
        except OSError as error:
            raise self._links.explain(ranks[0], error) from None

    def wait(self, ticket: Any) -> Message:
        try:
            return ticket.channel.finish(ticket)
        except WrongMessage:
            raise
        except (OSError, EOFError) as error:
            raise self._links.explain(ticket.edge.source_rank, error) from None

    def flush(self) -> bool:
        for peer, sender in self._senders.items():
            if sender.is_busy:
                self.progress.waits_for = sender.last_edge
            try:
                sender.flush()
            except OSError as error:
                raise self._links.explain(peer, error) from None
        self.progress.waits_for = None
        return True


def _find_directions(schedule: Schedule) -> list[tuple[int, int]]:
    """The directed pairs of ranks between which a program, or its backward, sends; ascending."""
    topology, rank_of = schedule.topology, schedule.placement.rank_of
    directions: set[tuple[int, int]] = set()
    for stage in range(topology.num_stages):
        for following in topology.successors(stage):
            ends = rank_of(stage), rank_of(following)
            if ends[0] != ends[1]:
                directions |= {ends, ends[::-1]}
    return sorted(directions)


def _find_sums(schedule: Schedule) -> dict[int, tuple[int, ...]]:
    """The lowest stage of the copies that a program sums, and the ranks that hold them."""
    sums: dict[int, tuple[int, ...]] = {}
    for action in schedule.all_actions():
        if role_of(action) is Role.REDUCE and action.stage is not None:
            copies = schedule.topology.copies_of(action.stage)
            ranks = sorted({schedule.placement.rank_of(copy) for copy in copies})
            if len(ranks) > 1:
                sums[min(copies)] = tuple(ranks)
    return dict(sorted(sums.items()))


def _name_direction(sender: int, receiver: int) -> str:
    return f"rank {sender} to rank {receiver}"


def _name_sum(stage: int) -> str:
    return f"sum of stage {stage}"


def _close(watcher: Watcher, links: Links, connections: Connections) -> None:
    watcher.close()
    links.close()
    connections.close()


def _forgetter(transport: weakref.ref[TorchTransport]) -> Callable[[], None]:
    """What a forked child does: a data loader's worker, say, that outlives a killed parent must
    not keep the connections open by which the others notice."""

    def forget() -> None:
        alive = transport()
        if alive is not None:
            alive._watcher.forget_connections()
            alive._links.forget()
            alive._connections.close()
            alive._close.detach()

    return forget
