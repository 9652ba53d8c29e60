"""What I, hooks or an optimizer change while W still needs it."""

from __future__ import annotations

import gc
import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook, save_on_cpu
from torch.utils.checkpoint import (
    GraphExecGroup,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from pipeloom.errors import BackwardError
from pipeloom.runtime.backward import choose_method
from tests.runtime.backward.compiling import COMPILED, EAGER, compile_all
from tests.runtime.backward.harness import (
    accumulate,
    assert_same_inputs,
    assert_same_parameters,
    run_forward,
    run_split,
)
from tests.runtime.backward.small import one_step, three_layers, x_of
from tests.runtime.backward.zoo import DTYPE

torch.set_num_threads(1)


class InvertedInPlace(torch.autograd.Function):
    """Keeps its result alone, and makes its input of it in the backward, where it lies."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        [y] = ctx.saved_tensors
        found = grad * y
        y.log_()
        return found


class Inverting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(InvertedInPlace.apply(torch.tanh(self.first(x))))


class Clearing(Inverting):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)

        @torch.no_grad()
        def clear(grad: Tensor) -> None:
            hidden.zero_()

        if hidden.requires_grad:
            hidden.register_hook(clear)
        return self.second(hidden.sin())


@pytest.mark.filterwarnings("ignore:.*was not compared with a full one")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("method", ["auto", "deferred"])
def test_an_activation_that_i_overwrites_is_an_error(method: str, compiled: bool) -> None:
    torch.manual_seed(0)
    module = Inverting().to(DTYPE)
    if compiled:
        torch._dynamo.reset()
        module.second.forward = torch.compile(module.second.forward, backend=EAGER)
    backward = choose_method(module, method=method, stage=2)
    saved = run_forward(backward, module, *[x_of()], 1)
    with pytest.raises(
        BackwardError, match=r'stage 2, microbatch 1: I overwrote .*method="whole".*second\.weight'
    ):
        backward.input(saved, [torch.ones(3, 4, dtype=DTYPE)])
    batches = [x_of() for _ in range(2)]
    truth = accumulate(Inverting().to(DTYPE), batches)
    for mine, theirs in zip(module.parameters(), truth.module.parameters(), strict=True):
        mine.data.copy_(theirs.data)
    truth = accumulate(module, batches) if not compiled else truth
    run_split(choose_method(module, method="whole"), module, batches, truth)
    assert_same_parameters(module, truth.module)


class Flattened(nn.Module):
    """The gradient of its input, and that of a product, are views of one buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return torch.relu(x.view(-1, 4) + self.layer(z))


@pytest.mark.parametrize("backend", [None, EAGER, COMPILED])
def test_a_returned_gradient_that_is_overwritten_before_w(backend: str | None) -> None:
    """Compiled code returns views that count their changes apart."""
    torch._dynamo.reset()
    module = Flattened().to(DTYPE)
    if backend is not None:
        compile_all(module, backend)
    backward = choose_method(module, stage=2)
    saved = run_forward(backward, module, [*x_of(2, 3, 4), *x_of(6, 4)], 0)
    [dx, _] = backward.input(saved, [torch.ones(6, 4, dtype=DTYPE)])
    dx.mul_(0)
    with pytest.raises(BackwardError, match=r"stage 2.*was overwritten.*layer\.weight"):
        backward.weight(saved)


def test_an_activation_that_nobody_needs_any_more_may_be_overwritten() -> None:
    module = Clearing().to(DTYPE)
    batches = [x_of() for _ in range(3)]
    truth = accumulate(module, batches)
    run_split(choose_method(module), module, batches, truth)
    assert_same_parameters(module, truth.module)


class WeightsAsOperands(nn.Module):
    """A product of products of weights, in a first stage."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.middle, self.right = (
            nn.Parameter(torch.randn(4, 4, dtype=DTYPE)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.left) @ (self.middle @ self.right)


def test_an_optimizer_that_steps_in_the_backward() -> None:
    torch.manual_seed(0)
    module = WeightsAsOperands()
    [x] = x_of(3, 4, grad=False)
    expected = accumulate(module, [[x]])

    @torch.no_grad()
    def step(parameter: Tensor) -> None:
        parameter -= 0.1 * parameter.grad
        parameter.grad = None

    before = [parameter.detach().clone() for parameter in module.parameters()]
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    backward = choose_method(module)
    saved = run_forward(backward, module, [x], 0)
    backward.input(saved, expected.output_grads[0])
    backward.weight(saved)
    for mine, was, truth in zip(
        module.parameters(), before, expected.module.parameters(), strict=True
    ):
        torch.testing.assert_close(mine.detach(), was - 0.1 * truth.grad)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(4, 4, dtype=DTYPE)) for _ in "12")

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.first.exp()) @ self.second.exp().t()


@pytest.mark.parametrize("mode", ["all", "any"])
@pytest.mark.parametrize("kind", [Scaled, three_layers])
@pytest.mark.parametrize("num_watched", [1, 2])
def test_hooks_on_several_parameters_run_once(
    num_watched: int, kind: type[nn.Module], mode: str
) -> None:
    module = kind()
    backward = choose_method(module)
    heard: list[int] = []

    def hear(grads: object) -> None:
        heard.append(sum(g is not None for g in grads) if isinstance(grads, (list, tuple)) else 1)

    watched = [parameter for parameter in module.parameters() if parameter.dim() > 1][:num_watched]
    register_multi_grad_hook(watched, hear, mode=mode)
    for index in range(3):
        saved = run_forward(backward, module, x_of(), index)
        backward.input(saved, [torch.ones(3, 4, dtype=DTYPE)])
        assert len(heard) == index
        backward.weight(saved)
        assert heard == [num_watched if mode == "all" else 1] * (index + 1)


class OtherDimensions(nn.Module):
    """Two convolutions whose graphs look alike, with weights of other numbers of dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.randn(3, 3, 3, dtype=DTYPE))
        self.plane = nn.Parameter(torch.randn(3, 3, 3, 3, dtype=DTYPE))

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 3:
            return F.conv1d(x, self.row.transpose(1, 2))
        return F.conv2d(x, self.plane.transpose(1, 2))


def test_plans_are_not_used_for_parameters_of_other_dimensions() -> None:
    torch.manual_seed(0)
    module = OtherDimensions()
    batches = [x_of(2, 3, 5), x_of(2, 3, 5, 5), x_of(2, 3, 5), x_of(2, 3, 5, 5)]
    truth = accumulate(module, batches)
    gradients = run_split(choose_method(module), module, batches, truth)
    assert_same_parameters(module, truth.module)
    assert_same_inputs(gradients, truth.input_grads)


class Keeper(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor, large: Tensor) -> Tensor:
        ctx.large = large
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def test_operands_keep_nothing_of_the_graph_that_made_them() -> None:
    layer = nn.Linear(4, 4).to(DTYPE)
    backward = choose_method(layer)
    [x] = x_of()
    large = torch.zeros(1000)
    alive = weakref.ref(large)
    with backward.forward():
        y = layer(torch.tanh(Keeper.apply(x, large)))
    saved = backward.save(microbatch=0, inputs=[x], outputs=[y])
    del y, large
    backward.input(saved, [torch.ones(3, 4, dtype=DTYPE)])
    assert backward.choice.method == "deferred"
    assert alive() is None
    backward.weight(saved)


class TwoEnds(nn.Module):
    """A block with two results; the first needs none of what the second recomputes."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.middle, self.right = (nn.Linear(4, 4, bias=False) for _ in range(3))
        self.num_runs, self.contexts = 0, {}

    def block(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.num_runs += 1
        return self.left(torch.tanh(x)), self.right(torch.tanh(self.middle(x)))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return checkpoint(self.block, x, use_reentrant=False, **self.contexts)


@pytest.mark.parametrize("selective", [False, True])
def test_one_recomputation_also_for_what_the_engine_does_not_come_to(selective: bool) -> None:
    module = TwoEnds().to(DTYPE)
    if selective:
        choose = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
        module.contexts = {"context_fn": choose}
    batches = [x_of(grad=False) for _ in range(3)]
    truth = accumulate(module, batches)
    run_split(choose_method(module), module, batches, truth)
    assert_same_parameters(module, truth.module)
    assert module.num_runs == truth.module.num_runs == 6


def test_a_recomputation_that_is_shared_with_others() -> None:
    layer = nn.Linear(4, 4).to(DTYPE)

    class Block(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(lambda x: layer(torch.tanh(x)), x, use_reentrant=False)

    module = Block()
    module.layer = layer
    backward = choose_method(module)
    saved = run_forward(backward, module, x_of(grad=False), 0)
    with GraphExecGroup():
        backward.input(saved, [torch.ones(3, 4, dtype=DTYPE)])
    backward.weight(saved)
    assert layer.weight.grad is not None


class Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.product = nn.Linear(4, 4), nn.Bilinear(4, 4, 4)

    def forward(self, x: Tensor) -> Tensor:
        marker = torch.zeros(1)
        self.marker = weakref.ref(marker)  # lives as long as the graph
        hidden = torch.tanh(self.layer(Keeper.apply(x, marker)))
        return self.product(hidden, hidden)


@pytest.mark.parametrize("around", [False, True])
def test_a_graph_is_not_kept_where_others_keep_its_tensors(around: bool) -> None:
    """They would keep all until W; and ``save_on_cpu`` for ever, in a circle with the graph."""
    torch.manual_seed(0)
    module = Bilinear().to(DTYPE)
    batches = [x_of() for _ in range(4)]
    truth = accumulate(module, batches)
    backward = choose_method(module)
    for index, ([x], grads) in enumerate(zip(batches, truth.output_grads, strict=True)):
        if around:
            with save_on_cpu(), backward.forward():
                y = module(x)
        else:
            with backward.forward(), save_on_cpu():
                y = module(x)
        saved = backward.save(microbatch=index, inputs=[x], outputs=[y])
        del y
        backward.input(saved, grads)
        backward.weight(saved)
        del saved
        gc.collect()
        assert module.marker() is None
    assert_same_parameters(module, truth.module)
    one_step(backward, module, *x_of())
    one_step(backward, module, *x_of())
    assert backward.choice.deferred
