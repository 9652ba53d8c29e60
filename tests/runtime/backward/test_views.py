"""Weights that products see through views are added to through the same views."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pipeloom.runtime.backward import choose_method
from tests.runtime.backward.harness import (
    accumulate,
    assert_same_inputs,
    assert_same_parameters,
    run_forward,
    run_split,
)
from tests.runtime.backward.small import x_of
from tests.runtime.backward.zoo import DTYPE

torch.set_num_threads(1)
pytestmark = pytest.mark.usefixtures("nothing_compiled_before")

Use = Callable[[Tensor, Tensor], Tensor]


class Uses(nn.Module):
    """One weight, used in some way."""

    def __init__(self, shape: tuple[int, ...], use: Use) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(shape, dtype=DTYPE))
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(x, self.weight)


# name → shape of the weight, shape of the input, use, and whether W adds in place
USES: dict[str, tuple[tuple[int, ...], tuple[int, ...], Use, bool]] = {
    "a dense layer": ((8, 12), (2, 6, 8), lambda x, w: torch.einsum("bsd,df->bsf", x, w), True),
    "its transpose": ((12, 8), (2, 6, 8), lambda x, w: torch.einsum("bsd,fd->bsf", x, w), True),
    "heads": ((8, 3, 4), (2, 6, 8), lambda x, w: torch.einsum("bsd,dhk->bshk", x, w), True),
    "heads together": (
        (3, 4, 8),
        (2, 6, 3, 4),
        lambda x, w: torch.einsum("bshk,hkd->bsd", x, w),
        True,
    ),
    "experts": ((3, 8, 12), (3, 6, 8), lambda x, w: torch.einsum("ecd,edf->ecf", x, w), True),
    "matmul of experts": ((3, 8, 12), (3, 6, 8), lambda x, w: x @ w, True),
    "experts of every batch": ((3, 8, 12), (2, 3, 6, 8), lambda x, w: x @ w, False),
    "each expert": (
        (3, 12, 8),
        (6, 8),
        lambda x, w: torch.stack([F.linear(x, w[i]) for i in range(3)]),
        True,
    ),
    "the last expert": ((3, 12, 8), (6, 8), lambda x, w: x @ w[-1].t(), True),
    "unbound": ((3, 8, 12), (6, 8), lambda x, w: sum(x @ one for one in w.unbind(-3)), True),
    "chunks of a projection": (
        (12, 8),
        (6, 8),
        lambda x, w: torch.stack([F.linear(x, one) for one in w.chunk(3)]),
        True,
    ),
    "unequal parts": (
        (8, 12),
        (6, 8),
        lambda x, w: torch.cat([x @ one for one in w.split([1, 7, 4], dim=-1)], -1),
        True,
    ),
    "every second row": ((13, 8), (6, 8), lambda x, w: F.linear(x, w[1::2]), True),
    "parts that overlap": ((9, 8), (6, 8), lambda x, w: x @ w[:8] + x @ w[1:], True),
    "a part and the whole": (
        (8, 12),
        (6, 8),
        lambda x, w: (x @ w) + F.pad(x @ w[:, 4:], (0, 4)),
        True,
    ),
    "flat memory": ((96,), (6, 8), lambda x, w: F.linear(x, w.view(12, 8)), True),
    "flat memory, copied": ((96,), (6, 8), lambda x, w: x @ w.view(12, 8).t().contiguous(), True),
    "copied into another order": (
        (3, 8, 4),
        (6, 8),
        lambda x, w: x @ w.permute(1, 2, 0).reshape(8, 12),
        False,
    ),
    "repeated": ((8, 1), (6, 8), lambda x, w: x @ w.expand(8, 12), False),
    "a convolution by hand": ((12, 8, 1), (6, 8), lambda x, w: F.linear(x, w.squeeze(-1)), True),
    "a product by convolution": (
        (12, 8),
        (2, 8, 6),
        lambda x, w: F.conv1d(x, w.unsqueeze(-1)),
        True,
    ),
    "part of a table": (
        (16, 8),
        (6, 8),
        lambda x, w: x.detach() * F.embedding(torch.arange(6), w[4:12]),
        True,
    ),
    "in another order": ((12, 3, 8), (3, 6, 8), lambda x, w: x @ w.permute(1, 2, 0), True),
}


@pytest.mark.parametrize("name", USES)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_weight_seen_through_views(name: str, compiled: bool) -> None:
    shape, x_shape, use, _ = USES[name]
    module = Uses(shape, use)
    batches = [x_of(*x_shape) for _ in range(3)]
    truth = accumulate(module, batches)
    called = torch.compile(module, backend="pipeloom_eager") if compiled else module
    backward = choose_method(called, self_check="numeric", strict=True)
    inputs = run_split(backward, called, batches, truth)
    assert_same_parameters(module, truth.module)
    assert_same_inputs(inputs, truth.input_grads)


open_slice = torch.ops.aten.slice.Tensor


@pytest.mark.parametrize(
    ("shape", "x_shape", "use"),
    [
        ((), (3, 1), lambda x, w: x @ w.transpose(0, 0).view(1, 1)),
        ((8, 8), (3, 4), lambda x, w: x @ open_slice(w, 0, None, None, 2)),
    ],
    ids=["no dimensions", "open ends"],
)
def test_rare_views(shape: tuple[int, ...], x_shape: tuple[int, ...], use: Use) -> None:
    module, batches = Uses(shape, use), [x_of(*x_shape) for _ in range(3)]
    truth = accumulate(module, batches)
    gradients = run_split(choose_method(module), module, batches, truth)
    assert_same_parameters(module, truth.module)
    assert_same_inputs(gradients, truth.input_grads)


def in_place(module: nn.Module, x: list[Tensor], grad: Tensor | None) -> bool:
    """Whether W adds to the memory of ``grad`` without the engine."""
    backward = choose_method(module, hold_at_most=None)
    module.weight.grad = grad
    saved = run_forward(backward, module, x, 0)
    backward.input(saved, [torch.ones_like(module(*x))])
    assert backward.choice is not None
    assert backward.choice.deferred == ("weight",)
    passed = []
    node = torch.autograd.graph.get_gradient_edge(module.weight).node
    handle = node.register_prehook(lambda grads: passed.extend(grads))
    backward.weight(saved)
    handle.remove()
    return not any(isinstance(one, Tensor) for one in passed)


@pytest.mark.parametrize("name", USES)
@pytest.mark.parametrize("first", [False, True])
def test_which_are_added_in_place(name: str, first: bool) -> None:
    shape, x_shape, use, expected = USES[name]
    module = Uses(shape, use)
    grad = None if first else torch.zeros(shape, dtype=DTYPE)
    assert in_place(module, x_of(*x_shape), grad) == expected
    if grad is not None:
        assert module.weight.grad is grad


# Products that are no matrices' products, that the compiler finds to be one and the same, and that
# it pads by an operation of its own.
ONLY_UNCOMPILED = {"a product by convolution", "part of a table", "unbound", "parts that overlap"}


@pytest.mark.parametrize("name", USES)
def test_which_products_of_compiled_code_are_added_by_themselves(name: str) -> None:
    shape, x_shape, use, in_place = USES[name]
    module = Uses(shape, use)
    compiled = torch.compile(module, backend="pipeloom_eager")
    backward = choose_method(compiled, hold_at_most=None)
    saved = run_forward(backward, compiled, x_of(*x_shape), 0)
    backward.input(saved, [torch.ones_like(module(*x_of(*x_shape)))])
    expected = in_place and name not in ONLY_UNCOMPILED
    assert all(p.use.recipe.add_to is not None for p in saved.pending.products) == expected
    backward.weight(saved)


def test_parts_of_a_compiled_gradient_pass_hooks_as_one() -> None:
    """Three products, one hook: it sees their sum, padded, once a microbatch."""
    shape, x_shape, use, _ = USES["each expert"]
    module = Uses(shape, use)
    seen: list[Tensor] = []
    batches = [x_of(*x_shape) for _ in range(3)]
    truth = accumulate(module, batches)
    module.weight.register_hook(lambda grad: seen.append(grad))
    compiled = torch.compile(module, backend="pipeloom_eager")
    run_split(choose_method(compiled, strict=True), compiled, batches, truth)
    assert_same_parameters(module, truth.module)
    assert len(seen) == 3
    torch.testing.assert_close(sum(seen), truth.module.weight.grad)


def test_a_gradient_whose_strides_allow_no_such_view() -> None:
    module = Uses((12, 8), lambda x, w: F.linear(x, w.view(96).view(12, 8)))
    [x] = x_of(6, 8)
    grad = torch.zeros(8, 12, dtype=DTYPE).t()
    assert not in_place(module, [x], grad)
    expected = torch.ones(12, 6, dtype=DTYPE) @ x.detach()
    torch.testing.assert_close(module.weight.grad, expected)


def test_parameters_that_are_parts_of_one_buffer() -> None:
    flat = torch.randn(200, dtype=DTYPE)
    module = Uses((2, 2), lambda x, w: torch.einsum("sd,dhk->shk", x, w.view(8, 3, 4)))
    module.weight = nn.Parameter(flat[7 : 7 + 96])
    batches = [x_of(5, 8) for _ in range(2)]
    truth = accumulate(module, batches)
    gradients = torch.zeros(200, dtype=DTYPE)
    module.weight.grad = gradients[7 : 7 + 96]
    run_split(choose_method(module), module, batches, truth)
    assert_same_parameters(module, truth.module)
    assert gradients[7 : 7 + 96].count_nonzero() == 96
    assert gradients.count_nonzero() == 96


@pytest.mark.parametrize("self_check", ["structural", "numeric"])
def test_hooks_on_a_view_see_its_whole_gradient(self_check: str) -> None:
    seen: list[Tensor] = []

    def use(x: Tensor, w: Tensor) -> Tensor:
        view = w.view(3, 4, 8)[1]
        if view.requires_grad:
            view.register_hook(lambda grad: seen.append(grad) or 2 * grad)
        return F.linear(x, view)

    module = Uses((12, 8), use)
    [x] = x_of(6, 8)
    backward = choose_method(module, self_check=self_check, strict=True)
    saved = run_forward(backward, module, [x], 0)
    backward.input(saved, [torch.ones(6, 4, dtype=DTYPE)])
    num_checked = 2 * (self_check == "numeric")
    assert len(seen) == num_checked
    backward.weight(saved)
    [gradient] = seen[num_checked:]
    expected = torch.zeros(12, 8, dtype=DTYPE)
    expected[4:8] = 2 * gradient
    torch.testing.assert_close(gradient, torch.ones(4, 6, dtype=DTYPE) @ x.detach())
    torch.testing.assert_close(module.weight.grad, expected)


View = Callable[[Tensor, int, int], Tensor]


def dim_of(tensor: Tensor, number: int) -> int:
    """A dimension, counted from the front or from the back."""
    return number % (2 * tensor.dim()) - tensor.dim()


def regroup(tensor: Tensor, i: int, j: int) -> Tensor:
    rows = [d for d in range(1, tensor.numel() + 1) if tensor.numel() % d == 0]
    return tensor.reshape(rows[i % len(rows)], -1)


VIEWS: list[View] = [
    regroup,
    lambda t, i, j: t.transpose(dim_of(t, i), dim_of(t, j)),
    lambda t, i, j: t.permute([(d + i) % t.dim() for d in range(t.dim())]),
    lambda t, i, j: t.unsqueeze(i % (t.dim() + 1)),
    lambda t, i, j: t.squeeze(),
    lambda t, i, j: t.squeeze((dim_of(t, i),)),
    lambda t, i, j: t.flatten(),
    lambda t, i, j: t.select(dim_of(t, i), j % t.shape[dim_of(t, i)] - t.shape[dim_of(t, i)] // 2),
    lambda t, i, j: t.narrow(dim_of(t, i), 0, 1 + j % t.shape[dim_of(t, i)]),
    lambda t, i, j: t[:: 1 + i % 3],
    lambda t, i, j: t[..., -1 - j :],
    lambda t, i, j: t.split(1 + i % 3, dim_of(t, j))[-1],
    lambda t, i, j: t.split([1, t.shape[i % t.dim()] - 1], i % t.dim())[j % 2],
    lambda t, i, j: t.chunk(1 + i % 4, dim_of(t, j))[0],
    lambda t, i, j: t.unbind(dim_of(t, i))[-1],
    lambda t, i, j: t.expand(1 + i % 2, *t.shape),
    lambda t, i, j: t.clone(),
    lambda t, i, j: t.contiguous(),
]
numbers = st.integers(0, 11)
chains = st.lists(st.tuples(st.sampled_from(VIEWS), numbers, numbers), max_size=5)


def matrix(weight: Tensor, chain: list[tuple[View, int, int]]) -> Tensor:
    """The weight through a chain of views, as a matrix."""
    for view, i, j in chain:
        if weight.dim() and weight.numel():
            weight = view(weight, i, j)
    return weight.flatten(1) if weight.dim() > 1 else weight.reshape(1, -1)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([(4, 6), (12,), (2, 3, 4), (5, 1, 4), (2, 2, 2, 3)]),
    st.lists(chains, min_size=1, max_size=3),
    st.booleans(),
    st.booleans(),
)
def test_any_chain_of_views(
    shape: tuple[int, ...],
    uses: list[list[tuple[View, int, int]]],
    turned: bool,
    first_stage: bool,
) -> None:
    def use(x: Tensor, w: Tensor) -> Tensor:
        results = []
        for chain in uses:
            seen = matrix(w, chain)
            seen = seen.t() if turned else seen
            rows = torch.tanh(x).flatten()[: 3 * seen.shape[0]].view(3, seen.shape[0])
            results.append((rows @ seen).sum(-1))
        return torch.stack(results)

    module = Uses(shape, use)
    batches = [x_of(3, 800, grad=not first_stage) for _ in range(2)]
    truth = accumulate(module, batches)
    backward = choose_method(module, self_check="numeric", hold_at_most=None)
    inputs = run_split(backward, module, batches, truth)
    assert_same_parameters(module, truth.module)
    assert_same_inputs(inputs, truth.input_grads)


@pytest.mark.parametrize("table_first", [False, True])
def test_a_table_with_sparse_gradients_that_is_seen_through_views_too(table_first: bool) -> None:
    def use(x: Tensor, w: Tensor) -> Tensor:
        tokens = torch.arange(6) % 4
        if table_first:
            x = x + F.embedding(tokens, w, sparse=True)
        x = torch.tanh(F.linear(x, w[4:]))
        return x if table_first else x * F.embedding(tokens, w, sparse=True).sum()

    module = Uses((12, 8), use)
    batches = [x_of(6, 8) for _ in range(3)]
    truth = accumulate(module, batches)
    run_split(choose_method(module), module, batches, truth)
    assert_same_parameters(module, truth.module)
