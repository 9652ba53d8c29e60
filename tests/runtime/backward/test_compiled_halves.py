"""Compiled code whose backward comes in halves, against plain autograd.

Most tests run the graphs as they are (``pipeloom_eager``), which is quick; what the compiler itself
could change is tested with the compiler, on a few.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeloom import LocalPipeline
from pipeloom.errors import BackwardMethodError
from pipeloom.runtime.backward import (
    SavedMicrobatch,
    SplitBackwardWarning,
    check_compiled,
    choose_method,
)
from pipeloom.runtime.backward.compiled import backend, halves
from tests.runtime.backward.harness import (
    Microbatch,
    accumulate,
    assert_same_inputs,
    assert_same_parameters,
    run_forward,
    run_split,
)
from tests.runtime.backward.memory import bytes_of, watched_saves, weight_storages
from tests.runtime.backward.stages import WIDTH, Block
from tests.runtime.backward.zoo import DTYPE, ZOO, build, feed, floats

torch.set_num_threads(1)

EAGER, COMPILED = "pipeloom_eager", "pipeloom"


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> None:
    torch._dynamo.reset()


def batches_of(name: str, num: int = 4) -> list[Microbatch]:
    torch.manual_seed(3)
    return [feed(name) for _ in range(num)]


# ── the zoo ──────────────────────────────────────────────────────────────────────────────────────

# What comes out of I although the rest is left for W: biases and norm scales, which fall out of
# I's own kernels; and products that have no operation of their own in the graph.
BLOCK_IN_INPUT = {"norm1.weight", "norm1.bias", "attention.out.bias", "norm2.weight"} | {
    "up.bias",
    "down.bias",
}
IN_INPUT: dict[str, set[str]] = {
    "added matrix": {"added", "offset"},
    "attention": {"out.bias"},
    "bilinear": {"mix.weight", "mix.bias", "head.bias"},
    "chunked outputs": {"layer.bias"},
    "complex": {"layer.bias"},
    "convolution 1d": {"bias"},
    "mlp": {"0.bias"},
    "convolution": {"first.bias", "norm.weight", "norm.bias", "back.bias"},
    "custom function": {"head.bias"},
    "dict outputs": {"left.bias", "right.bias"},
    "experts": {"router.bias"},
    "first stage": {f"block.{name}" for name in BLOCK_IN_INPUT},
    "first stage of floats": {"norm.weight", "norm.bias", "shift", "first.bias", "second.bias"},
    "frozen": {"first.bias", "biased.bias"},
    "functions around": {"layer.bias"},
    "fused lstm and head": {"head.bias"}
    | {f"cells.{part}_{way}_l0" for part in ("weight", "bias") for way in ("ih", "hh")},
    "gru": {"cells.bias_ih_l0"},
    "in place": {"first.bias", "second.bias"},
    "lora": {"head.bias"},
    "lstm": {"cells.bias_ih_l0"},
    "merged lora": {"head.bias"},
    "parameter outputs": {"table", "layer.bias"},
    "reused": {"layer.bias"},
    "tied": {f"block.{name}" for name in BLOCK_IN_INPUT},
    "transformer": {f"{block}.{name}" for block in (0, 1) for name in BLOCK_IN_INPUT},
    "unused branch": {"used.bias", "unused.weight", "unused.bias"},
    "view outputs": {"layer.bias"},
    "weight norm": {"first.bias", "second.bias", "third.bias"},
    # Where code breaks out of the compiled part, what is outside is deferred as ever.
    "checkpointed": {
        f"blocks.{block}.{name}"
        for block in (0, 1)
        for name in ("norm1.weight", "norm1.bias", "norm2.weight")
    },
}
WHOLE = {"fused lstm", "no parameters", "only norms", "reentrant checkpoint"}


@pytest.mark.parametrize("self_check", ["structural", "numeric"])
@pytest.mark.parametrize("name", ZOO)
def test_every_stage_of_the_zoo_compiled(name: str, self_check: str) -> None:
    module, batches = build(name), batches_of(name)
    truth = accumulate(module, batches)
    compile_all(module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if name == "reentrant checkpoint" else "error")
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        backward = choose_method(module, self_check=self_check, stage=1)
        gradients = run_split(backward, module, batches, truth)
    assert_same_parameters(module, truth.module)
    assert_same_inputs(gradients, truth.input_grads)
    assert (backward.choice.method == "whole") == (name in WHOLE)
    if name not in WHOLE:
        assert set(backward.choice.computed_in_input) == IN_INPUT.get(name, set())


@pytest.mark.parametrize(
    ("name", "held"),
    [
        ("transformer", 51456),
        ("convolution", 16184),
        ("first stage", 25728),
        ("merged lora", 6784),
    ],
)
def test_between_input_and_weight_nothing_else_is_alive(name: str, held: int) -> None:
    module, batches = build(name), batches_of(name)
    truth = accumulate(module, batches)
    compile_all(module)
    with watched_saves() as alive:
        backward = choose_method(module)
        for index, inputs in enumerate(batches):
            saved = run_forward(backward, module, inputs, index)
            backward.input(saved, truth.output_grads[index])
            kept = {t.untyped_storage().data_ptr() for t in saved.pending.tensors()}
            assert bytes_of(alive(), excluded=weight_storages(module) | kept) == 0
            assert backward.held_bytes(saved) == held
            backward.weight(saved)
            del saved
            assert bytes_of(alive(), excluded=weight_storages(module)) == 0


# ── ways of compiling ────────────────────────────────────────────────────────────────────────────


class Stage(nn.Module):
    """Blocks of one kind, so that torch compiles them once, and a layer around them."""

    def __init__(self, *, hook: bool = False, checkpointed: bool = False) -> None:
        super().__init__()
        self.plain = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.hook, self.checkpointed = hook, checkpointed

    def forward(self, x: Tensor) -> Tensor:
        x = self.plain(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
            if self.hook:
                x.register_hook(lambda grad: 2 * grad)
        return self.plain(x)


def compile_blocks(module: nn.Module, backend: str = EAGER, **options: object) -> None:
    for block in module.blocks:
        block.compile(backend=backend, **options)


def compile_all(module: nn.Module, backend: str = EAGER, **options: object) -> None:
    # torch leaves calls of its own classes (Sequential) uncompiled; a forward it always compiles.
    module.forward = torch.compile(module.forward, backend=backend, **options)


def make(**options: bool) -> nn.Module:
    torch.manual_seed(0)
    return Stage(**options).to(DTYPE)


def assert_split_right(
    module: nn.Module,
    batches: list[Microbatch],
    compile_it: Callable[[nn.Module], None],
    *,
    self_check: str = "numeric",
) -> tuple[str, ...]:
    """Compare with a plain loop; which parameters were left for W."""
    truth = accumulate(module, batches)
    compile_it(module)
    backward = choose_method(module, self_check=self_check, strict=True)
    gradients = run_split(backward, module, batches, truth)
    assert_same_parameters(module, truth.module)
    assert_same_inputs(gradients, truth.input_grads)
    return backward.choice.deferred


WEIGHTS = {
    f"blocks.{block}.{name}.weight"
    for block in range(3)
    for name in ("attention.qkv", "attention.out", "up", "down")
}


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
    deferred = assert_split_right(make(), batches, lambda m: how(m, COMPILED, **options))
    assert set(deferred) >= WEIGHTS


def test_convolutions_with_the_compiler() -> None:
    deferred = assert_split_right(
        build("convolution"), batches_of("convolution"), lambda m: compile_all(m, COMPILED)
    )
    assert set(deferred) == {"first.weight", "second.weight", "back.weight"}


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


# ── what cannot be cut ───────────────────────────────────────────────────────────────────────────


def test_the_backends_are_known_to_torch() -> None:
    assert {EAGER, COMPILED} <= set(torch._dynamo.list_backends(exclude_tags=()))


def test_replayed_cuda_graphs_are_refused() -> None:
    module = torch.compile(nn.Linear(2, 2), backend=COMPILED, mode="reduce-overhead")
    with pytest.raises(RuntimeError, match="max-autotune-no-cudagraphs"):
        module(torch.ones(2, 2))


@pytest.mark.parametrize("name", [EAGER, COMPILED])
def test_deferring_by_name_is_accepted(name: str) -> None:
    module = torch.compile(make(), backend=name)
    check_compiled(module, "deferred")
    with pytest.raises(BackwardMethodError, match="graph"):
        check_compiled(module, "graph")
    with pytest.raises(BackwardMethodError, match='backend="pipeloom"'):
        check_compiled(torch.compile(make(), backend="aot_eager"), "deferred")


def test_a_half_that_does_not_compile_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: halves.Halves, cut: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(halves.Halves, "prepare", fail)
    module, batches = make(), [floats() for _ in range(2)]
    truth = accumulate(module, batches)
    compile_all(module)
    with pytest.warns(SplitBackwardWarning, match=r"no such kernel; .*blocks\.0\.up\.weight"):
        gradients = run_split(choose_method(module), module, batches, truth)
    assert_same_parameters(module, truth.module)
    assert_same_inputs(gradients, truth.input_grads)
    with pytest.raises(BackwardMethodError, match="no such kernel"):
        run_split(choose_method(module, strict=True), module, batches, truth)


class Doubled(Tensor):
    """A tensor made of another: what distributed tensors are."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Doubled:
        return Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, requires_grad=inner.requires_grad
        )

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], meta: None, size: object, stride: object
    ) -> Doubled:
        return Doubled(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        unwrap = lambda x: x.inner if isinstance(x, Doubled) else x  # noqa: E731
        tree = torch.utils._pytree.tree_map(unwrap, (args, kwargs or {}))
        result = func(*tree[0], **tree[1])
        return torch.utils._pytree.tree_map_only(Tensor, Doubled, result)


def test_tensors_that_consist_of_others_stay_whole() -> None:
    module = nn.Linear(4, 4)
    module.weight = nn.Parameter(Doubled(torch.randn(4, 4)))
    module.bias = nn.Parameter(Doubled(torch.randn(4)))
    compiled = torch.compile(module, backend=EAGER)
    x = torch.randn(3, 4)
    output = compiled(Doubled(x))
    assert halves.halves_of(output.grad_fn) is None
    backward = choose_method(compiled)
    with backward.forward():
        output = compiled(Doubled(x))
    saved: SavedMicrobatch = backward.save(microbatch=0, inputs=[], outputs=[output])
    backward.input(saved, [Doubled(torch.ones(3, 4))])
    backward.weight(saved)
    torch.testing.assert_close(module.weight.grad.inner, torch.ones(4, 3) @ x)


def test_what_torch_no_longer_tells_counts_as_another_backend() -> None:
    module = make()
    compile_all(module)
    assert backend.leaves_weights(module)
    module.forward = print  # has nothing of what is looked for
    assert not backend.leaves_weights(module)
