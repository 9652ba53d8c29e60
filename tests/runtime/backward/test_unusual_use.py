"""What users do to stages, gradients and tensors between the parts of a microbatch."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeloom import LocalPipeline
from pipeloom.runtime.backward import choose_method
from tests.runtime.backward.harness import (
    accumulate,
    assert_same_inputs,
    assert_same_parameters,
    run_forward,
    run_split,
)
from tests.runtime.backward.small import every_method, one_step, three_layers, x_of
from tests.runtime.backward.zoo import DTYPE

torch.set_num_threads(1)

# ── parameters that change ───────────────────────────────────────────────────────────────────────


@every_method
def test_freezing_and_thawing_between_steps(method: str) -> None:
    module, batches = three_layers(), [x_of() for _ in range(2)]
    backward = choose_method(module, method=method)
    for frozen in ((), (0,), (0, 2), ()):
        module.zero_grad()
        for index in (0, 2):
            module[index].requires_grad_(index not in frozen)
        truth = accumulate(module, batches)
        gradients = run_split(backward, module, batches, truth)
        assert_same_parameters(module, truth.module)
        assert_same_inputs(gradients, truth.input_grads)


@pytest.mark.parametrize("when", ["before I", "before W"])
def test_a_parameter_frozen_in_the_middle_gets_no_gradient(when: str) -> None:
    module = three_layers()
    backward = choose_method(module)
    one_step(backward, module, *x_of())  # something is known of the parameters
    module.zero_grad()
    saved = run_forward(backward, module, x_of(), 0)
    if when == "before I":
        module[0].requires_grad_(False)
    backward.input(saved, [torch.ones(3, 4, dtype=DTYPE)])
    if when == "before W":
        module.requires_grad_(False)
    backward.weight(saved)
    assert module[0].weight.grad is None
    assert (module[2].weight.grad is None) == (when == "before W")


def test_parameters_made_for_one_forward_are_let_go() -> None:
    module = nn.Linear(4, 4, dtype=DTYPE)
    backward, [x] = choose_method(module), x_of()
    own = {n: p.detach().clone().requires_grad_() for n, p in module.named_parameters()}
    alive = [weakref.ref(parameter) for parameter in own.values()]
    with backward.forward():
        y = torch.func.functional_call(module, own, (x,))
    saved = backward.save(microbatch=0, inputs=[x], outputs=[y])
    backward.input(saved, [torch.ones_like(y)])
    backward.weight(saved)
    assert all(parameter.grad is not None for parameter in own.values())
    del saved, y, own
    assert not any(reference() for reference in alive)


# ── memory that is somebody else's ───────────────────────────────────────────────────────────────


class Positions(nn.Module):
    """The gradient of the positions is a view of the input's, where a microbatch is one row."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(5, 4))
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x + self.positions.unsqueeze(0)))


@every_method
def test_grad_is_never_made_of_a_gradient_that_was_returned(method: str) -> None:
    module, [x] = Positions().to(DTYPE), x_of(1, 5, 4)
    backward = choose_method(module, method=method)
    returned = []
    for index in range(2):
        saved = run_forward(backward, module, [x], index)
        returned += backward.input(saved, [torch.ones(1, 5, 4, dtype=DTYPE)])
        before = [one.clone() for one in returned]
        backward.weight(saved)
        for one, copy in zip(returned, before, strict=True):
            assert torch.equal(one, copy)
    assert module.positions.grad.data_ptr() not in [one.data_ptr() for one in returned]


@pytest.mark.parametrize("schedule", ["zbv", "interleaved_zero_bubble", "dualpipev"])
def test_neighbours_that_hand_on_gradients_of_one_row(schedule: str) -> None:
    results = []
    for method in ("auto", "whole"):
        torch.manual_seed(0)
        stages = [Positions().to(DTYPE) for _ in range(4)]
        pipe = LocalPipeline(
            stages,
            schedule=schedule,
            ranks=2,
            microbatches=6,
            loss_fn=F.mse_loss,
            backward=method,
        )
        x, target = torch.randn(2, 6, 5, 4, dtype=DTYPE)
        pipe.step(x, target=target)
        results.append([p.grad for stage in stages for p in stage.parameters()])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs)


class Conjugated(nn.Module):
    """A bias whose gradient comes out as a lazy conjugate."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex128))
        self.bias = nn.Parameter(torch.randn(4, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.complex(x, x) @ self.weight + self.bias.conj()).abs()


def test_totals_that_are_lazy_conjugates() -> None:
    torch.manual_seed(0)
    module, batches = Conjugated(), [x_of(grad=False) for _ in range(2)]
    truth = accumulate(module, batches)
    backward = choose_method(module)
    first, second = (run_forward(backward, module, x, i) for i, x in enumerate(batches))
    backward.full(first, truth.output_grads[0])
    assert module.bias.grad.is_conj()
    backward.input(second, truth.output_grads[1])
    backward.weight(second)
    assert_same_parameters(module, truth.module)


class SparseAndDense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4, sparse=True)

    def forward(self, rows: Tensor) -> Tensor:
        return self.table(rows) + torch.eye(3, 5, dtype=DTYPE) @ self.table.weight


def test_sparse_and_dense_gradients_of_one_parameter() -> None:
    module, batches = SparseAndDense().to(DTYPE), [[torch.tensor([0, 3, 3])] for _ in range(3)]
    truth = accumulate(module, batches)
    run_split(choose_method(module), module, batches, truth)
    assert_same_parameters(module, truth.module)


def test_a_gradient_may_be_wider_than_its_parameter() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    module[1].weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    module[1].weight.grad_dtype = None

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.scale = module[0], module[1].weight

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) * self.scale

    stage, [x] = Scaled(), [torch.randn(3, 4, requires_grad=True)]
    backward = choose_method(stage)
    saved = run_forward(backward, stage, [x], 0)
    backward.input(saved, [torch.ones(3, 4)])
    backward.weight(saved)
    assert stage.scale.grad.dtype == torch.float32


class Tagged(Tensor):
    """A tensor with a name of its own and nothing else."""


@every_method
def test_gradients_of_subclasses_as_inputs_are_plain(method: str) -> None:
    module = nn.Linear(4, 4, dtype=DTYPE)
    backward = choose_method(module, method=method)
    [x] = x_of(grad=False)
    with backward.forward():
        y = module(x.as_subclass(Tagged))
    saved = backward.save(microbatch=0, inputs=[], outputs=[y])
    backward.input(saved, [torch.ones(3, 4, dtype=DTYPE)])
    backward.weight(saved)
    assert type(module.weight.grad) is Tensor
    torch.testing.assert_close(module.weight.grad, torch.ones(4, 3, dtype=DTYPE) @ x)


def test_gradients_made_for_inference() -> None:
    module, [x] = nn.Linear(4, 4, dtype=DTYPE), x_of()
    backward = choose_method(module)
    saved = run_forward(backward, module, [x], 0)
    with torch.inference_mode():
        grad = torch.ones(3, 4, dtype=DTYPE)
    backward.input(saved, [grad])
    backward.weight(saved)
    torch.testing.assert_close(module.weight.grad, torch.ones(4, 3, dtype=DTYPE) @ x.detach())
