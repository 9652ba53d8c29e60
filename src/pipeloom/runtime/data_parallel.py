"""Stages whose module is data-parallel: FSDP2 (``fully_shard``) and DDP.

::

    FSDP2   UNSHARD  F F … B B  RESHARD  REDUCE_GRAD      gathered once per residency,
                                                          reduced once, after the last backward
    DDP              F F … B B           REDUCE_GRAD      averaged once per step

The module's own synchronisation is off while the microbatches run: with many microbatches in
flight only the program knows which backward is the last.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeloom.runtime.gradients import StepGradients

__all__ = ["DataParallelStage", "recognise"]

_BUCKET_BYTES = 25 * 2**20


class DataParallelStage(Protocol):
    """What the executor asks of a stage whose module is data-parallel."""

    #: What F calls.
    module: nn.Module
    #: True if the parameters are sharded, so that the program must gather them.
    is_sharded: bool

    def begin_step(self, *, training: bool) -> None:
        """A step begins."""

    def unshard(self) -> None:
        """Begin to gather the parameters."""

    def wait(self) -> None:
        """Before a computation: the gathered parameters must be there."""

    def reshard(self) -> None:
        """Release the gathered parameters."""

    def reduce(self) -> None:
        """Reduce this step's gradients, once, after the last backward."""

    def restore(self) -> None:
        """After a failure: put back gradients that were set aside."""


def recognise(module: nn.Module) -> DataParallelStage | None:
    """The data-parallel side of a stage's module, ``None`` if it has none."""
    if not dist.is_available():
        return None
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return _ReplicatedStage(module)
    from torch.distributed.fsdp import FSDPModule

    if any(isinstance(part, FSDPModule) for part in module.modules()):
        return _ShardedStage(module)
    return None


class _ShardedStage:
    """A module with ``fully_shard`` somewhere in it."""

    is_sharded = True

    def __init__(self, module: nn.Module) -> None:
        from torch.distributed.fsdp import FSDPModule

        self.module = module
        self._parts: list[Any] = [part for part in module.modules() if isinstance(part, FSDPModule)]
        self._handles: list[Any] = []

    def begin_step(self, *, training: bool) -> None:
        self._set_synchronisation(False)
        for part in self._parts:
            # The program says when parameters are released.
            part.set_reshard_after_forward(False, recurse=False)

    def unshard(self) -> None:
        for part in self._parts:
            handle = part.unshard(async_op=True)
            if handle is not None:
                self._handles.append(handle)

    def wait(self) -> None:
        if self._handles:
            for handle in self._handles:
                handle.wait()
            self._handles = []

    def reshard(self) -> None:
        self.wait()
        for part in self._parts:
            part.reshard()

    def reduce(self) -> None:
        # FSDP reduces in the hooks of a backward it believes to be the last one. There is no public
        # call for "reduce what was accumulated", so its hook is called by hand, outermost last.
        self._set_synchronisation(True)
        states = [part._get_fsdp_state() for part in self._parts]
        for state in reversed(states):
            for group in _parameter_groups(state):
                group.post_backward()
        for state in states:
            if state._is_root:
                state._root_post_backward_final_callback()
        self._set_synchronisation(False)

    def restore(self) -> None:
        """Nothing was set aside: FSDP keeps what it accumulates beside ``.grad``."""

    def _set_synchronisation(self, on: bool) -> None:
        for part in self._parts:
            part.set_requires_gradient_sync(on, recurse=False)
            part.set_reshard_after_backward(on, recurse=False)
            part.set_is_last_backward(on)


def _parameter_groups(state: Any) -> list[Any]:
    """What FSDP gathers and reduces together; up to torch 2.11 at most one group a module."""
    several: list[Any] | None = getattr(state, "_fsdp_param_groups", None)
    if several is not None:
        return several
    return [group for group in (state._fsdp_param_group,) if group is not None]


class _ReplicatedStage:
    """A module in ``DistributedDataParallel``.

    F calls the module inside, so the wrapper's reducer, which expects one forward for each
    backward, never starts; the average is taken here instead, over the wrapper's process group.
    """

    is_sharded = False

    def __init__(self, wrapper: nn.parallel.DistributedDataParallel) -> None:
        self.module: nn.Module = wrapper.module
        self._wrapper = wrapper
        self._group = wrapper.process_group
        self._size = dist.get_world_size(self._group)
        self._gradients = StepGradients(wrapper.module)

    def begin_step(self, *, training: bool) -> None:
        if not training:
            return
        self._gradients.begin_step()
        if self._wrapper.broadcast_buffers:
            for buffer in self.module.buffers():
                dist.broadcast(buffer, group=self._group, group_src=0)

    def unshard(self) -> None:
        """Never sharded."""

    def wait(self) -> None:
        """Nothing to wait for."""

    def reshard(self) -> None:
        """Never sharded."""

    def reduce(self) -> None:
        found = self._gradients.contribution()
        for bucket in _fill_buckets(found):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            dist.all_reduce(flat, group=self._group)
            flat /= self._size
            parts = flat.split([tensor.numel() for tensor in bucket])
            for tensor, part in zip(bucket, parts, strict=True):
                tensor.copy_(part.view_as(tensor))
        self._gradients.finish(found)

    def restore(self) -> None:
        self._gradients.restore()


def _fill_buckets(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one type that together are worth a message."""
    buckets: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    for tensor in tensors:
        key = (tensor.dtype, tensor.device)
        buckets.setdefault(key, []).append(tensor)
        sizes[key] = sizes.get(key, 0) + tensor.numel() * tensor.element_size()
        if sizes[key] >= _BUCKET_BYTES:
            yield buckets.pop(key)
            del sizes[key]
    yield from buckets.values()
