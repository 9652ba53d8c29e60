"""Captured stages, against plain autograd.

What is recorded is either CUDA graphs, where there is a device, or operations on the CPU, which are
played again in the same way: into the same memory, without running any other code.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipeloom
from pipeloom.errors import ShapeError
from pipeloom.runtime.backward import choose_method
from pipeloom.runtime.backward.cuda_graphs import (
    CapturedStage,
    slots_needed,
)
from tests.runtime.backward.capturing import (
    NewRecorder,
    batches,
    sample,
    stage,
)
from tests.runtime.backward.harness import accumulate, assert_same_parameters
from tests.runtime.backward.zoo import build, feed
from tests.support.op_recorder import OpRecorder

torch.set_num_threads(1)


@pytest.mark.parametrize("method", ["auto", "deferred", "graph", "whole"])
def test_interleaved_slots_give_the_gradients_of_a_plain_loop(
    method: str, new_recorder: NewRecorder
) -> None:
    recorder = new_recorder()
    module, plain = stage(recorder), stage(recorder)
    for ones, twos in zip(module.parameters(), plain.parameters(), strict=True):
        ones.grad, twos.grad = torch.ones_like(ones), torch.ones_like(twos)
    captured = CapturedStage(
        module, sample(recorder), num_slots=2, recorder=recorder, method=method
    )
    backward = choose_method(module, weight_backward=captured.weight_backward)
    inputs, grads = batches(recorder, 8)[:4], batches(recorder, 8)[4:]
    expected, found = [], []
    for x, grad in zip(inputs, grads, strict=True):
        leaf = x.clone().requires_grad_()
        plain(leaf).backward(grad)
        expected.append(leaf.grad)

    def forward(index: int) -> Any:
        leaf = inputs[index].clone().requires_grad_()
        with backward.forward():
            y = module(leaf)
        return backward.save(microbatch=index, inputs=[leaf], outputs=[y])

    for first in (0, 2):
        saved = [forward(first), forward(first + 1)]
        found += [backward.input(saved[i], [grads[first + i]])[0] for i in (0, 1)]
        for one in reversed(saved):
            backward.weight(one)
        del saved, one
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)
    for mine, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_capturing_leaves_no_trace(new_recorder: NewRecorder) -> None:
    recorder = new_recorder()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)).to(recorder.device)
    module[0].weight.grad = torch.full_like(module[0].weight, 3)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    random = torch.get_rng_state()
    captured = CapturedStage(module, sample(recorder), num_slots=2, recorder=recorder)
    assert torch.equal(torch.get_rng_state(), random)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert torch.equal(module[0].weight.grad, torch.full_like(module[0].weight, 3))
    assert module[0].bias.grad is None
    captured.release()
    assert "forward" not in vars(module)


SCHEDULES = [("1f1b", 4), ("zb-h1", 4), ("zbv", 2), ("interleaved_1f1b", 2), ("gpipe", 4)]


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize(("schedule", "ranks"), SCHEDULES)
def test_pipelines_of_captured_stages(
    schedule: str, ranks: int, set_to_none: bool, new_recorder: NewRecorder
) -> None:
    probe = new_recorder()
    captured_stages = [stage(probe, seed) for seed in range(4)]
    plain_stages = [stage(probe, seed) for seed in range(4)]
    options: dict[str, Any] = {
        "schedule": schedule,
        "ranks": ranks,
        "microbatches": 8,
        "loss_fn": nn.functional.mse_loss,
    }
    plain = pipeloom.LocalPipeline(plain_stages, **options)
    captured = [
        CapturedStage(
            module,
            torch.zeros(2, 8, device=probe.device, requires_grad=index > 0),
            num_slots=slots_needed(plain.schedule, index),
            stage=index,
            recorder=new_recorder(),
        )
        for index, module in enumerate(captured_stages)
    ]
    pipe = pipeloom.LocalPipeline(
        captured_stages,
        weight_backward={index: one.weight_backward for index, one in enumerate(captured)},
        **options,
    )
    x, target = torch.randn(2, 16, 8, device=probe.device)
    for _ in range(3):
        for module in (*plain_stages, *captured_stages):
            module.zero_grad(set_to_none=set_to_none)
        mine, theirs = pipe.step(x, target=target), plain.step(x, target=target)
        torch.testing.assert_close(mine.loss, theirs.loss)
        for a, b in zip(captured_stages, plain_stages, strict=True):
            for one, other in zip(a.parameters(), b.parameters(), strict=True):
                torch.testing.assert_close(one.grad, other.grad)
    torch.testing.assert_close(pipe.eval(x, target=target).loss, plain.eval(x, target=target).loss)
    gc.collect()
    assert [len(one._free) for one in captured] == [one.num_slots for one in captured]


@pytest.mark.parametrize("name", ["transformer", "convolution", "first stage", "merged lora"])
def test_stages_of_the_zoo(name: str) -> None:
    """Whatever is deferred, and how: a first stage of tokens, buffers, weights made of weights."""
    module, inputs = build(name), [feed(name) for _ in range(4)]
    truth = accumulate(module, inputs)
    captured = CapturedStage(module, *feed(name), num_slots=4, recorder=OpRecorder())
    backward = choose_method(module, weight_backward=captured.weight_backward)
    saved, found = [], []
    for index, leaves in enumerate(inputs):
        leaves = [x.detach().clone().requires_grad_(x.requires_grad) for x in leaves]
        outputs = module(*leaves)
        saved.append(backward.save(microbatch=index, inputs=leaves, outputs=[outputs]))
    for one, grads in zip(saved, truth.output_grads, strict=True):
        found.append(backward.input(one, grads))
    for one in saved[::-1]:
        backward.weight(one)
    assert_same_parameters(module, truth.module)
    for (mine, *_), (theirs, *_) in zip(found, truth.input_grads, strict=True):
        assert mine is theirs or torch.allclose(mine, theirs)
    for mine, theirs in zip(module.buffers(), truth.module.buffers(), strict=True):
        assert torch.equal(mine, theirs)


class Pytrees(nn.Module):
    """Arguments by name, nested; results in a dict, one of them without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: dict[str, Tensor], *, scale: Tensor, times: int) -> dict[str, Any]:
        y = self.layer(x["hidden"]) * scale * times
        return {"y": y, "largest": y.detach().argmax(-1), "nothing": None, "times": times}


def test_nested_arguments_and_results(new_recorder: NewRecorder) -> None:
    recorder = new_recorder()
    module = Pytrees().to(recorder.device)
    scale = torch.ones(8, device=recorder.device)
    captured = CapturedStage(
        module,
        {"hidden": sample(recorder)},
        kwargs={"scale": scale, "times": 3},
        num_slots=1,
        recorder=recorder,
    )
    [x] = batches(recorder, 1)
    leaf = x.clone().requires_grad_()
    result = module({"hidden": leaf}, scale=2 * scale, times=3)
    expected = 6 * (x @ module.layer.weight.T + module.layer.bias)
    torch.testing.assert_close(result["y"], expected)
    assert torch.equal(result["largest"], expected.argmax(-1))
    assert (result["nothing"], result["times"]) == (None, 3)
    result["y"].sum().backward()
    captured.weight_backward()()
    torch.testing.assert_close(leaf.grad, 6 * module.layer.weight.sum(0).expand(4, 8))
    torch.testing.assert_close(module.layer.weight.grad, 6 * x.sum(0).expand(8, 8))
    with pytest.raises(ShapeError, match=r"arguments\[1\]\['times'\] is the value 2, captured"):
        module({"hidden": leaf}, scale=scale, times=2)
