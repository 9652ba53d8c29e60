"""What stages cost on the device they are on: times from recorded steps, bytes from one microbatch.

::

    stages ─► a pipeline of one process runs them one at a time ─► F, I, W, B of every stage
           ─► F and I of one microbatch, by hand                ─► what is kept, what crosses
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.cost.constant import StageCosts
from pipeloom.cost.from_profile import costs_from_timelines
from pipeloom.errors import PipeloomError
from pipeloom.ir.timeline import Timeline
from pipeloom.runtime.backward import choose_method
from pipeloom.runtime.boundary import assemble, is_arguments, take_apart
from pipeloom.runtime.microbatches import PreSplit
from pipeloom.runtime.pipeline import LocalPipeline

__all__ = ["StageBytes", "add_bytes", "measure_bytes", "measure_times"]

MIB = 1024.0**2
Loss = Callable[..., Tensor]

#: One schedule with whole backwards, one with split ones.
SCHEDULES = ("1f1b", "zb_h1")


@dataclass(frozen=True, kw_only=True)
class StageBytes:
    """The bytes of one stage, for one microbatch where that matters."""

    #: What autograd keeps from F until the backward, parameters and the stage's inputs aside.
    activation: int
    #: What stays of it, and of the gradients, between I and W.
    retained: int
    #: What the stage sends on.
    boundary: int
    weights: int


def measure_times(
    stages: Sequence[nn.Module],
    arguments: Sequence[Any],
    *,
    loss_fn: Loss | None = None,
    target: Any = None,
    microbatches: int = 8,
    steps: int = 3,
) -> StageCosts:
    """Seconds of F, I, W and B of every stage, the median over microbatches and steps.

    The stages run one at a time, so each has the device for itself. ``.grad`` of their parameters
    is left as it was.
    """
    loss = find_sum if loss_fn is None else loss_fn
    batch = [PreSplit([value] * microbatches) for value in arguments]
    targets = PreSplit([target] * microbatches)
    timelines: list[Timeline] = []
    for name in SCHEDULES:
        with _gradients_set_aside(stages):
            pipe = LocalPipeline(
                stages, name, ranks=len(stages), microbatches=microbatches, loss_fn=loss
            )
            pipe.step(*batch, target=targets)  # warms up
            with pipe.record() as recording:
                for _ in range(steps):
                    pipe.step(*batch, target=targets)
            timelines += recording.timelines
            pipe.close()
    # In one process a message is handed over, which says nothing of the machine's network.
    return replace(costs_from_timelines(timelines), latency=0.0)


def measure_bytes(
    stages: Sequence[nn.Module],
    arguments: Sequence[Any],
    *,
    loss_fn: Loss | None = None,
    target: Any = None,
) -> list[StageBytes]:
    """Run one microbatch through F, I and W of every stage, and count storages."""
    loss = find_sum if loss_fn is None else loss_fn
    found = []
    value: Any = tuple(arguments)
    for number, stage in enumerate(stages):
        is_last = number == len(stages) - 1
        tensors, layout = take_apart(value)
        leaves = [
            tensor.detach().requires_grad_(number > 0 and _takes_gradient(tensor))
            for tensor in tensors
        ]
        given = assemble(layout, leaves)
        method = choose_method(stage, stage=number)
        kept = _Storages(leaves, stage)
        watch = torch.autograd.graph.saved_tensors_hooks(kept.note, lambda tensor: tensor)
        with watch, method.forward():
            output = stage(*given) if is_arguments(given) else stage(given)
            result = loss(output, target) if is_last else output
            roots = [t for t in take_apart(result)[0] if t.requires_grad]
            saved = method.save(microbatch=0, inputs=leaves, outputs=roots)
        retained = 0
        if roots:
            ones = None if is_last else [torch.ones_like(root) for root in roots]
            with _gradients_set_aside([stage]):
                method.input(saved, ones)
                retained = method.held_bytes(saved)
                method.weight(saved)
        crossing, layout = take_apart(output)
        found.append(
            StageBytes(
                activation=kept.num_bytes,
                retained=retained,
                boundary=0 if is_last else sum(t.numel() * t.element_size() for t in crossing),
                weights=sum(p.numel() * p.element_size() for p in stage.parameters()),
            )
        )
        value = assemble(layout, [tensor.detach() for tensor in crossing])
    return found


def add_bytes(
    costs: StageCosts, measured: Sequence[StageBytes], *, optimizer_states: int = 0
) -> StageCosts:
    """The same costs with memory, in MiB.

    ``optimizer_states`` is how many numbers the optimizer keeps per parameter (2 for Adam).
    """
    return replace(
        costs,
        activation=[stage.activation / MIB for stage in measured],
        retained=[
            min(1.0, stage.retained / stage.activation) if stage.activation else 0.0
            for stage in measured
        ],
        boundary=[stage.boundary / MIB for stage in measured],
        weights=[stage.weights / MIB for stage in measured],
        gradients=[stage.weights / MIB for stage in measured],
        optimizer=[optimizer_states * stage.weights / MIB for stage in measured],
        memory_unit="MiB",
    )


def in_milliseconds(costs: StageCosts) -> StageCosts:
    """The same costs in ms instead of s."""
    names = ("forward", "input", "weight", "full", "unshard", "reshard", "reduce_grad")
    changed: dict[str, Any] = {
        name: [1e3 * second for second in getattr(costs, name)] for name in names
    }
    return replace(costs, **changed, latency=1e3 * costs.latency, time_unit="ms")


def find_sum(output: Any, target: Any) -> Tensor:
    """A stand-in for a loss: the sum of everything that can have a gradient."""
    parts = [tensor.float().sum() for tensor in take_apart(output)[0] if tensor.requires_grad]
    if not parts:
        raise PipeloomError(
            "the last stage returned nothing that needs a gradient, so there is no backward to "
            "measure; do its parameters require gradients?"
        )
    return torch.stack(parts).sum()


@contextmanager
def _gradients_set_aside(stages: Sequence[nn.Module]) -> Iterator[None]:
    """Parameters begin without ``.grad`` and have what they had afterwards."""
    before = {parameter: parameter.grad for stage in stages for parameter in stage.parameters()}
    for parameter in before:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in before.items():
            parameter.grad = gradient


def _takes_gradient(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


class _Storages:
    """Counts what autograd keeps, each storage once."""

    def __init__(self, inputs: Sequence[Tensor], stage: nn.Module) -> None:
        own = [*inputs, *stage.parameters(), *stage.buffers()]
        self._ignored = {tensor.untyped_storage().data_ptr() for tensor in own}
        self._sizes: dict[int, int] = {}

    def note(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._ignored:
            self._sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    @property
    def num_bytes(self) -> int:
        return sum(self._sizes.values())
