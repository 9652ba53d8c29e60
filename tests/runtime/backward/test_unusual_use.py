"""What users do to stages, gradients and tensors between the parts of a microbatch."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from pipeloom import LocalPipeline
from pipeloom.errors import BackwardError, BackwardMethodError
from pipeloom.runtime.backward import BackwardMethod, SavedMicrobatch, choose_method
from tests.runtime.backward.harness import (
    accumulate,
    assert_same_inputs,
    assert_same_parameters,
    run_forward,
    run_split,
)
from tests.runtime.backward.zoo import DTYPE

torch.set_num_threads(1)

METHODS = ["auto", "deferred", "graph", "whole"]
every_method = pytest.mark.parametrize("method", METHODS)


def x_of(*shape: int, grad: bool = True) -> list[Tensor]:
    return [torch.randn(shape or (3, 4), dtype=DTYPE, requires_grad=grad)]


def three_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).to(DTYPE)


def one_step(backward: BackwardMethod, module: nn.Module, *inputs: Tensor) -> None:
    saved = run_forward(backward, module, list(inputs), 0)
    backward.input(saved, [torch.ones(3, 4, dtype=DTYPE)])
    backward.weight(saved)


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


# ── what nodes of the graph may be like ──────────────────────────────────────────────────────────


class NamesakeVariable(torch.autograd.Function):
    """Has an attribute that nodes of parameters have as well."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.variable = weight.detach()
        return 2 * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


class WithNamesake(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) @ NamesakeVariable.apply(self.weight)


class ForwardMode(nn.Module):
    """Forward-mode derivatives inside: their zeros have no memory."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(4, 4)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.jvp(lambda z: torch.tanh(z @ self.a), (x,), (x,))[1] @ self.b


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return 1 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Ungiven(nn.Module):
    """A parameter whose Function gives no gradient for it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.layer = nn.Parameter(torch.randn(4)), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(NoGradient.apply(x, self.weight))


@every_method
@pytest.mark.parametrize("kind", [WithNamesake, ForwardMode, Ungiven])
def test_unusual_nodes(kind: type[nn.Module], method: str) -> None:
    torch.manual_seed(0)
    module, batches = kind().to(DTYPE), [x_of() for _ in range(3)]
    truth = accumulate(module, batches)
    gradients = run_split(choose_method(module, method=method), module, batches, truth)
    assert_same_parameters(module, truth.module)
    assert_same_inputs(gradients, truth.input_grads)


def test_those_who_listen_hear_also_of_a_gradient_that_is_not_there() -> None:
    module, heard = Ungiven().to(DTYPE), []
    module.weight.register_post_accumulate_grad_hook(heard.append)
    backward = choose_method(module)
    for num_heard in (1, 2, 3):
        one_step(backward, module, *x_of())
        assert len(heard) == num_heard


@pytest.mark.filterwarnings("ignore:.*may give each of them out only once")
@every_method
def test_saved_tensors_that_hooks_give_out_once(method: str) -> None:
    """As offloading does that frees the host's copy."""
    module, batches = three_layers(), [x_of() for _ in range(3)]
    truth = accumulate(module, batches)
    backward = choose_method(module, method=method, self_check="numeric")
    store: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> int:
        store[len(store)] = tensor
        return len(store) - 1

    for index, inputs in enumerate(batches):
        store.clear()
        [x] = inputs
        with backward.forward(), saved_tensors_hooks(pack, store.pop):
            y = module(x)
        saved = backward.save(microbatch=index, inputs=[x], outputs=[y])
        backward.input(saved, truth.output_grads[index])
        backward.weight(saved)
    assert_same_parameters(module, truth.module)


class TransformInside(nn.Module):
    """A product without a recipe, and code that allows no hooks on saved tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Bilinear(4, 4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.grad(lambda z: torch.tanh(z).sum())(self.mix(x, x))


def test_code_that_allows_no_hooks_is_told_what_to_do() -> None:
    module = TransformInside().to(DTYPE)
    backward = choose_method(module, stage=6)
    one_step(backward, module, *x_of())
    with pytest.raises(BackwardMethodError, match=r'stage 6 runs code .* method="deferred"'):
        one_step(backward, module, *x_of())
    backward = choose_method(module, method="deferred", stage=6)
    with pytest.warns(UserWarning, match="not split"):
        one_step(backward, module, *x_of())
    one_step(backward, module, *x_of())


class NormInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


def test_the_numeric_check_undoes_what_a_recomputation_does_to_buffers() -> None:
    module, batches = NormInside().to(DTYPE), [x_of() for _ in range(2)]
    truth = accumulate(module, batches)
    run_split(choose_method(module, self_check="numeric"), module, batches, truth)
    for mine, theirs in zip(module.buffers(), truth.module.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs)


class NormedConvolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.utils.parametrizations.weight_norm(nn.Conv1d(16, 16, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


def test_a_convolution_does_not_hold_its_weight() -> None:
    module = NormedConvolution().to(DTYPE)
    [x] = x_of(2, 16, 5)
    backward = choose_method(module)
    saved = run_forward(backward, module, [x], 0)
    backward.input(saved, [torch.ones(2, 16, 3, dtype=DTYPE)])
    assert backward.held_bytes(saved) == 8 * (2 * 16 * 5 + 2 * 16 * 3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 1  # an optimizer step of somebody in a hurry
    plain = nn.Conv1d(3, 3, 3)
    backward = choose_method(plain)
    saved = run_forward(backward, plain, [torch.randn(1, 3, 5, requires_grad=True)], 0)
    backward.input(saved, [torch.ones(1, 3, 3)])
    with torch.no_grad():
        plain.weight += 1
    backward.weight(saved)


# ── what is overwritten, or wrong from the start ─────────────────────────────────────────────────


@pytest.mark.parametrize("what", ["gradient", "input"])
@pytest.mark.parametrize("method", ["auto", "graph"])
def test_overwriting_what_waits_for_weight(method: str, what: str) -> None:
    module, [x] = three_layers(), x_of()
    x = x.detach()
    backward = choose_method(module, method=method, stage=1)
    for index in range(2):
        with backward.forward():
            y = module(x)
        saved = backward.save(microbatch=index, inputs=[], outputs=[y])
        grad = torch.ones_like(y)
        del y
        backward.input(saved, [grad])
        if index == 1:
            (grad if what == "gradient" else x).zero_()
            name = r"2\.weight" if what == "gradient" else r"0\.weight"
            with pytest.raises(BackwardError, match=rf"stage 1, microbatch 1: .*{name}"):
                backward.weight(saved)
        else:
            backward.weight(saved)


def saved_of(backward: BackwardMethod, module: nn.Module) -> SavedMicrobatch:
    return run_forward(backward, module, x_of(), 7)


@every_method
@pytest.mark.parametrize(
    ("grads", "words"),
    [
        (lambda: [torch.ones(3, 4, dtype=DTYPE)] * 2, "2 gradients were given for 1 outputs"),
        (lambda: [torch.ones(2, 2, dtype=DTYPE)], r"does not fit its output: .*\[2, 2\]"),
    ],
)
def test_gradients_that_do_not_fit(
    grads: Callable[[], list[Tensor]], words: str, method: str
) -> None:
    module = three_layers()
    backward = choose_method(module, method=method, stage=2)
    saved = saved_of(backward, module)
    with pytest.raises(BackwardError, match=rf"stage 2, microbatch 7: .*{words}"):
        backward.input(saved, grads())
    with pytest.raises(BackwardError, match="the last was a failed I"):
        backward.weight(saved)


@every_method
def test_inputs_that_are_results_of_other_operations(method: str) -> None:
    module, [x] = three_layers(), x_of()
    backward = choose_method(module, method=method, stage=2)
    made = 2 * x
    with pytest.raises(BackwardError, match=r"stage 2, microbatch 0: inputs 0 .*detach\(\)"):
        backward.save(microbatch=0, inputs=[made], outputs=[module(made)])


@pytest.mark.parametrize("share", [-1, 0, "x", float("nan"), float("inf"), True])
def test_shares_that_are_none(share: object) -> None:
    with pytest.raises(BackwardMethodError, match="hold_at_most"):
        choose_method(three_layers(), hold_at_most=share)


def test_the_type_of_gradients_that_are_there_cannot_change() -> None:
    module = nn.Linear(4, 4, dtype=torch.bfloat16)
    module(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
    with pytest.raises(BackwardMethodError, match=r"weight, bias; call zero_grad\(\)"):
        choose_method(module, accumulate_fp32=True)
    module.zero_grad()
    choose_method(module, accumulate_fp32=True)
