"""Captured stages. What needs a device is skipped where there is none."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipeloom.errors import BackwardError, BackwardMethodError
from pipeloom.runtime.backward.cuda_graphs import CapturedStage

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def stage(device: str) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 16))
    return layers.to(device)


def test_what_cannot_be_captured_is_refused_with_every_reason() -> None:
    module = stage("cpu")
    module[0].bias.register_hook(lambda grad: None)
    with pytest.raises(BackwardMethodError) as caught:
        CapturedStage(module, sample_inputs=[torch.zeros(2, 16)], num_slots=1, stage=3)
    message = str(caught.value)
    assert message.startswith("stage 3 cannot be captured")
    for part in ("parameter 0.weight is on cpu", "input 0 is on cpu", "parameter 0.bias has hooks"):
        assert part in message


@needs_cuda
@pytest.mark.parametrize("method", ["auto", "whole"])
def test_interleaved_slots_give_the_gradients_of_a_plain_loop(method: str) -> None:
    module, plain = stage("cuda"), stage("cuda")
    sample = torch.zeros(4, 16, device="cuda", requires_grad=True)
    captured = CapturedStage(module, sample_inputs=[sample], num_slots=2, method=method)
    batches = [torch.randn(4, 16, device="cuda") for _ in range(4)]
    grads = [torch.randn(4, 16, device="cuda") for _ in range(4)]
    expected = []
    for x, grad in zip(batches, grads, strict=True):
        leaf = x.clone().requires_grad_()
        plain(leaf).backward(grad)
        expected.append(leaf.grad)
    found = []
    for first in (0, 2):
        for slot in (0, 1):
            captured.forward(slot, [batches[first + slot]])
        found += [captured.input(slot, [grads[first + slot]])[0].clone() for slot in (0, 1)]
        for slot in (1, 0):
            captured.weight(slot)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)
    for mine, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


@needs_cuda
def test_replaced_gradients_are_an_error_that_names_them() -> None:
    module = stage("cuda")
    sample = torch.zeros(4, 16, device="cuda", requires_grad=True)
    captured = CapturedStage(module, sample_inputs=[sample], num_slots=1)
    captured.forward(0, [sample])
    captured.input(0, [torch.ones(4, 16, device="cuda")])
    module.zero_grad(set_to_none=True)
    with pytest.raises(BackwardError, match=r"set_to_none=False.*0\.weight"):
        captured.weight(0)
