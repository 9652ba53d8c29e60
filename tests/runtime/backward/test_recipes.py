"""Operations that the zoo, which is in float64, has no room for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeloom.runtime.backward import choose_method
from tests.runtime.backward.harness import (
    accumulate,
    assert_same_inputs,
    assert_same_parameters,
    run_split,
)

torch.set_num_threads(1)


class GroupedExperts(nn.Module):
    """Rows sorted by expert, one product for all experts; the second has none."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 16, 32, dtype=torch.bfloat16) / 4)
        self.down = nn.Parameter(torch.randn(3, 16, 32, dtype=torch.bfloat16) / 4)

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.tensor([5, 5, 12], dtype=torch.int32)
        y = torch.tanh(F.grouped_mm(x, self.up, offs=ends))
        return F.grouped_mm(y, self.down.mT, offs=ends)


@pytest.mark.parametrize("method", ["auto", "graph"])
def test_grouped_products(method: str) -> None:
    torch.manual_seed(0)
    module = GroupedExperts()
    backward = choose_method(module, method=method, self_check="numeric")
    expected = [torch.zeros_like(p) for p in module.parameters()]
    for index in range(3):
        x = torch.randn(12, 16, dtype=torch.bfloat16, requires_grad=True)
        grad = torch.randn(12, 16, dtype=torch.bfloat16)
        found = torch.autograd.grad(module(x), [x, *module.parameters()], grad)
        for total, one in zip(expected, found[1:], strict=True):
            total += one
        with backward.forward():
            y = module(x)
        saved = backward.save(microbatch=index, inputs=[x], outputs=[y])
        [dx] = backward.input(saved, [grad])
        backward.weight(saved)
        assert torch.equal(dx, found[0])
    assert set(backward.choice.deferred) == {"up", "down"}
    for parameter, total in zip(module.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, total)


@pytest.mark.parametrize("num", [1, 3])
def test_sparse_embedding_gradients_stay_sparse(num: int) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 4)).double()
    backward = choose_method(module)
    expected = torch.zeros(10, 4, dtype=torch.float64)
    for index in range(num):
        tokens = torch.randint(10, (2, 3))
        y = module(tokens)
        grad = torch.randn_like(y)
        [one] = torch.autograd.grad(y, [module[0].weight], grad, retain_graph=True)
        expected += one.to_dense()
        saved = backward.save(microbatch=index, inputs=[tokens], outputs=[y])
        assert backward.input(saved, [grad]) == [None]
        backward.weight(saved)
    assert module[0].weight.grad.is_sparse
    torch.testing.assert_close(module[0].weight.grad.to_dense(), expected)


@pytest.mark.parametrize("options", [{"scale_grad_by_freq": True}, {"padding_idx": -1}, {}])
def test_embedding_options(options: dict[str, object]) -> None:
    torch.manual_seed(0)
    module = nn.Embedding(5, 4, **options).double()
    tokens = torch.randint(5, (4, 6))
    y = module(tokens)
    grad = torch.randn_like(y)
    [expected] = torch.autograd.grad(y, [module.weight], grad, retain_graph=True)
    backward = choose_method(module)
    saved = backward.save(microbatch=0, inputs=[tokens], outputs=[y])
    backward.input(saved, [grad])
    assert module.weight.grad is None
    backward.weight(saved)
    torch.testing.assert_close(module.weight.grad, expected)


class Bags(nn.Module):
    """A first stage that looks up bags of rows."""

    def __init__(self, weighted: bool, **options: object) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(10, 4, **options)
        self.weights = nn.Parameter(torch.rand(3, 5)) if weighted else None
        self.layer = nn.Linear(4, 4)

    def forward(self, rows: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.bags(rows, per_sample_weights=self.weights)))


@pytest.mark.parametrize("padding_index", [None, 2, -1])
@pytest.mark.parametrize(
    ("mode", "weighted", "sparse"),
    [
        ("sum", True, False),
        ("sum", False, True),
        ("mean", False, False),
        ("mean", False, True),
        ("max", False, False),
    ],
)
def test_bags_of_embeddings(
    mode: str, weighted: bool, sparse: bool, padding_index: int | None
) -> None:
    torch.manual_seed(0)
    module = Bags(weighted, mode=mode, sparse=sparse, padding_idx=padding_index).double()
    batches = [[torch.randint(10, (3, 5))] for _ in range(3)]
    truth = accumulate(module, batches)
    backward = choose_method(module)
    run_split(backward, module, batches, truth)
    assert {"bags.weight", "layer.weight"} <= set(backward.choice.deferred)
    for mine, theirs in zip(module.parameters(), truth.module.parameters(), strict=True):
        assert mine.grad.layout == theirs.grad.layout
        torch.testing.assert_close(mine.grad.to_dense(), theirs.grad.to_dense())


class TurnedWeights(nn.Module):
    """Square weights that are used transposed: a gradient left as it is would fit, and be wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(6, 6, dtype=torch.float64))
        self.kernel = nn.Parameter(torch.randn(6, 6, 3, 3, dtype=torch.float64))
        self.experts = nn.Parameter(torch.randn(2, 6, 6, dtype=torch.float64))

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.embedding(tokens, self.table.t()).transpose(1, 2).unsqueeze(-1)  # 2, 6, 5, 1
        y = F.conv2d(x, self.kernel.transpose(2, 3), padding=1).squeeze(-1).transpose(1, 2)
        return torch.bmm(torch.tanh(y), self.experts.mT)


def test_weights_that_are_used_transposed() -> None:
    torch.manual_seed(0)
    module = TurnedWeights()
    backward = choose_method(module)
    expected = [torch.zeros_like(p) for p in module.parameters()]
    for index in range(2):
        tokens = torch.randint(6, (2, 5))
        y = module(tokens)
        grad = torch.randn_like(y)
        found = torch.autograd.grad(y, list(module.parameters()), grad, retain_graph=True)
        for total, one in zip(expected, found, strict=True):
            total += one
        saved = backward.save(microbatch=index, inputs=[tokens], outputs=[y])
        backward.input(saved, [grad])
        backward.weight(saved)
    assert len(backward.choice.deferred) == 3
    for parameter, total in zip(module.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, total)


def test_gradients_keep_the_layout_of_their_parameters() -> None:
    module = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
    x = torch.randn(2, 4, 8, 8, requires_grad=True)
    backward = choose_method(module)
    y = module(x)
    saved = backward.save(microbatch=0, inputs=[x], outputs=[y])
    backward.input(saved, [torch.ones_like(y)])
    backward.weight(saved)
    assert module.weight.grad.stride() == module.weight.stride()


class FullBias(nn.Module):
    """A bias of the result's own shape, twice: there is nothing to sum for its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(6, 8, dtype=torch.float64))
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, torch.addmm(self.bias, x, self.weight), self.weight)


def test_a_gradient_that_needs_no_sum_is_not_shared_with_grad() -> None:
    torch.manual_seed(0)
    module = FullBias()
    batches = [[torch.randn(6, 8, dtype=torch.float64, requires_grad=True)] for _ in range(3)]
    truth = accumulate(module, batches)
    sent = [[grad.clone() for grad in grads] for grads in truth.output_grads]
    backward = choose_method(module)
    gradients = run_split(backward, module, batches, truth)
    assert_same_parameters(module, truth.module)
    assert_same_inputs(gradients, truth.input_grads)
    assert set(backward.choice.deferred) == {"bias", "weight"}
    for before, after in zip(sent, truth.output_grads, strict=True):
        assert torch.equal(before[0], after[0]), "the gradient that I was given has changed"


class ComplexScales(nn.Module):
    """Products with complex factors, whose gradients have them conjugated."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(8, dtype=torch.complex128))
        self.right = nn.Parameter(torch.randn(8, 8, dtype=torch.complex128))
        self.left = nn.Parameter(torch.randn(6, 6, dtype=torch.complex128))
        self.batched = nn.Parameter(torch.randn(1, 8, 8, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.addmm(self.bias, x, self.right, beta=1 + 2j, alpha=0.5 - 1j)
        y = torch.addmm(y, self.left, y, alpha=2j)
        return torch.baddbmm(y[None], y[None], self.batched.mT, beta=1j, alpha=1 - 3j)


def test_complex_scales() -> None:
    torch.manual_seed(0)
    module = ComplexScales()
    batches = [[torch.randn(6, 8, dtype=torch.complex128, requires_grad=True)] for _ in range(3)]
    truth = accumulate(module, batches)
    backward = choose_method(module)
    gradients = run_split(backward, module, batches, truth)
    assert_same_parameters(module, truth.module)
    assert_same_inputs(gradients, truth.input_grads)
    assert set(backward.choice.deferred) == {"bias", "right", "left", "batched"}


class TurnsAbout(nn.Module):
    """A cube, transposed in one way and in another from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.cube = nn.Parameter(torch.randn(4, 4, 4, dtype=torch.float64))
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        dims = (1, 2) if self.num_calls % 2 else (0, 2)
        return torch.bmm(x, self.cube.transpose(*dims))


def test_graphs_that_differ_in_nothing_but_transposed_dimensions() -> None:
    torch.manual_seed(0)
    module = TurnsAbout()
    batches = [[torch.randn(4, 3, 4, dtype=torch.float64, requires_grad=True)] for _ in range(4)]
    truth = accumulate(module, batches)
    module.num_calls = 0
    backward = choose_method(module)
    gradients = run_split(backward, module, batches, truth)
    assert_same_parameters(module, truth.module)
    assert_same_inputs(gradients, truth.input_grads)


SPARSE = torch.eye(4).to_sparse()


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(
    ("shape", "use"),
    [
        ((4, 4), lambda x, w: F.linear(SPARSE, w) + x),
        ((4, 4), lambda x, w: SPARSE @ w.t() + x),
        ((4, 4), lambda x, w: F.linear(x.to_sparse(), w)),
        ((2, 4, 4), lambda x, w: torch.bmm(torch.stack([x, x]).to_sparse(), w)),
    ],
)
@pytest.mark.parametrize("method", ["auto", "graph"])
def test_sparse_operands(
    shape: tuple[int, ...], use: Callable[[Tensor, Tensor], Tensor], grad: bool, method: str
) -> None:
    class Use(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(shape))

        def forward(self, x: Tensor) -> Tensor:
            return use(x, self.weight)

    torch.manual_seed(0)
    module, batches = Use(), [[torch.randn(4, 4, requires_grad=grad)] for _ in range(3)]
    truth = accumulate(module, batches)
    gradients = run_split(choose_method(module, method=method), module, batches, truth)
    assert_same_parameters(module, truth.module)
    assert_same_inputs(gradients, truth.input_grads)


def test_sparse_gradients_of_nodes_that_run_again() -> None:
    module = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Tanh())
    batches = [[torch.tensor([1, 2, 1, 0])] for _ in range(3)]
    truth = accumulate(module, batches)
    run_split(choose_method(module, method="graph"), module, batches, truth)
    assert module[0].weight.grad.is_sparse
    torch.testing.assert_close(module[0].weight.grad, truth.module[0].weight.grad)
