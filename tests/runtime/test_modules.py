"""Modules with state, randomness, compiled code, and what a pipeline must not do to them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipeloom import LocalPipeline
from support.models import (
    WIDTH,
    ZOO,
    Block,
    Normalised,
    compare_gradients,
    copy_stages,
    make_batch,
    run_plainly,
    squared_error,
)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1", "zbv"])
def test_buffers_move_once_per_microbatch(schedule):
    stages = [Normalised().double() for _ in range(4 if schedule == "zbv" else 2)]
    plain = copy_stages(stages)
    pipe = LocalPipeline(stages, schedule, microbatches=4, loss_fn=squared_error)
    for _ in range(2):
        x, y = make_batch(12)
        pipe.step(x, target=y)
        run_plainly(plain, list(zip(x.chunk(4), y.chunk(4), strict=True)))
    compare_gradients(stages, plain)
    for stage, other in zip(stages, plain, strict=True):
        assert int(stage.batch_norm.num_batches_tracked) == 8
        torch.testing.assert_close(dict(stage.named_buffers()), dict(other.named_buffers()))


class Dropping(Block):
    def forward(self, x):
        return nn.functional.dropout(super().forward(x), 0.5, training=self.training)


def test_random_state_is_that_of_the_model_alone():
    """One stage: the same numbers as in a plain loop. Several: as many drawn, none by others."""
    for num_stages in (1, 3):
        stages = [Dropping().double() for _ in range(num_stages)]
        plain = copy_stages(stages)
        x, y = make_batch(12)
        pipe = LocalPipeline(stages, "1f1b", microbatches=4, loss_fn=squared_error)
        torch.manual_seed(5)
        pipe.step(x, target=y)
        after = torch.random.get_rng_state()
        torch.manual_seed(5)
        run_plainly(plain, list(zip(x.chunk(4), y.chunk(4), strict=True)))
        assert torch.equal(after, torch.random.get_rng_state())
        if num_stages == 1:
            compare_gradients(stages, plain)


def test_evaluation_leaves_the_mode_as_it_is():
    stages = [Dropping().double() for _ in range(2)]
    pipe = LocalPipeline(stages, "1f1b", microbatches=2)
    x, _ = make_batch(4)
    for stage in stages:
        stage.eval()
    torch.testing.assert_close(pipe.eval(x).output, stages[1](stages[0](x)))
    assert not any(stage.training for stage in stages)


@pytest.mark.parametrize("wrap", ["wrapped", "in place"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@pytest.mark.filterwarnings("ignore::pipeloom.runtime.backward.SplitBackwardWarning")
def test_compiled_modules(schedule, wrap):
    stages = ZOO["blocks"].make_stages(2)
    plain = copy_stages(stages)
    compiled: list[nn.Module] = []
    for stage in stages:
        if wrap == "in place":
            stage.compile(backend="aot_eager")
            compiled.append(stage)
        else:
            compiled.append(torch.compile(stage, backend="aot_eager"))
    pipe = LocalPipeline(compiled, schedule, microbatches=4, loss_fn=squared_error)
    x, y = make_batch(8)
    for _ in range(2):
        pipe.step(x, target=y)
        run_plainly(plain, list(zip(x.chunk(4), y.chunk(4), strict=True)))
    compare_gradients(stages, plain)


def test_mixed_precision_context_of_the_caller():
    stages = [stage.float() for stage in ZOO["blocks"].make_stages(3)]
    plain = copy_stages(stages)
    x, y = (tensor.float() for tensor in make_batch(8))
    pipe = LocalPipeline(stages, "1f1b", microbatches=4, loss_fn=squared_error)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pipe.step(x, target=y)
        run_plainly(plain, list(zip(x.chunk(4), y.chunk(4), strict=True)))
    compare_gradients(stages, plain, tolerance=1e-6)


def test_one_module_at_several_places():
    """Weight sharing between stages: the gradient of every use comes together."""
    shared = Block().double()
    stages = [shared, Block().double(), shared]
    pipe = LocalPipeline(stages, "1f1b", microbatches=3, loss_fn=squared_error)
    x, y = make_batch(6)
    plain = copy_stages(stages)
    assert plain[0] is plain[2]
    pipe.step(x, target=y)
    run_plainly(plain, list(zip(x.chunk(3), y.chunk(3), strict=True)))
    compare_gradients(stages, plain)


def test_an_output_changed_in_place_by_the_next_stage():
    """An in-place activation at the start of a stage would change a leaf; torch says so."""

    class InPlace(Block):
        def forward(self, x):
            return super().forward(x.relu_())

    stages = [Block().double(), InPlace().double()]
    pipe = LocalPipeline(stages, "1f1b", microbatches=2, loss_fn=squared_error)
    x, y = make_batch(4)
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        pipe.step(x, target=y)


class DefersItsWeights(nn.Module):
    """A linear layer that computes its weight's gradient when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.waiting: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.ran = 0

    def forward(self, x):
        module = self

        class Product(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, weight):
                ctx.save_for_backward(x, weight)
                return x @ weight.T

            @staticmethod
            def backward(ctx, grad):
                x, weight = ctx.saved_tensors
                module.waiting.append((x.detach(), grad))
                return grad @ weight, None

        # An input that needs a gradient keeps the backward alive on the first stage, too.
        return Product.apply(x if x.requires_grad else x.clone().requires_grad_(), self.weight)

    def build_runner(self):
        waiting, self.waiting = self.waiting, []

        def run() -> None:
            self.ran += 1
            for x, grad in waiting:
                product = grad.T @ x
                self.weight.grad = (
                    product if self.weight.grad is None else self.weight.grad + product
                )

        return run


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_a_module_that_defers_its_own_weights(schedule):
    stages = [DefersItsWeights().double(), Block().double()]
    plain = copy_stages(stages)
    pipe = LocalPipeline(
        stages,
        schedule,
        microbatches=4,
        loss_fn=squared_error,
        weight_backward={0: stages[0].build_runner},
    )
    x, y = make_batch(8)
    pipe.step(x, target=y)
    run_plainly(plain, list(zip(x.chunk(4), y.chunk(4), strict=True)))
    plain[0].build_runner()()
    compare_gradients(stages, plain)
    assert stages[0].ran == 4


def test_a_backward_method_for_each_stage():
    stages = ZOO["blocks"].make_stages(3)
    plain = copy_stages(stages)
    pipe = LocalPipeline(
        stages,
        "zb_h1",
        microbatches=4,
        loss_fn=squared_error,
        backward={0: "whole", 2: "graph"},
        backward_options={"self_check": "numeric"},
    )
    x, y = make_batch(8)
    pipe.step(x, target=y)
    run_plainly(plain, list(zip(x.chunk(4), y.chunk(4), strict=True)))
    compare_gradients(stages, plain)


def test_training_reduces_the_loss():
    stages = [stage.float() for stage in ZOO["blocks"].make_stages(4)]
    pipe = LocalPipeline(stages, "zbv", ranks=2, microbatches=4, loss_fn=squared_error)
    optimizer = torch.optim.Adam((p for s in stages for p in s.parameters()), lr=1e-2)
    x = torch.randn(16, WIDTH)
    y = x.roll(1, dims=-1)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        losses.append(float(pipe.step(x, target=y).loss))
        optimizer.step()
    assert losses[-1] < 0.3 * losses[0]
