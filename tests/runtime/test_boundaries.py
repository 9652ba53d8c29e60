"""What crosses a boundary, and promises about it that are broken."""

from __future__ import annotations

import pickle

import pytest
import torch

from pipeloom import LocalPipeline, ShapeError, StepFailed
from pipeloom.runtime.boundary import assemble, require_promise, take_apart
from support.models import (
    ZOO,
    Block,
    Carried,
    compare_gradients,
    copy_stages,
    make_batch,
    run_plainly,
    squared_error,
)


class ByMicrobatch(Block):
    """Returns something else from its second call on."""

    def __init__(self, change):
        super().__init__()
        self.calls = 0
        self.change = change

    def forward(self, x):
        self.calls += 1
        hidden = super().forward(x)
        value = {"hidden": hidden, "extra": torch.ones(len(x)), "n": 1}
        return self.change(value) if self.calls > 1 else value


class Reader(Block):
    def forward(self, value):
        return super().forward(value["hidden"])


CHANGES = {
    "output['extra'] has shape [2, 2], promised [2]": lambda v: {**v, "extra": torch.ones(2, 2)},
    "output['extra'] has type torch.int64, promised torch.float32": lambda v: {
        **v, "extra": torch.ones(2, dtype=torch.long)},
    "output['n'] is the value 2, promised was 1": lambda v: {**v, "n": 2},
    "output['n'] is tensor, promised was 1": lambda v: {**v, "n": torch.ones(2)},
    "output['extra'] requires grad": lambda v: {**v, "extra": v["hidden"].sum(1)
                                                .to(torch.float32)},
    "its structure is": lambda v: {**v, "new": None},
}  # fmt: skip


@pytest.mark.parametrize("message", CHANGES)
def test_a_broken_promise_names_the_leaf(message):
    stages = [ByMicrobatch(CHANGES[message]).double(), Reader().double()]
    pipe = LocalPipeline(stages, "gpipe", microbatches=3, loss_fn=squared_error)
    x, y = make_batch(6)
    with pytest.raises(StepFailed) as caught:
        pipe.step(x, target=y)
    error = caught.value
    assert message in str(error)
    assert "stage 0 for microbatch 1" in str(error)
    assert "shapes='per_microbatch'" in str(error)
    assert isinstance(error.__cause__, ShapeError)
    assert (error.rank, error.stage, error.microbatch, error.action) == (0, 0, 1, "0SEND_F1")
    with pytest.raises(StepFailed, match="stage 0 for microbatch 1"):
        pipe.step(x, target=y)


@pytest.mark.parametrize("message", CHANGES)
def test_what_may_differ_between_microbatches(message):
    stages = [ByMicrobatch(CHANGES[message]).double(), Reader().double()]
    plain = copy_stages(stages)
    pipe = LocalPipeline(
        stages, "1f1b", microbatches=3, loss_fn=squared_error, shapes="per_microbatch"
    )
    x, y = make_batch(6)
    pipe.step(x, target=y)
    run_plainly(plain, list(zip(x.chunk(3), y.chunk(3), strict=True)))
    compare_gradients(stages, plain)


class Choosy(Block):
    """Uses its second input only for some microbatches."""

    def __init__(self, which):
        super().__init__()
        self.which = which
        self.calls = 0

    def forward(self, x, start):
        self.calls += 1
        return super().forward(x + start if self.calls in self.which else x)


def test_an_input_used_by_the_first_microbatch_only_has_zeros_later():
    stages = [ZOO["wasteful"].make_stages(1)[0], Choosy({1}).double()]
    plain = copy_stages(stages)
    x, y = make_batch(6)
    LocalPipeline(stages, "gpipe", microbatches=3, loss_fn=squared_error).step(x, target=y)
    run_plainly(plain, list(zip(x.chunk(3), y.chunk(3), strict=True)))
    compare_gradients(stages, plain)


def test_an_input_used_later_only_is_an_error_or_declared():
    def make():
        torch.manual_seed(3)
        return [ZOO["wasteful"].make_stages(1)[0], Choosy({2, 3}).double()]

    x, y = make_batch(6)
    with pytest.raises(StepFailed, match="shapes='per_microbatch'"):
        LocalPipeline(make(), "gpipe", microbatches=3, loss_fn=squared_error).step(x, target=y)
    stages, plain = make(), make()
    LocalPipeline(
        stages, "gpipe", microbatches=3, loss_fn=squared_error, shapes="per_microbatch"
    ).step(x, target=y)
    run_plainly(plain, list(zip(x.chunk(3), y.chunk(3), strict=True)))
    compare_gradients(stages, plain)


@pytest.mark.parametrize("shapes", ["per_step", "fixed"])
def test_shapes_that_change_from_step_to_step(shapes):
    stages = ZOO["blocks"].make_stages(3)
    pipe = LocalPipeline(stages, "1f1b", microbatches=2, loss_fn=squared_error, shapes=shapes)
    x, y = make_batch(4)
    pipe.step(x, target=y)
    x, y = make_batch(8)
    if shapes == "fixed":
        with pytest.raises(StepFailed, match="promised"):
            pipe.step(x, target=y)
    else:
        pipe.step(x, target=y)


def test_nothing_is_run_to_learn_shapes():
    stages = ZOO["blocks"].make_stages(3)
    calls = []
    for stage in stages:
        stage.register_forward_hook(lambda *_: calls.append(1))
    pipe = LocalPipeline(stages, "1f1b", microbatches=4, loss_fn=squared_error)
    before = torch.random.get_rng_state()
    x, y = make_batch(8)
    torch.random.set_rng_state(before)
    pipe.step(x, target=y)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert len(calls) == 3 * 4


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(2, 3, dtype=torch.bfloat16),
        {"a": [torch.zeros(0, 2), None, 3.5], "b": (True, "text")},
        Carried(torch.zeros(2), torch.ones(2, dtype=torch.bool), 4),
        torch.tensor(1j),
        (),
        None,
    ],
)
def test_layouts_travel(value):
    tensors, layout = take_apart(value)
    again = pickle.loads(pickle.dumps(layout))
    require_promise(again, layout, stage=0, microbatch=0)
    rebuilt = assemble(again, tensors)
    assert type(rebuilt) is type(value)
    assert str(rebuilt) == str(value)


def test_a_nan_among_constants_keeps_its_promise():
    one, other = (take_apart({"scale": float("nan"), "x": torch.zeros(1)})[1] for _ in range(2))
    require_promise(one, other, stage=0, microbatch=0)
