"""What would go wrong in silence is an error that says what to do instead."""

from __future__ import annotations

import collections
import copy
import pickle
import threading
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pipeloom import REPLICATE, LocalPipeline, ScheduleError, ShapeError, StepError, StepFailed
from pipeloom.errors import BackwardError
from support.models import ZOO, Block, compare_gradients, copy_stages, make_batch, squared_error


def make_pipe(stages=None, schedule="1f1b", **options):
    stages = ZOO["blocks"].make_stages(2) if stages is None else stages
    return LocalPipeline(
        stages, schedule, **{"microbatches": 2, "loss_fn": squared_error} | options
    )


# ── one step at a time ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("call", ["step", "eval"])
def test_a_step_within_a_step(call):
    pipe = make_pipe()
    x, y = make_batch(4)
    pipe.on("0F1", lambda event: getattr(pipe, call)(x, target=y))
    with pytest.raises(StepError, match="a step of this pipeline is running already"):
        pipe.step(x, target=y)


def test_a_second_thread_is_refused_and_harms_nothing():
    stages = ZOO["blocks"].make_stages(2)
    plain = copy_stages(stages)
    pipe = make_pipe(stages)
    x, y = make_batch(4)
    caught = []

    def intrude() -> None:
        with pytest.raises(StepError, match="running already") as error:
            pipe.step(x, target=y)
        caught.append(error.value)

    def start(event) -> None:
        thread = threading.Thread(target=intrude)
        thread.start()
        thread.join()

    with pipe.on("1F0", start):
        pipe.step(x, target=y)
    assert len(caught) == 1
    make_pipe(plain).step(x, target=y)
    compare_gradients(stages, plain)
    pipe.step(x, target=y)


def test_a_closed_pipeline_refuses():
    pipe = make_pipe()
    pipe.close()
    pipe.close()
    for call in (pipe.step, pipe.eval):
        with pytest.raises(StepError, match="was closed"):
            call(*make_batch(4)[:1], target=make_batch(4)[1])


# ── what a pipeline is made of ───────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_pipeline_is_neither_copied_nor_pickled(duplicate):
    with pytest.raises(TypeError, match="make another pipeline"):
        duplicate(make_pipe())


def test_stages_are_not_exchanged():
    with pytest.raises(TypeError):
        make_pipe().modules[0] = Block()


def test_stages_are_modules():
    with pytest.raises(ScheduleError, match="stage 1 is a function"):
        make_pipe([Block(), lambda x: x])


def test_a_parameter_in_two_stages_with_copies():
    """Each exchange would sum it with its own stage: the gradient would be counted twice."""
    parts = ZOO["blocks"].make_stages(2)
    parts[1].second.weight = parts[0].second.weight
    with pytest.raises(ScheduleError, match=r"second\.weight of stage 1 is also in stage 0"):
        make_pipe(copy_stages(parts) + copy_stages(parts), "chimera", ranks=2)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "zbv"])
def test_a_parameter_in_two_stages(schedule):
    stages = ZOO["blocks"].make_stages(4 if schedule == "zbv" else 2)
    stages[-1].second.weight = stages[0].second.weight
    plain = copy_stages(stages)
    assert plain[-1].second.weight is plain[0].second.weight
    x, y = make_batch(4)
    make_pipe(stages, schedule).step(x, target=y)
    make_pipe(plain, "gpipe", backward="whole").step(x, target=y)
    compare_gradients(stages, plain)


def test_copies_follow_parameters_that_are_frozen_thawed_or_replaced():
    parts = ZOO["blocks"].make_stages(2)
    stages = copy_stages(parts) + copy_stages(parts)
    pipe = make_pipe(stages, "chimera", ranks=2, microbatches=4)
    x, y = make_batch(8)
    pipe.step(x, target=y)
    new = nn.Linear(4, 8).double()
    for stage in (stages[0], stages[2], parts[0]):
        stage.first = copy.deepcopy(new)
        stage.norm.weight.requires_grad_(False)
    for stage in (*stages, *parts):
        stage.zero_grad()
    pipe.step(x, target=y)
    make_pipe(parts, microbatches=4).step(x, target=y)
    compare_gradients(stages[:2], parts)
    compare_gradients(stages[2:], parts)


# ── a loss that trains nothing ───────────────────────────────────────────────────────────────────


class Detached(Block):
    def forward(self, x):
        return super().forward(x).detach()


@pytest.mark.parametrize(
    ("last", "loss_fn"),
    [
        (Block, lambda output, target: squared_error(output.detach(), target)),
        (Block, lambda output, target: torch.tensor(3.0)),
        (Detached, squared_error),
    ],
    ids=["detached loss", "constant", "detached output"],
)
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_a_loss_without_a_gradient(schedule, last, loss_fn):
    pipe = make_pipe([Block().double(), last().double()], schedule, loss_fn=loss_fn)
    x, y = make_batch(4)
    assert pipe.eval(x, target=y).loss is not None
    with pytest.raises(StepFailed, match="does not require grad") as caught:
        pipe.step(x, target=y)
    assert isinstance(caught.value.__cause__, BackwardError)
    assert caught.value.action == "1F0"


def test_a_model_that_is_frozen_altogether_may_step():
    pipe = make_pipe([stage.requires_grad_(False) for stage in ZOO["blocks"].make_stages(2)])
    x, y = make_batch(4)
    assert torch.isfinite(pipe.step(x, target=y).loss)


def test_a_complex_loss():
    pipe = make_pipe(loss_fn=lambda output, target: output.sum() * (1 + 1j))
    with pytest.raises(StepFailed, match="real number, not one of type"):
        pipe.step(*make_batch(4)[:1], target=make_batch(4)[1])


def test_a_weight_of_zero_in_a_tensor():
    pipe = make_pipe(loss_weight=lambda target: torch.zeros(()))
    with pytest.raises(ShapeError, match="loss_weight gave 0"):
        pipe.step(*make_batch(4)[:1], target=make_batch(4)[1])


# ── values that nobody can look into ─────────────────────────────────────────────────────────────


@dataclass
class Unregistered:
    hidden: Tensor


class Slotted:
    __slots__ = ("hidden",)

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class OwnDict(dict[str, Tensor]):
    pass


CONTAINERS = {
    "dataclass": Unregistered,
    "slots": Slotted,
    "dict": lambda hidden: OwnDict(hidden=hidden),
    "UserDict": lambda hidden: collections.UserDict(hidden=hidden),
    "nested": lambda hidden: Unregistered([{"deep": hidden}]),  # type: ignore[arg-type]
}


class Wrapping(Block):
    def __init__(self, wrap) -> None:
        super().__init__()
        self.wrap = wrap

    def forward(self, x):
        return self.wrap(super().forward(x))


@pytest.mark.parametrize("kind", CONTAINERS)
def test_tensors_hidden_at_a_boundary(kind):
    stages = [Wrapping(CONTAINERS[kind]).double(), Block().double()]
    pipe = make_pipe(stages, microbatches=1)
    with pytest.raises(StepFailed, match="crosses a stage boundary with tensors in it"):
        pipe.step(*make_batch(2)[:1], target=make_batch(2)[1])


@pytest.mark.parametrize("kind", CONTAINERS)
def test_tensors_hidden_in_an_argument(kind):
    x, y = make_batch(4)
    with pytest.raises(ShapeError, match=r"args\[0\] is a .*register_dataclass"):
        make_pipe().step(CONTAINERS[kind](x), target=y)


def test_arrays_are_not_cut_and_not_repeated_in_silence():
    x, y = make_batch(4)
    with pytest.raises(ShapeError, match=r"target is a ndarray.*split={\"target\": REPLICATE}"):
        make_pipe().step(x, target=y.numpy())

    class Scaled(Block):
        def forward(self, x, scale, single):
            assert scale.shape == (3,)
            return super().forward(x) * float(single)

    pipe = make_pipe([Scaled().double(), Scaled().double()], split={"scale": REPLICATE})
    pipe.step(x, target=y, scale=np.ones(3), single=np.float64(2))


def test_a_batch_without_rows():
    x, y = make_batch(4)
    with pytest.raises(ShapeError, match=r"args\[0\] has no rows"):
        make_pipe(microbatches=1).step(x[:0], target=y[:0])


@pytest.mark.parametrize("count", [0, -1, 1.5, True])
def test_numbers_of_microbatches(count):
    pipe = make_pipe()
    for call in (pipe.step, pipe.eval):
        with pytest.raises(ScheduleError, match="whole number, 1 or more"):
            call(*make_batch(4)[:1], target=make_batch(4)[1], microbatches=count)
