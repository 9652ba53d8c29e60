"""When an action raises: one error that says where, with the traceback, now and ever after."""

from __future__ import annotations

import contextlib
import gc
import weakref

import pytest
import torch

import pipeloom
from pipeloom import LocalPipeline, PipelineStalled, StepFailed
from support.models import ZOO, Block, make_batch, squared_error


class Boom(Exception):
    pass


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise Boom("in the backward")


class FailingStage(Block):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if self.where == "F" and self.calls == 3:
            raise Boom("in the forward")
        return Failing.apply(super().forward(x)) if self.where != "F" else super().forward(x)


@pytest.mark.parametrize(
    ("schedule", "where", "action"),
    [("1f1b", "F", "1F2"), ("1f1b", "B", "1B0"), ("zb_h1", "I", "1I0")],
)
def test_an_exception_in_an_action(schedule, where, action):
    stages = [Block().double(), FailingStage(where).double(), Block().double()]
    pipe = LocalPipeline(stages, schedule, microbatches=4, loss_fn=squared_error)
    x, y = make_batch(8)
    with pytest.raises(StepFailed, match="rank 1 failed in") as caught:
        pipe.step(x, target=y)
    error = caught.value
    assert error.action == action
    assert (error.rank, error.stage, error.microbatch) == (1, 1, int(action[-1]))
    assert isinstance(error.__cause__, Boom)
    assert "in forward" in error.origin or "in backward" in error.origin
    assert "Boom" in str(error)
    for again in (pipe.step, pipe.eval):
        with pytest.raises(StepFailed, match="Boom") as refused:
            again(x, target=y)
        assert refused.value is not error
        assert refused.value.action == action


def test_a_hook_that_raises():
    pipe = LocalPipeline(
        ZOO["blocks"].make_stages(2), "1f1b", microbatches=2, loss_fn=squared_error
    )

    def fail(event):
        raise Boom(str(event.action))

    pipe.on("1SEND_B1", fail)
    x, y = make_batch(4)
    with pytest.raises(StepFailed, match="1SEND_B1"):
        pipe.step(x, target=y)


def test_an_interrupt_stays_an_interrupt():
    stages = ZOO["blocks"].make_stages(2)
    pipe = LocalPipeline(stages, "1f1b", microbatches=2, loss_fn=squared_error)

    def interrupt(event):
        raise KeyboardInterrupt

    hook = pipe.on("0F1", interrupt)
    x, y = make_batch(4)
    with pytest.raises(KeyboardInterrupt):
        pipe.step(x, target=y)
    hook.remove()
    with pytest.raises(StepFailed, match="KeyboardInterrupt"):
        pipe.step(x, target=y)


def test_a_failure_keeps_no_tensors():
    stages = [Block().double(), FailingStage("B").double()]
    pipe = LocalPipeline(stages, "1f1b", microbatches=2, loss_fn=squared_error)
    alive: list[weakref.ref] = []
    pipe.on("0F*", lambda event: None)
    # What only the graph keeps: it goes when the failed step's microbatches are forgotten.
    stages[0].second.register_forward_hook(lambda m, a, out: alive.append(weakref.ref(a[0])))
    x, y = make_batch(4)
    with contextlib.suppress(StepFailed):
        pipe.step(x, target=y)
    gc.collect()
    assert alive
    assert not any(ref() is not None for ref in alive)


def test_gradients_from_before_survive_a_failure_between_copies():
    parts = [Block().double(), FailingStage("F").double()]
    stages = [*parts, Block().double(), Block().double()]
    for stage in stages:
        for parameter in stage.parameters():
            parameter.grad = torch.ones_like(parameter)
    pipe = LocalPipeline(stages, "chimera", ranks=2, microbatches=8, loss_fn=squared_error)
    x, y = make_batch(16)
    with pytest.raises(StepFailed):
        pipe.step(x, target=y)
    assert all(p.grad is not None for stage in stages for p in stage.parameters())


def test_a_program_that_cannot_run_is_refused_before_it_runs():
    order = pipeloom.parse_grid("0F0 0B0 0F1 0B1\n1F1 1B1 1F0 1B0", name="circle")
    with pytest.raises(pipeloom.VerificationError, match="waits"):
        LocalPipeline(ZOO["blocks"].make_stages(2), order, loss_fn=squared_error).step(
            *make_batch(4)[:1]
        )


def test_a_rank_that_waits_for_nothing_is_seen():
    """Messages are taken away on their way; the local transport tells who waits for what."""
    pipe = LocalPipeline(
        ZOO["blocks"].make_stages(2), "1f1b", microbatches=2, loss_fn=squared_error
    )
    endpoint = pipe._transport.endpoint(0)
    endpoint.post_send = lambda *_: None
    x, y = make_batch(4)
    with pytest.raises(PipelineStalled, match=r"rank 1 waits at 1F0 for 0→1 \(rank 0 to 1\)"):
        pipe.step(x, target=y)


@pytest.mark.parametrize(
    ("stages", "options", "message"),
    [
        (3, {"schedule": "zbv"}, "say ranks="),
        (4, {"schedule": "1f1b", "ranks": 2}, "too many"),
        (4, {"schedule": "nonsense"}, "no schedule"),
        (4, {"schedule": "1f1b", "microbatches": None}, "how many microbatches"),
        (4, {"schedule": "1f1b", "shapes": "loose"}, "per_step"),
        (4, {"schedule": "1f1b", "handlers": {"X": print}}, "OVERLAP_F_B"),
        (4, {"schedule": "1f1b", "backward": "never"}, "none of"),
        (0, {"schedule": "1f1b"}, "at least one stage"),
    ],
)
def test_what_constructors_refuse(stages, options, message):
    with pytest.raises(ValueError, match=message):
        LocalPipeline(
            ZOO["blocks"].make_stages(stages),
            **{"microbatches": 4, "loss_fn": squared_error, **options},
        )
