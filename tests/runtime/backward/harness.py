"""Running a stage's backward split, and by plain autograd, on the same microbatches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from pipeloom.runtime.backward import BackwardMethod, SavedMicrobatch
from tests.runtime.backward.zoo import flat

Microbatch = list[Tensor]


def fresh(inputs: Sequence[Tensor]) -> list[Tensor]:
    """The same values in new leaves."""
    return [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]


@dataclass
class Truth:
    """What plain autograd gives: the module after its backwards, and the inputs' gradients."""

    module: nn.Module
    output_grads: list[list[Tensor]]
    input_grads: list[list[Tensor | None]] = field(default_factory=list)


def accumulate(module: nn.Module, microbatches: Sequence[Microbatch]) -> Truth:
    """A plain accumulation loop over the microbatches, on a copy of the module."""
    truth = Truth(copy.deepcopy(module), [])
    for mine, theirs in zip(truth.module.parameters(), module.parameters(), strict=True):
        mine.grad = theirs.grad.clone() if theirs.grad is not None else None
    for inputs in microbatches:
        leaves = fresh(inputs)
        outputs = flat(truth.module(*leaves))
        grads = [torch.randn_like(output) for output in outputs]
        pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if o.requires_grad]
        torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        truth.output_grads.append(grads)
        truth.input_grads.append([leaf.grad for leaf in leaves])
    return truth


def run_forward(
    backward: BackwardMethod, module: nn.Module, inputs: Microbatch, index: int
) -> SavedMicrobatch:
    leaves = fresh(inputs)
    with backward.forward():
        outputs = flat(module(*leaves))
    return backward.save(microbatch=index, inputs=leaves, outputs=outputs)


def run_split(
    backward: BackwardMethod,
    module: nn.Module,
    microbatches: Sequence[Microbatch],
    truth: Truth,
    *,
    after_input: Callable[[int, SavedMicrobatch], None] = lambda index, saved: None,
) -> list[list[Tensor | None]]:
    """All forwards but one, all their I, the last microbatch, then W in another order."""
    num = len(microbatches)
    gradients: list[list[Tensor | None]] = []
    saved: list[SavedMicrobatch] = []

    def backward_inputs(index: int) -> None:
        gradients.append(backward.input(saved[index], truth.output_grads[index]))
        after_input(index, saved[index])

    for index, inputs in enumerate(microbatches[:-1]):
        saved.append(run_forward(backward, module, inputs, index))
    for index in range(num - 1):
        backward_inputs(index)
    saved.append(run_forward(backward, module, microbatches[-1], num - 1))
    backward_inputs(num - 1)
    for index in [num - 2, *range(num - 2), num - 1]:
        backward.weight(saved[index])
    return gradients


def close(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    tight = a.dtype in (torch.float64, torch.complex128)
    rtol, atol = (1e-10, 1e-10) if tight else (1e-4, 1e-5)
    return a.dtype == b.dtype and torch.allclose(a, b, rtol=rtol, atol=atol)


def assert_same_parameters(module: nn.Module, truth: nn.Module) -> None:
    expected = dict(truth.named_parameters())
    wrong = [
        name for name, p in module.named_parameters() if not close(p.grad, expected[name].grad)
    ]
    assert not wrong, f"gradients differ: {wrong}"


def assert_same_inputs(
    found: Sequence[Sequence[Tensor | None]], truth: Sequence[Sequence[Tensor | None]]
) -> None:
    wrong = [
        (index, leaf)
        for index, (mine, theirs) in enumerate(zip(found, truth, strict=True))
        for leaf, (a, b) in enumerate(zip(mine, theirs, strict=True))
        if not close(a, b)
    ]
    assert not wrong, f"input gradients differ at (microbatch, input): {wrong}"
