"""What the ranks do in the tests of the transport; each function runs on every rank."""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import pipeloom
from pipeloom.errors import PipeloomError, StepError, StepFailed
from pipeloom.ir.schedule import Schedule
from pipeloom.runtime.transport.protocol import Edge, Header, Progress, TensorSpec
from pipeloom.runtime.transport.torch_distributed import TorchTransport, resolve_group

TYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int8,
    torch.bool, torch.complex64,
)  # fmt: skip


def build_program(ranks: int, name: str = "1f1b", **options: Any) -> Schedule:
    return pipeloom.lower(
        pipeloom.build_schedule(name, ranks=ranks, microbatches=options.pop("microbatches", 4))
    )


def describe(tensors: Sequence[Tensor], structure: object = None) -> Header:
    return Header(tuple(TensorSpec(tuple(t.shape), t.dtype) for t in tensors), structure)


def open_transport(**options: Any) -> TorchTransport:
    transport = TorchTransport(**options)
    transport.connect(build_program(transport.num_ranks))
    return transport


def exchange_types() -> list[tuple[str, tuple[int, ...], bool]]:
    """Rank 0 sends one message of every type and odd shape; rank 1 says what came."""
    transport = open_transport()
    rank = dist.get_rank()
    endpoint = transport.endpoint(rank)
    edge = Edge(0, 1, 0, 1)
    torch.manual_seed(0)
    sent = [(torch.randn(3, 5) * 4).to(dtype) for dtype in TYPES]
    sent += [torch.tensor(2.5), torch.empty(0, 7), torch.randn(1, 1, 6)]
    came = []
    transport.begin_step(0)
    if rank == 0:
        endpoint.post_send(edge, 0, sent, describe(sent, {"name": "tree"}))
        endpoint.flush()
    else:
        message = endpoint.wait(endpoint.post_receive(edge, 0, new_header=True))
        assert message.header.structure == {"name": "tree"}
        came = [
            (str(b.dtype), tuple(b.shape), bool(torch.equal(a, b)))
            for a, b in zip(sent, message.tensors, strict=True)
        ]
    transport.end_step()
    transport.close()
    return came


def exchange_many(sizes: Sequence[int], new_header_each: bool) -> int:
    """Both ranks send all messages at once, small and large, then take the other's; the number of
    right ones."""
    transport = open_transport()
    rank = dist.get_rank()
    endpoint = transport.endpoint(rank)
    out, back = Edge(0, 1, 0, 1), Edge(1, 0, 1, 0)
    if rank == 1:
        out, back = back, out
    right = 0
    for step in range(3):
        transport.begin_step(step)
        tickets = []
        for index, size in enumerate(sizes):
            new_header = index == 0 or new_header_each or size != sizes[index - 1]
            tensors = [torch.full((size,), float(index + 10 * rank)), torch.tensor(index)]
            tickets.append(endpoint.post_receive(back, index, new_header=new_header))
            header = describe(tensors) if new_header else None
            endpoint.post_send(out, index, tensors, header)
        for index, (ticket, size) in enumerate(zip(tickets, sizes, strict=True)):
            message = endpoint.wait(ticket)
            expected = torch.full((size,), float(index + 10 * (1 - rank)))
            right += torch.equal(message.tensors[0], expected) and message.tensors[1] == index
        endpoint.flush()
        transport.end_step()
    transport.close()
    return right


def send_empty_messages() -> int:
    """A header that describes no tensors, and the empty messages that follow it."""
    transport = open_transport()
    rank = dist.get_rank()
    endpoint = transport.endpoint(rank)
    edge = Edge(0, 1, 0, 1)
    count = 0
    if rank == 0:
        for microbatch in range(3):
            endpoint.post_send(edge, microbatch, [], describe([]) if microbatch == 0 else None)
        endpoint.flush()
    else:
        for microbatch in range(3):
            ticket = endpoint.post_receive(edge, microbatch, new_header=microbatch == 0)
            count += endpoint.wait(ticket).tensors == []
    transport.close()
    return count


def sum_copies(sizes: Sequence[int]) -> list[list[float]]:
    transport = TorchTransport()
    schedule = pipeloom.lower(
        pipeloom.build_schedule("dualpipe", ranks=transport.num_ranks, microbatches=8)
    )
    transport.connect(schedule)
    rank = dist.get_rank()
    endpoint = transport.endpoint(rank)
    sums = []
    for stage in range(schedule.num_stages // 2):
        ranks = sorted({schedule.placement.rank_of(s) for s in schedule.topology.copies_of(stage)})
        if rank in ranks:
            tensors = [torch.full((size,), 0.1 * (rank + 1)) for size in sizes]
            endpoint.wait(endpoint.post_sum(stage, ranks, tensors))
            assert all(bool((t == t[0]).all()) for t in tensors)
            sums.append([t[0].item() for t in tensors])
    transport.close()
    return sums


def gather_and_compare_clocks() -> tuple[list[Any], list[float], float]:
    transport = open_transport()
    rank = dist.get_rank()
    values = transport.gather_objects([{"rank": rank}])
    offsets = list(transport.clock_offsets())
    total = transport.sum_over_processes(torch.tensor([0.5 + rank], dtype=torch.float64))
    transport.close()
    return values, offsets, total.item()


def run_different_programs() -> str:
    transport = TorchTransport()
    try:
        transport.connect(build_program(2, microbatches=4 + dist.get_rank()))
    except PipeloomError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        transport.close()
    return "no error"


def run_in_subgroups() -> tuple[int, float]:
    """Two pipelines of two ranks each, at the same time."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    transport = TorchTransport(groups[dist.get_rank() % 2])
    transport.connect(build_program(2))
    [rank] = transport.local_ranks
    edge = Edge(0, 1, 0, 1)
    endpoint = transport.endpoint(rank)
    value = torch.tensor([float(dist.get_rank())])
    if rank == 0:
        endpoint.post_send(edge, 0, [value], describe([value]))
    else:
        value = endpoint.wait(endpoint.post_receive(edge, 0, new_header=True)).tensors[0]
    transport.close()
    return rank, value.item()


# ── failures ─────────────────────────────────────────────────────────────────────────────────────


def fail_while_others_wait(failing: Sequence[int], store_is_slow: bool = False) -> tuple[Any, ...]:
    """Some ranks fail after a moment, the others wait for messages that never come."""
    transport = open_transport()
    rank = dist.get_rank()
    endpoint = transport.endpoint(rank)
    transport.begin_step(7)
    peer = (rank + 1) % transport.num_ranks if rank == 0 else rank - 1
    started = time.monotonic()
    try:
        if rank in failing:
            time.sleep(0.3)
            raise transport.fail(StepFailed(f"rank {rank} failed in 1B3", rank=rank, stage=1))
        edge = Edge(peer, rank, peer, rank)
        endpoint.wait(endpoint.post_receive(edge, 0, new_header=True))
    except StepError as error:
        seconds = time.monotonic() - started
        try:
            transport.begin_step(8)
            again = "no error"
        except StepError as second:
            again = str(second)
        alive = [t.name for t in threading.enumerate() if t.name.startswith("pipeloom")]
        transport.close()
        return type(error).__name__, str(error), error.rank, seconds, again == str(error), alive
    return ("no error",)


def lose_rank(victim: int, how: str, told: Path | None = None) -> tuple[Any, ...]:
    """One rank goes away; the others wait for messages, and say in a file when they were told."""
    transport = open_transport()
    rank = dist.get_rank()
    endpoint = transport.endpoint(rank)
    transport.begin_step(3)
    started = time.monotonic()
    if rank == victim:
        time.sleep(0.3)
        if how == "kill":
            os.kill(os.getpid(), 9)
        elif how == "kill with a child left":
            if os.fork() == 0:
                assert told is not None
                for _ in range(200):
                    time.sleep(0.1)
                    if told.exists():
                        break
                os._exit(0)
            os.kill(os.getpid(), 9)
        transport.end_step()
        transport.close()
        return ("left",)
    peer = rank - 1 if rank else 1
    try:
        endpoint.wait(endpoint.post_receive(Edge(peer, rank, peer, rank), 0, new_header=True))
    except StepError as error:
        transport.close()
        if told is not None:
            told.touch()
        return type(error).__name__, str(error), error.rank, time.monotonic() - started
    return ("no error",)


def stand_still(kind: str) -> tuple[Any, ...]:
    """Nothing moves: ranks that wait in a circle, or for a rank that computes for ever."""
    transport = open_transport(timeout=1.0)
    program = build_program(transport.num_ranks)
    rank = dist.get_rank()
    endpoint = transport.endpoint(rank)
    endpoint.progress = progress = Progress(program.actions[rank])
    progress.position = 2
    try:
        if kind == "late" and rank == 1:
            time.sleep(2.5)
        transport.begin_step(5)
        if kind == "computing" and rank == 1:
            time.sleep(2.5)
        elif kind == "moving" and rank == 1:
            for position in range(6):
                progress.position = position
                time.sleep(0.5)
        elif kind == "large send" and rank == 0:
            tensors = [torch.zeros(1 << 24)]
            endpoint.post_send(Edge(0, 1, 0, 1), 0, tensors, describe(tensors))
            progress.position = len(progress.actions)
            endpoint.flush()
        elif kind == "large send":
            time.sleep(2.5)
        else:
            peer = 1 - rank
            progress.waits_for = edge = Edge(peer, rank, peer, rank)
            if kind == "moving":
                time.sleep(3.2)
            else:
                endpoint.wait(endpoint.post_receive(edge, 0, new_header=True))
        if kind == "moving":
            dist.barrier()
        transport.begin_step(6)
        if kind == "moving":
            dist.barrier()
    except StepError as error:
        return type(error).__name__, str(error), error.rank, error.action
    finally:
        transport.close()
    return ("no error",)


def stop_one_process() -> tuple[Any, ...]:
    """Rank 1 is stopped, as by Ctrl-Z or a debugger; rank 0 wakes it after it was told."""
    transport = open_transport(timeout=1.0)
    rank = dist.get_rank()
    pids = transport.gather_objects([os.getpid()])
    transport.begin_step(2)
    try:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        endpoint = transport.endpoint(rank)
        edge = Edge(1 - rank, rank, 1 - rank, rank)
        endpoint.progress.waits_for = edge
        endpoint.wait(endpoint.post_receive(edge, 0, new_header=True))
    except StepError as error:
        return type(error).__name__, str(error), error.rank
    finally:
        if rank == 0:
            os.kill(pids[1], signal.SIGCONT)
        transport.close()
    return ("no error",)


def come_late(connect_timeout: float) -> str:
    """Rank 1 does not build its pipeline in time."""
    if dist.get_rank() == 1:
        time.sleep(2 * connect_timeout)
        return ""
    try:
        TorchTransport(connect_timeout=connect_timeout)
    except PipeloomError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def choose_wrong_groups() -> list[str]:
    """What is said about groups that cannot be used."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "stages"))
    only_rank_0 = dist.new_group([0])
    problems = []
    for group in (mesh, only_rank_0):
        try:
            resolve_group(group)
        except PipeloomError as error:
            problems.append(f"{type(error).__name__}: {error}")
    return problems


def count_leftovers(repeats: int) -> tuple[int, int, int, int]:
    """File descriptors and threads before and after many transports."""
    open_transport().close()
    dist.barrier()
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(repeats):
        exchange_many([1 << 19, 3], False)
    dist.barrier()
    return (*before, len(os.listdir("/proc/self/fd")), threading.active_count())


# ── memory ───────────────────────────────────────────────────────────────────────────────────────


def keep_nothing(size: int) -> list[str]:
    """What the transport still holds of a message once it was sent, and once it was received."""
    transport = open_transport()
    rank = dist.get_rank()
    endpoint = transport.endpoint(rank)
    edge = Edge(0, 1, 0, 1)
    alive = []
    transport.begin_step(0)
    for microbatch in range(2):
        header = None
        if rank == 0:
            tensors = [torch.ones(size)]
            if microbatch == 0:
                header = describe(tensors)
            sent = weakref.ref(tensors[0])
            endpoint.post_send(edge, microbatch, tensors, header)
            del tensors
            endpoint.flush()
            if sent() is not None:
                alive.append(f"sent tensor of microbatch {microbatch}")
        else:
            ticket = endpoint.post_receive(edge, microbatch, new_header=microbatch == 0)
            message = endpoint.wait(ticket)
            received = weakref.ref(message.tensors[0])
            del message
            if received() is not None:
                alive.append(f"received tensor of microbatch {microbatch}")
    transport.end_step()
    transport.close()
    return alive
