"""What stays alive: measured by counting the storages of tensors, not by trusting the plan."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pipeloom import LocalPipeline
from support.models import squared_error

WIDTH = 64
ROWS = 32
#: Bytes of one microbatch's activation of width WIDTH in float32.
UNIT = ROWS * WIDTH * 4


class LiveStorages(TorchDispatchMode):
    """Counts the bytes of storages that operations made and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        #: Weights, gradients and the batch, which outlive the measurement.
        self.from_before: set[int] = set()
        self.total = 0
        self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in self.live:
                self.from_before.add(leaf.untyped_storage()._cdata)
        result = function(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._watch(leaf)
        return result

    def _watch(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.live or key in self.from_before or not storage.nbytes():
            return
        self.live[key] = storage.nbytes()
        self.total += storage.nbytes()
        self.peak = max(self.peak, self.total)
        # The Python object of a storage lives as long as the storage does.
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.total -= self.live.pop(key)


class Layer(nn.Module):
    """Its graph keeps the input and one more tensor; the output is kept by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.sin(self.first(x)))


@contextmanager
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def measure(schedule: str, microbatches: int, *, ranks: int, num_stages: int, **options):
    """(peak during a second step, what is alive after it), gradients being there before."""
    stages = [Layer() for _ in range(num_stages)]
    pipe = LocalPipeline(
        stages, schedule, ranks=ranks, microbatches=microbatches, loss_fn=squared_error, **options
    )
    x = torch.randn(ROWS * microbatches, WIDTH)
    y = torch.randn(ROWS * microbatches, WIDTH)
    pipe.step(x, target=y)
    with no_collector(), LiveStorages() as live:
        result = pipe.step(x, target=y)
        del result
    return live.peak, live.total


@pytest.mark.parametrize(
    ("schedule", "num_stages"), [("1f1b", 4), ("interleaved_1f1b", 8), ("zb_h1", 4), ("zbv", 8)]
)
def test_the_peak_does_not_grow_with_the_number_of_microbatches(schedule, num_stages):
    few, _ = measure(schedule, 8, ranks=4, num_stages=num_stages)
    many, _ = measure(schedule, 64 if schedule == "1f1b" else 24, ranks=4, num_stages=num_stages)
    # A loss is one number per microbatch, kept and shared in double precision.
    assert many - few < 64 * 64
    assert few > 8 * UNIT


def test_fill_and_drain_is_seen_to_grow():
    """The measurement can fail: under GPipe every microbatch is alive at once."""
    few, _ = measure("gpipe", 8, ranks=4, num_stages=4)
    many, _ = measure("gpipe", 64, ranks=4, num_stages=4)
    assert many > 6 * few


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "dualpipe", "gpipe"])
def test_nothing_stays_after_a_step(schedule):
    """Without the garbage collector's help: no cycle holds a tensor."""
    num_stages = 8 if schedule == "dualpipe" else 4
    _, alive = measure(schedule, 8, ranks=4, num_stages=num_stages)
    assert alive == 0


def test_nothing_stays_of_an_evaluation():
    stages = [Layer() for _ in range(4)]
    pipe = LocalPipeline(stages, "1f1b", microbatches=4, loss_fn=squared_error)
    x = torch.randn(4 * ROWS, WIDTH)
    with no_collector(), LiveStorages() as live:
        result = pipe.eval(x, return_output=False)
        peak = live.peak
        del result
    assert live.total == 0
    assert peak < 16 * UNIT


def test_an_output_goes_when_the_next_stage_has_it():
    """In flight a stage keeps what its graph needs (input and hidden), not its own output."""
    stages = [Layer() for _ in range(2)]
    pipe = LocalPipeline(stages, "gpipe", microbatches=8, loss_fn=squared_error)
    x = torch.randn(8 * ROWS, WIDTH)
    y = torch.randn(8 * ROWS, WIDTH)
    pipe.step(x, target=y)
    # As between processes: what is received is not what was sent.
    endpoint = pipe._transport.endpoint(0)
    post = endpoint.post_send
    endpoint.post_send = lambda edge, m, tensors, header: post(
        edge, m, [tensor.clone() for tensor in tensors], header
    )
    with no_collector(), LiveStorages() as live:
        at_turn = []
        with pipe.on("1F7", lambda event: at_turn.append(live.total)):
            pipe.step(x, target=y)
    # Stage 0: hidden of linear and of sin; stage 1: its input, the same two, and the difference
    # that the loss keeps. The arguments are views of the batch.
    per_microbatch = at_turn[0] / 8 / UNIT
    assert per_microbatch < 6.5, per_microbatch


def test_a_pipeline_goes_without_the_collector_once_nobody_holds_it():
    stages = [Layer() for _ in range(2)]
    pipe = LocalPipeline(stages, "1f1b", microbatches=2, loss_fn=squared_error)
    x = torch.randn(2 * ROWS, WIDTH)
    pipe.step(x, target=x)
    weight = weakref.ref(stages[0].first.weight)
    del pipe, stages
    gc.collect()
    assert weight() is None
