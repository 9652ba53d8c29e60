"""The step's loss: mean or weighted sum, per microbatch, on time and under the right number."""

from __future__ import annotations

import pytest
import torch

import pipeloom
from pipeloom import LocalPipeline, StepError, StepFailed
from support.models import (
    ZOO,
    compare_gradients,
    copy_stages,
    make_batch,
    run_plainly,
    squared_error,
)


def summed(output, target):
    return ((output - target["y"]) ** 2 * target["weight"][:, None]).sum()


@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "chimera"])
@pytest.mark.parametrize("as_tensor", [True, False])
def test_weighted_sums(schedule, as_tensor):
    parts = ZOO["blocks"].make_stages(4 if schedule == "zbv" else 2)
    plain = copy_stages(parts)
    stages = parts + copy_stages(parts) if schedule == "chimera" else parts
    x, y = make_batch(10)
    weight = torch.arange(1.0, 11.0).double()
    pipe = LocalPipeline(
        stages,
        schedule,
        ranks=2,
        microbatches=4,
        loss_fn=summed,
        loss_weight=lambda t: t["weight"].sum() if as_tensor else float(t["weight"].sum()),
    )
    result = pipe.step(x, target={"y": y, "weight": weight})
    cut = [
        (xm, {"y": ym, "weight": wm})
        for xm, ym, wm in zip(
            x.tensor_split(4), y.tensor_split(4), weight.tensor_split(4), strict=True
        )
    ]
    losses = run_plainly(plain, cut, summed, total=float(weight.sum()))
    compare_gradients(stages[: len(plain)], plain)
    torch.testing.assert_close(torch.stack(result.losses), torch.stack(losses))
    torch.testing.assert_close(result.loss, torch.stack(losses).sum() / weight.sum())


def test_a_weight_of_zero_is_refused():
    pipe = LocalPipeline(
        ZOO["blocks"].make_stages(2), "1f1b", microbatches=2, loss_fn=squared_error,
        loss_weight=lambda target: 0,
    )  # fmt: skip
    x, y = make_batch(4)
    with pytest.raises(ValueError, match="loss_weight"):
        pipe.step(x, target=y)


def test_losses_keep_their_numbers_when_the_last_stage_runs_out_of_order():
    order = pipeloom.parse_grid(
        "0F2 0F0 0F1 0B2 0B1 0B0\n1F2 1F0 1F1 1B2 1B1 1B0", name="out of order"
    )
    stages = ZOO["blocks"].make_stages(2)
    plain = copy_stages(stages)
    x, y = make_batch(6)
    result = LocalPipeline(stages, order, loss_fn=squared_error).step(
        x, target=y, return_output=True
    )
    losses = run_plainly(plain, list(zip(x.chunk(3), y.chunk(3), strict=True)))
    torch.testing.assert_close(torch.stack(result.losses), torch.stack(losses))
    compare_gradients(stages, plain)
    torch.testing.assert_close(result.output, plain[1](plain[0](x)).detach())


def test_loss_kwargs_and_types():
    def loss_fn(output, target, scale):
        return scale * squared_error(output, target)

    stages = [stage.float() for stage in ZOO["blocks"].make_stages(2)]
    pipe = LocalPipeline(stages, "1f1b", microbatches=2, loss_fn=loss_fn)
    x, y = (tensor.float() for tensor in make_batch(4))
    one = pipe.step(x, target=y, loss_kwargs={"scale": 1.0})
    three = pipe.step(x, target=y, loss_kwargs={"scale": 3.0})
    torch.testing.assert_close(3 * one.loss, three.loss)
    assert one.loss.dtype == one.losses[0].dtype == torch.float32
    assert not one.loss.requires_grad


def test_evaluation():
    stages = ZOO["blocks"].make_stages(2)
    pipe = LocalPipeline(stages, "1f1b", microbatches=2, loss_fn=squared_error)
    for rows, count in ((3, 3), (8, None), (9, 2)):
        x, y = make_batch(rows)
        result = pipe.eval(x, target=y, microbatches=count)
        expected = stages[1](stages[0](x))
        torch.testing.assert_close(result.output, expected)
        assert not result.output.requires_grad
        cuts = [
            squared_error(expected[i], y[i]) for i in torch.arange(rows).tensor_split(count or 2)
        ]
        torch.testing.assert_close(result.loss, torch.stack(cuts).mean())
    without = pipe.eval(x)
    assert without.loss is None
    assert without.losses is None
    torch.testing.assert_close(without.output, expected)
    assert pipe.eval(x, return_output=False).output is None
    assert all(p.grad is None for stage in stages for p in stage.parameters())


@pytest.mark.parametrize("schedule", ["zbv", "dualpipe", "chimera", "interleaved_1f1b"])
def test_evaluation_under_every_placement(schedule):
    shape = pipeloom.build_schedule(schedule, ranks=2, microbatches=4)
    parts = ZOO["blocks"].make_stages(len(shape.topology.chains[0]))
    pipe = LocalPipeline(parts, schedule, ranks=2, microbatches=4, loss_fn=squared_error)
    for rows, count in ((8, None), (5, 5), (6, 2), (1, 1)):
        x, y = make_batch(rows)
        expected = x
        for part in parts:
            expected = part(expected)
        result = pipe.eval(x, target=y, microbatches=count)
        torch.testing.assert_close(result.output, expected)
        cuts = torch.arange(rows).tensor_split(count or 4)
        losses = torch.stack([squared_error(expected[cut], y[cut]) for cut in cuts])
        torch.testing.assert_close(torch.stack(result.losses), losses)
        torch.testing.assert_close(result.loss, losses.mean())
    assert all(p.grad is None for stage in parts for p in stage.parameters())


def test_no_grad_says_to_call_eval():
    pipe = LocalPipeline(
        ZOO["blocks"].make_stages(2), "1f1b", microbatches=2, loss_fn=squared_error
    )
    x, y = make_batch(4)
    for forbid in (torch.no_grad, torch.inference_mode):
        with forbid(), pytest.raises(StepError, match="call eval"):
            pipe.step(x, target=y)
        with forbid():
            pipe.eval(x, target=y)
    pipe.step(x, target=y)


def test_a_schedule_without_backward_trains_nothing():
    stages = ZOO["blocks"].make_stages(2)
    pipe = LocalPipeline(stages, "forward_only", microbatches=2, loss_fn=squared_error)
    x, y = make_batch(4)
    with pytest.raises(StepError, match="call eval"):
        pipe.step(x, target=y)
    assert pipe.eval(x, target=y).loss is not None


def test_without_a_loss():
    pipe = LocalPipeline(ZOO["blocks"].make_stages(2), "1f1b", microbatches=2)
    x, y = make_batch(4)
    with pytest.raises(StepError, match="loss_fn"):
        pipe.step(x, target=y)
    assert pipe.eval(x, target=y).loss is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_can_be_an_error(bad):
    x, y = make_batch(6)
    y[4] = bad
    stages = ZOO["blocks"].make_stages(2)
    loose = LocalPipeline(stages, "1f1b", microbatches=3, loss_fn=squared_error)
    assert not torch.isfinite(loose.step(x, target=y).loss)
    strict = LocalPipeline(
        stages, "1f1b", microbatches=3, loss_fn=squared_error, require_finite_loss=True
    )
    with pytest.raises(StepFailed, match="loss of microbatch 2 is") as caught:
        strict.step(x, target=y)
    assert caught.value.microbatch == 2


@pytest.mark.parametrize("returned", [torch.zeros(2), 1.0])
def test_a_loss_must_be_one_number(returned):
    pipe = LocalPipeline(
        ZOO["blocks"].make_stages(2), "1f1b", microbatches=2, loss_fn=lambda o, t: returned
    )
    x, y = make_batch(4)
    with pytest.raises(StepFailed, match="must return one number"):
        pipe.step(x, target=y)
