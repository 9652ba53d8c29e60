"""Compiled code whose backward comes in halves, against plain autograd.

Most tests run the graphs as they are (``pipeloom_eager``), which is quick; what the compiler itself
could change is tested with the compiler, on a few.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeloom import LocalPipeline
from pipeloom.runtime.backward import (
    choose_method,
)
from tests.runtime.backward.compiling import (
    COMPILED,
    EAGER,
    WEIGHTS,
    Stage,
    assert_split_right,
    compile_all,
    compile_blocks,
    make,
    skip_where_torch_cannot,
)
from tests.runtime.backward.harness import (
    accumulate,
    assert_same_parameters,
    run_forward,
    run_split,
)
from tests.runtime.backward.stages import WIDTH
from tests.runtime.backward.zoo import DTYPE, batches_of, build, floats

torch.set_num_threads(1)
pytestmark = pytest.mark.usefixtures("nothing_compiled_before")


@pytest.mark.parametrize("compile_it", [compile_blocks, compile_all])
@pytest.mark.parametrize("options", [{}, {"hook": True}, {"checkpointed": True}])
def test_blocks_of_one_kind(
    options: dict[str, bool], compile_it: Callable[[nn.Module], None]
) -> None:
    deferred = assert_split_right(make(**options), [floats() for _ in range(4)], compile_it)
    assert {"plain.weight"} | WEIGHTS <= set(deferred)


@pytest.mark.parametrize("compile_it", [compile_blocks, compile_all])
def test_a_first_stage_frees_what_its_products_do_not_need(
    compile_it: Callable[[nn.Module], None],
) -> None:
    """No gradient of an input needs I to go down through the layers; it does all the same."""
    module, batches = make(), [floats(grad=False) for _ in range(3)]
    truth = accumulate(module, batches)
    plain, compiled = [], []
    for into in (plain, compiled):
        backward = choose_method(module, hold_at_most=None)
        run_split(
            backward,
            module,
            batches,
            truth,
            after_input=lambda index, saved, b=backward, to=into: to.append(b.held_bytes(saved)),
        )
        compile_it(module)
    assert WEIGHTS | {"plain.weight"} <= set(backward.choice.deferred)
    assert compiled[-1] <= 1.05 * plain[-1]


@pytest.mark.parametrize("dynamic", [None, True])
def test_sizes_that_differ(dynamic: bool | None) -> None:
    batches = [floats(shape=(2 + i, 5 + i, WIDTH)) for i in range(4)]
    deferred = assert_split_right(make(), batches, lambda m: compile_blocks(m, dynamic=dynamic))
    assert set(deferred) >= WEIGHTS


@pytest.mark.parametrize(
    ("how", "options"),
    [
        (compile_blocks, {}),
        (compile_all, {"dynamic": True}),
        (compile_all, {"options": {"max_autotune": False}}),
    ],
)
def test_with_the_compiler(how: Callable[..., None], options: dict[str, object]) -> None:
    batches = [floats(shape=(2, 5 + i, WIDTH)) for i in range(3)]
    skip_where_torch_cannot("inductor", make(), batches[0])
    deferred = assert_split_right(make(), batches, lambda m: how(m, COMPILED, **options))
    assert set(deferred) >= WEIGHTS


def test_convolutions_with_the_compiler() -> None:
    deferred = assert_split_right(
        build("convolution"), batches_of("convolution"), lambda m: compile_all(m, COMPILED)
    )
    assert set(deferred) == {"first.weight", "second.weight", "back.weight"}


class TableAndExperts(nn.Module):
    """What the compiler writes with operations of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, WIDTH, padding_idx=3)
        self.experts = nn.Parameter(torch.randn(3, WIDTH, WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        return torch.cat([torch.tanh(part @ self.experts[i]) for i, part in enumerate(x.chunk(3))])


def test_tables_and_slices_with_the_compiler() -> None:
    torch.manual_seed(0)
    module = TableAndExperts().to(DTYPE)
    batches = [[torch.randint(0, 16, (6, 5))] for _ in range(3)]
    truth = accumulate(module, batches)
    compile_all(module, COMPILED)
    backward = choose_method(module, hold_at_most=None)
    kept: list[int] = []
    run_split(
        backward,
        module,
        batches,
        truth,
        after_input=lambda index, saved: kept.append(backward.held_bytes(saved)),
    )
    assert_same_parameters(module, truth.module)
    assert set(backward.choice.deferred) == {"table.weight", "experts"}
    # Tokens, which of them count, and the gradient of what was looked up; for the experts' products
    # what was looked up and the gradient of their results.
    assert max(kept) <= (6 * 5) * (8 + 1 + 3 * 8 * WIDTH)


@pytest.mark.parametrize("compile_it", [compile_blocks, compile_all])
def test_autocast(compile_it: Callable[[nn.Module], None]) -> None:
    torch.manual_seed(0)
    module, batches = Stage(), [[torch.randn(2, 5, WIDTH, requires_grad=True)] for _ in range(4)]
    with torch.autocast("cpu", torch.bfloat16):
        truth = accumulate(module, batches)
        compile_it(module)
        backward = choose_method(module)
        run_split(backward, module, batches, truth)
    assert set(backward.choice.deferred) >= WEIGHTS
    for mine, theirs in zip(module.parameters(), truth.module.parameters(), strict=True):
        assert mine.grad.dtype == torch.float32
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=5e-2, atol=5e-2)


def test_whole_and_split_microbatches_in_turn() -> None:
    module, batches = make(), [floats() for _ in range(4)]
    truth = accumulate(module, batches)
    compile_blocks(module)
    backward = choose_method(module)
    saved = [run_forward(backward, module, x, i) for i, x in enumerate(batches)]
    for index in (0, 2):
        backward.input(saved[index], truth.output_grads[index])
    for index in (3, 1):
        backward.full(saved[index], truth.output_grads[index])
    for index in (2, 0):
        backward.weight(saved[index])
    assert_same_parameters(module, truth.module)


def test_compiled_code_is_as_usable_without_a_pipeline() -> None:
    module, [inputs] = make(), [floats()]
    truth = accumulate(module, [inputs])
    compile_blocks(module)
    [x] = inputs
    module(x).backward(truth.output_grads[0][0])
    assert_same_parameters(module, truth.module)
    with torch.no_grad():
        assert not module(x).requires_grad


class TiedAcross(nn.Module):
    """A weight used inside and outside the compiled part, there also transposed."""

    class Inner(nn.Module):
        def __init__(self, shared: nn.Linear) -> None:
            super().__init__()
            self.own, self.shared = nn.Linear(WIDTH, WIDTH), shared

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(F.linear(self.own(x), self.shared.weight, self.shared.bias))

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([self.Inner(self.shared)])

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.blocks[0](self.shared(x)), self.shared.weight.t())


class GivenWeights(nn.Module):
    """A compiled function that is given computed weights, three of them made one inside."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(3))
        self.product = torch.compile(
            lambda x, *weights: torch.tanh(x @ torch.cat(weights, dim=1)), backend=EAGER
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, torch.sin(self.q), self.k, self.v)


class Breaks(nn.Module):
    """Compiled in three pieces, of which two are one code."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        torch._dynamo.graph_break()
        y = self.second(torch.tanh(y))
        torch._dynamo.graph_break()
        return self.first(y)


class ManyOutputs(nn.Module):
    """Outputs that are inputs, views, detached, or used again."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.a(x)
        return y, self.b(y), x, y.detach(), y[0], x.view(-1)


class Mutations(nn.Module):
    """A buffer and activations that change in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("total", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.total += y.detach().sum((0, 1))
        scale = x * 1
        scale[:, 0] = 3
        return self.layer(y.relu_() * scale)


@pytest.mark.parametrize(
    ("kind", "compile_it", "deferred"),
    [
        (TiedAcross, compile_blocks, {"shared.weight", "blocks.0.own.weight"}),
        (GivenWeights, lambda module: None, {"q", "k", "v"}),
        (Breaks, compile_all, {"first.weight", "second.weight"}),
        (ManyOutputs, compile_all, {"a.weight", "b.weight"}),
        (Mutations, compile_all, {"layer.weight"}),
    ],
)
def test_unusual_stages(
    kind: type[nn.Module], compile_it: Callable[[nn.Module], None], deferred: set[str]
) -> None:
    torch.manual_seed(0)
    batches = [floats() for _ in range(4)]
    # A second run of the numeric check would change the buffer a second time.
    check = "structural" if kind is Mutations else "numeric"
    assert deferred == set(
        assert_split_right(kind().to(DTYPE), batches, compile_it, self_check=check)
    )


def test_hooks_on_parameters_fire_once_at_weight() -> None:
    module = make()
    compile_blocks(module)
    fired: list[Tensor] = []
    weight = module.blocks[0].up.weight
    weight.register_hook(lambda grad: fired.append(grad) or 3 * grad)
    backward, inputs = choose_method(module), floats()
    saved = run_forward(backward, module, inputs, 0)
    backward.input(saved, [torch.randn_like(inputs[0])])
    assert not fired
    backward.weight(saved)
    [seen] = fired
    torch.testing.assert_close(weight.grad, 3 * seen)


def test_two_threads_may_run_one_compiled_backward() -> None:
    """Blocks of one kind share their compiled code, also between stages."""
    stages, batches = [make(), make()], [floats() for _ in range(8)]
    truths = [accumulate(stage, batches) for stage in stages]
    for stage in stages:
        compile_blocks(stage)
    backwards = [choose_method(stage, stage=index) for index, stage in enumerate(stages)]
    for backward, stage, truth in zip(backwards, stages, truths, strict=True):
        run_split(backward, stage, batches[:2], truth)  # compiles
        stage.zero_grad()
    threads = [
        threading.Thread(target=run_split, args=(backward, stage, batches, truth))
        for backward, stage, truth in zip(backwards, stages, truths, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for stage, truth in zip(stages, truths, strict=True):
        assert_same_parameters(stage, truth.module)


@pytest.mark.parametrize("schedule", ["zb-h1", "zbv"])
def test_pipelines_of_compiled_stages(schedule: str) -> None:
    torch.manual_seed(2)
    x, target = torch.randn(2, 6, 4, WIDTH, dtype=DTYPE)
    ranks = 2
    results = []
    for compiled in (True, False):
        stages = [make() for _ in range(4 if schedule == "zbv" else 2)]
        if compiled:
            for stage in stages:
                compile_blocks(stage)
        pipe = LocalPipeline(
            stages,
            schedule=schedule,
            ranks=ranks,
            microbatches=6,
            loss_fn=nn.functional.mse_loss,
            backward_options={"strict": True, "self_check": "numeric"},
        )
        loss = pipe.step(x, target=target).loss
        results.append([loss, *(p.grad for stage in stages for p in stage.parameters())])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)
