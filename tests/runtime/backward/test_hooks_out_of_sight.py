"""Hooks that neither the graph nor the time of the forward shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from pipeloom.errors import BackwardError
from pipeloom.runtime.backward import choose_method, listeners, split
from tests.runtime.backward.harness import (
    accumulate,
    assert_same_parameters,
    run_forward,
    run_split,
)
from tests.runtime.backward.small import one_step, three_layers, x_of
from tests.runtime.backward.zoo import DTYPE

torch.set_num_threads(1)


class OlderView(nn.Module):
    """A weight seen through a view that is older than any forward, and has a hook."""

    def __init__(
        self,
        shape: tuple[int, ...],
        view: Callable[[Tensor], Tensor],
        use: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(shape, dtype=DTYPE))
        self.use, self.num_calls = use, 0
        self.seen = view(self.weight)
        self.seen.register_hook(self.double)

    def double(self, grad: Tensor) -> Tensor:
        self.num_calls += 1
        return 2 * grad

    def forward(self, x: Tensor) -> Tensor:
        return self.use(x, self.seen)


def inside_checkpoint(x: Tensor, weight: Tensor) -> Tensor:
    return checkpoint(lambda z: torch.tanh(z) @ weight, x, use_reentrant=False) * 1


@pytest.mark.parametrize("method", ["auto", "deferred", "whole"])
@pytest.mark.parametrize(
    ("shape", "view", "use", "grad"),
    [
        ((4, 4), torch.t, torch.matmul, True),
        ((4, 4), torch.t, torch.matmul, False),
        ((16,), lambda w: w.view(4, 4), lambda x, w: x @ w.t(), True),
        ((9,), lambda w: w.view(3, 3, 1), lambda x, w: F.conv1d(x[None], w), True),
        ((4, 4), torch.t, inside_checkpoint, True),
    ],
    ids=["a product", "a first stage", "a view of it", "a convolution", "a checkpoint"],
)
def test_hooks_on_views_that_are_older_than_the_forward(
    shape: tuple[int, ...],
    view: Callable[[Tensor], Tensor],
    use: Callable[[Tensor, Tensor], Tensor],
    grad: bool,
    method: str,
) -> None:
    module, plain = (OlderView(shape, view, use) for _ in range(2))
    backward = choose_method(module, method=method)
    for num_steps in (1, 2):
        [x] = x_of(3, 4, grad=grad)
        saved = run_forward(backward, module, [x], 0)
        out = plain(x.detach())
        backward.input(saved, [torch.ones_like(out)])
        backward.weight(saved)
        out.backward(torch.ones_like(out))
        torch.testing.assert_close(module.weight.grad, plain.weight.grad)
        assert module.num_calls == plain.num_calls == num_steps


def test_views_made_before_the_forward_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Module()
    module.flat = nn.Parameter(torch.randn(2, 16, dtype=DTYPE))
    views = [one.view(4, 4) for one in module.flat]
    module.forward = lambda x: torch.tanh(x @ views[0]) @ views[1]
    looked: list[bool] = []
    look = split.weights_have_hooks

    def watched(*given: Any, **options: Any) -> bool:
        looked.append(look(*given, **options))
        return looked[-1]

    monkeypatch.setattr(split, "weights_have_hooks", watched)
    backward = choose_method(module)
    plain = module.flat.detach().clone().requires_grad_()
    for _ in range(4):
        [x] = x_of()
        saved = run_forward(backward, module, [x], 0)
        backward.input(saved, [torch.ones(3, 4, dtype=DTYPE)])
        backward.weight(saved)
        first, second = (one.view(4, 4) for one in plain)
        (torch.tanh(x.detach() @ first) @ second).sum().backward()
    torch.testing.assert_close(module.flat.grad, plain.grad)
    assert looked == [True]


def test_casts_that_autocast_keeps_are_not_taken_for_hooked_ones() -> None:
    """They are older than the second forward, and nobody can have seen them."""
    module, batches = three_layers().float(), [torch.randn(3, 4) for _ in range(3)]
    backward = choose_method(module)
    for num, x in enumerate(batches):
        with torch.autocast("cpu", torch.bfloat16):
            for index in range(2):
                saved = run_forward(backward, module, [x.requires_grad_()], index)
                backward.input(saved, [torch.ones(3, 4, dtype=torch.bfloat16)])
                backward.weight(saved)
        three_layers().register_forward_hook(lambda *given: None)  # somewhere else
        assert not any(hooked for _, _, hooked, _ in backward._decisions), num


def test_who_listens_is_asked_again_only_where_somebody_may_have_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A hook on a parameter's place in the graph, which dies with the place."""
    module, asked, heard = three_layers(), [], []
    make = listeners._Pass.apply
    monkeypatch.setattr(
        listeners._Pass, "apply", lambda *given: (asked.append(len(given)), make(*given))[1]
    )
    backward = choose_method(module)
    for _ in range(3):
        one_step(backward, module, *x_of())
    asked.clear()
    for _ in range(3):
        one_step(backward, module, *x_of())
    assert not asked
    place = get_gradient_edge(module[0].weight).node
    place.register_hook(lambda *grads: heard.append(grads))
    for num in (1, 2, 3):
        one_step(backward, module, *x_of())
        assert len(heard) == num
    assert asked == [4, 1, 1, 1], "all are marked once, one is passed each time"
    del place
    one_step(backward, module, *x_of())
    assert len(heard) == 3


@pytest.mark.filterwarnings("ignore:.*there may be hooks on its tensors")
@pytest.mark.parametrize("method", ["auto", "graph", "whole"])
def test_a_hook_that_is_removed_while_i_runs(method: str) -> None:
    module = three_layers()
    handle = module[0].weight.register_hook(lambda grad: 2 * grad)
    kept = module[0].weight.register_hook(lambda grad: 3 * grad)
    removing = nn.Sequential(*module)
    backward = choose_method(removing, method=method)
    [x] = x_of()
    leaf = x.detach().requires_grad_()
    with backward.forward():
        hidden = module[1](module[0](leaf))
        hidden.register_hook(lambda grad: handle.remove())
        y = module[2](hidden)
    saved = backward.save(microbatch=0, inputs=[leaf], outputs=[y])
    backward.input(saved, [torch.ones_like(y)])
    backward.weight(saved)
    plain = three_layers()
    plain(x.detach()).backward(torch.ones_like(y))
    torch.testing.assert_close(module[0].weight.grad, 3 * plain[0].weight.grad)
    assert list(module[0].weight._backward_hooks) == [kept.id]


class ScaledInPlace(nn.Module):
    """Its hook changes the gradient that it is shown, which is also that of a product above."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = 2 * x
        hidden.register_hook(lambda grad: grad.mul_(2))
        return torch.tanh(hidden + self.layer(x))


def test_hooks_that_change_a_gradient_where_it_lies() -> None:
    module = ScaledInPlace().to(DTYPE)
    backward = choose_method(module, stage=4)
    with pytest.raises(BackwardError, match=r"stage 4.*overwrote .*a gradient.*layer\.weight"):
        one_step(backward, module, *x_of())
    module.zero_grad()
    batches = [x_of() for _ in range(2)]
    truth = accumulate(module, batches)
    run_split(choose_method(module, method="whole"), module, batches, truth)
    assert_same_parameters(module, truth.module)
