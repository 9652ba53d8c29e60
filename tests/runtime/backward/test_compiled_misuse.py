"""Compiled code in halves: what was found wrong once, and what others do around it."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeloom.errors import BackwardError, BackwardMethodError
from pipeloom.runtime.backward import choose_method
from pipeloom.runtime.backward.compiled import halves
from tests.runtime.backward.compiling import COMPILED, EAGER, compile_all
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


class Weights(nn.Module):
    """Some weights, and what is done with them."""

    def __init__(self, use: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList(torch.randn(shape, dtype=DTYPE) for shape in shapes)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        # One by one: torch 2.11 cannot compile a list of parameters that is unpacked as a whole.
        return self.use(x, *[self.weights[place] for place in range(len(self.weights))])


@pytest.mark.parametrize("backend", [EAGER, COMPILED])
@pytest.mark.parametrize(
    "use",
    [
        lambda x, a, b: x @ (a + b),
        lambda x, a, b: x @ (a + b.view(4, 4)),
        lambda x, a, b: x @ torch.cat([a, b])[1:5],
        lambda x, a, b: x @ (a + b + a),
    ],
)
def test_weights_that_share_a_product_share_no_gradient(
    use: Callable[..., Tensor], backend: str
) -> None:
    """One result for two operands became the ``.grad`` of both, and was then added to twice."""
    module = Weights(use, (4, 4), (4, 4))
    batches = [x_of(3, 4) for _ in range(3)]
    truth = accumulate(module, batches)
    compile_all(module, backend)
    run_split(choose_method(module), module, batches, truth)
    assert_same_parameters(module, truth.module)
    first, second = (one.grad.untyped_storage().data_ptr() for one in module.weights)
    assert first != second


CACHED = """
    import sys
    import torch
    from pipeloom.runtime.backward import choose_method

    torch.set_num_threads(1)
    torch.manual_seed(0)
    a, b, c = (torch.nn.Parameter(torch.randn(32, 32)) for _ in range(3))
    stage = torch.nn.Module()
    stage.a, stage.b, stage.c = a, b, c
    stage.forward = torch.compile(
        lambda x: torch.sin(torch.sin(torch.sin(x @ a) @ b) @ c), backend=sys.argv[1]
    )
    x = torch.randn(8, 32, requires_grad=True)
    y = stage(x)
    if sys.argv[1] == "inductor":
        y.sum().backward()
    else:
        first = torch.autograd.grad(y.sum(), [x, a, b, c], retain_graph=True)
        second = torch.autograd.grad(y.sum(), [x, a, b, c])
        assert all(map(torch.equal, first, second))
        backward = choose_method(stage, self_check="numeric", strict=True)
        with backward.forward():
            y = stage(x)
        saved = backward.save(microbatch=0, inputs=[x], outputs=[y])
        backward.input(saved, [torch.ones_like(y)])
        backward.weight(saved)
        assert backward.choice.method == "deferred"
"""


def test_what_torch_compiled_before_is_not_taken_from_its_cache(tmp_path: Path) -> None:
    """torch's own backward of the same code overwrites what W needs, and has the same key."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    for backend in ("inductor", COMPILED):
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(CACHED), backend],
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        if backend == "inductor" and done.returncode:
            pytest.skip("the compiler does not work here")
        assert not done.returncode, done.stderr


def test_an_engine_that_is_compiled_itself_runs_it_whole() -> None:
    module = Weights(lambda x, a, b: torch.tanh(x @ a) @ b, (4, 4), (4, 4))
    batches = [x_of(3, 4) for _ in range(3)]
    truth = accumulate(module, batches)
    compile_all(module)
    backward = choose_method(module)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        run_split(backward, module, batches, truth)
    assert_same_parameters(module, truth.module)
    module.zero_grad()
    run_split(backward, module, batches, truth)  # and no longer
    assert_same_parameters(module, truth.module)
    assert backward.choice.method == "deferred"


def test_a_backward_is_compiled_under_the_settings_of_its_forward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also in another thread, as the engine has for each device, where settings begin anew."""
    from torch._dynamo.convert_frame import compile_lock
    from torch._inductor import compile_fx, config

    seen: list[object] = []
    compile_inner = compile_fx.compile_fx_inner

    def watched(*args: Any, **options: Any) -> Any:
        seen.append(config.realize_opcount_threshold)
        assert compile_lock._is_owned(), "the compiler is not for several threads at once"
        return compile_inner(*args, **options)

    monkeypatch.setattr(compile_fx, "compile_fx_inner", watched)
    module = Weights(lambda x, a, b: torch.tanh(x @ a) @ b, (4, 4), (4, 4))
    truth = accumulate(module, [x_of(3, 4)])
    compile_all(module, COMPILED)
    with config.patch(realize_opcount_threshold=17):
        y = module(*x_of(3, 4))
        thread = threading.Thread(target=y.backward, args=(torch.ones_like(y),))
        thread.start()
        thread.join()
    assert seen == [17, 17]
    assert [p.grad.shape for p in module.parameters()] == [
        p.grad.shape for p in truth.module.parameters()
    ]


@pytest.mark.parametrize("backend", [EAGER, COMPILED])
def test_returned_gradients_that_are_read_otherwise_than_what_waits(backend: str) -> None:
    """The gradient of ``u`` is a lazy conjugate of a value that W keeps."""

    class Conjugating(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex128))

        def forward(self, x: Tensor, u: Tensor) -> Tensor:
            return x @ self.weight + u.conj()

    torch.manual_seed(0)
    module = Conjugating()
    batches = [list(torch.randn(2, 4, 4, dtype=torch.complex128)) for _ in range(2)]
    batches = [[one.requires_grad_() for one in batch] for batch in batches]
    truth = accumulate(module, batches)
    compile_all(module, backend)
    gradients = run_split(choose_method(module), module, batches, truth)
    assert_same_parameters(module, truth.module)
    assert_same_inputs(gradients, truth.input_grads)


@pytest.mark.parametrize("backend", [EAGER, COMPILED])
def test_returned_gradients_may_be_used_as_any_others(backend: str) -> None:
    module = Weights(lambda x, a: x @ a + x, (4, 4))
    compile_all(module, backend)
    backward = choose_method(module)
    saved = run_forward(backward, module, x_of(4, 4), 0)
    [dx] = backward.input(saved, [torch.ones(4, 4, dtype=DTYPE)])
    assert not dx._is_view()
    dx.detach_()
    backward.weight(saved)


def test_what_is_compiled_waits_for_nobody_who_compiles() -> None:
    from torch._dynamo.convert_frame import compile_lock

    module = Weights(lambda x, a: x @ a, (4, 4))
    compile_all(module)
    module(*x_of(3, 4)).sum().backward()
    y = module(*x_of(3, 4))
    thread = threading.Thread(target=y.sum().backward, daemon=True)
    with compile_lock:
        thread.start()
        thread.join(timeout=60)
        assert not thread.is_alive()


def test_gradients_that_nobody_left_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Weights(lambda x, a: x @ a, (4, 4))
    compile_all(module)
    backward = choose_method(module)
    saved = run_forward(backward, module, x_of(3, 4), 0)
    monkeypatch.setattr(
        halves.Halves, "__call__", lambda self, arguments: self.prepare_whole()(arguments)
    )
    with pytest.raises(BackwardError, match="gradients of its weights are lost"):
        backward.input(saved, [torch.ones(3, 4, dtype=DTYPE)])


def test_hooks_on_a_view_that_is_older_than_the_forward() -> None:
    weight = nn.Parameter(torch.randn(4, 4, dtype=DTYPE))
    inner = nn.Parameter(torch.randn(4, 4, dtype=DTYPE))
    module = nn.Module()
    module.weight, module.inner = weight, inner
    turned = weight.t()
    turned.register_hook(lambda grad: 3 * grad)

    def use(x: Tensor, turned: Tensor) -> Tensor:
        return torch.tanh(x @ inner) @ turned

    compiled = torch.compile(use, backend=EAGER)
    backward = choose_method(module)
    expected = torch.zeros(4, 4, dtype=DTYPE)
    for index in range(3):
        [x] = x_of(3, 4)
        expected += 3 * torch.autograd.grad(use(x, weight.t()).sum(), weight)[0]
        with backward.forward():
            y = compiled(x, turned)
        saved = backward.save(microbatch=index, inputs=[x], outputs=[y])
        backward.input(saved, [torch.ones_like(y)])
        backward.weight(saved)
    torch.testing.assert_close(weight.grad, expected)


def test_hooks_on_all_modules_do_not_see_what_runs_at_w() -> None:
    module = Weights(lambda x, a, b: torch.tanh(x @ a) @ b, (4, 4), (4, 4))
    compile_all(module)
    backward = choose_method(module)
    saved = run_forward(backward, module, x_of(3, 4), 0)
    seen: list[nn.Module] = []
    hook = torch.nn.modules.module.register_module_forward_hook(
        lambda module, args, result: seen.append(module)
    )
    try:
        backward.input(saved, [torch.ones(3, 4, dtype=DTYPE)])
        backward.weight(saved)
    finally:
        hook.remove()
    assert not seen


class Pooled(nn.Module):
    """Its backward depends on sizes in a way that only the compiler finds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.avg_pool2d(torch.tanh(self.first(x)), 2))


@pytest.mark.parametrize("split", [False, True])
def test_sizes_that_a_backward_was_not_compiled_for(split: bool) -> None:
    torch.manual_seed(0)
    module = Pooled().to(DTYPE)
    batches = [x_of(2, 3, size, size) for size in (4, 6, 5, 8)]
    truth = accumulate(module, batches)
    compile_all(module, COMPILED)
    if split:
        gradients = run_split(choose_method(module), module, batches, truth)
        assert_same_inputs(gradients, truth.input_grads)
    else:
        for [x], [grad] in zip(batches, truth.output_grads, strict=True):
            module(x).backward(grad)
    assert_same_parameters(module, truth.module)


class SeenAsBytes(torch.autograd.Function):
    """Saves its operand as integers, as codecs of activations do."""

    @staticmethod
    def forward(ctx: object, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x.view(torch.int64) & -256, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, Tensor]:
        numbers, weight = ctx.saved_tensors
        return grad @ weight.t(), numbers.view(DTYPE).t() @ grad


@pytest.mark.parametrize("backend", [EAGER, COMPILED])
def test_bytes_seen_as_other_numbers(backend: str) -> None:
    module = Weights(lambda x, a: SeenAsBytes.apply(torch.tanh(x), a), (4, 4))
    batches = [x_of(3, 4) for _ in range(3)]
    truth = accumulate(module, batches)
    compile_all(module, backend)
    run_split(choose_method(module), module, batches, truth)
    assert_same_parameters(module, truth.module)


@pytest.mark.parametrize("backend", [EAGER, COMPILED])
def test_compiled_code_keeps_nothing_of_its_first_microbatch(backend: str) -> None:
    module = Weights(lambda x, a: torch.tanh(x @ a), (4, 4))
    compile_all(module, backend)
    backward = choose_method(module)
    x, grad = torch.randn(3, 4, dtype=DTYPE, requires_grad=True), torch.ones(3, 4, dtype=DTYPE)
    with backward.forward():
        y = module(x)
    saved = backward.save(microbatch=0, inputs=[x], outputs=[y])
    backward.input(saved, [grad])
    backward.weight(saved)
    alive = [weakref.ref(one) for one in (x, grad, module.weights[0])]
    del x, grad, y, saved
    gc.collect()
    assert [one() is not None for one in alive] == [False, False, True]
    del module, backward
    gc.collect()
    assert alive[2]() is None


@pytest.mark.parametrize("backend", [EAGER, COMPILED])
@pytest.mark.parametrize(
    ("shape", "x_shape", "use", "most"),
    [
        # The operand and the gradient of the result; the weight, or zeros around it, are larger.
        ((512, 16), (4, 16), lambda x, w: F.linear(x, w[:8]), 4 * (16 + 8)),
        ((64, 16, 16), (4, 16), lambda x, w: x @ w[3], 4 * (16 + 16)),
        ((512, 16), (4, 16), lambda x, w: x + w[:4], 4 * 16),
        ((512, 16), (4, 16), lambda x, w: x + w[7], 16),
        ((32, 32, 3, 3), (1, 32, 4, 4), lambda x, w: F.conv2d(x, w), 32 * (16 + 4)),
    ],
)
def test_nothing_as_large_as_a_weight_waits(
    shape: tuple[int, ...],
    x_shape: tuple[int, ...],
    use: Callable[..., Tensor],
    most: int,
    backend: str,
) -> None:
    module = Weights(lambda x, w: torch.tanh(use(torch.tanh(x), w)), shape)
    batches = [x_of(*x_shape) for _ in range(3)]
    truth = accumulate(module, batches)
    compile_all(module, backend)
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
    assert max(kept) <= 8 * most


@pytest.mark.parametrize("backend", [EAGER, COMPILED])
def test_an_input_overwritten_before_w_is_noticed(backend: str) -> None:
    module = Weights(F.linear, (6, 6))
    compile_all(module, backend)
    backward = choose_method(module, stage=5)
    for index in range(2):
        x = torch.randn(2, 4, 6, dtype=DTYPE, requires_grad=True)
        with backward.forward():
            y = module(x)
        saved = backward.save(microbatch=index, inputs=[x], outputs=[y])
        backward.input(saved, [torch.ones_like(y)])
        with torch.no_grad():
            x.zero_()
        with pytest.raises(BackwardError, match=rf"stage 5, microbatch {index}: .*weights\.0"):
            backward.weight(saved)


def test_graphs_of_the_compiler_that_are_on_for_everything_are_refused() -> None:
    module = Weights(lambda x, a: x @ a, (4, 4))
    compile_all(module, COMPILED)
    with (
        torch._inductor.config.patch({"triton.cudagraphs": True}),
        pytest.raises(Exception, match="cannot replay CUDA graphs") as caught,
    ):
        module(*x_of(3, 4))
    assert BackwardMethodError.__name__ in str(caught.value) + type(caught.value).__name__


class Twice(nn.Module):
    """The same compiled block, called two times."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Weights(lambda x, a, b, c: torch.tanh(x @ a + c) @ b, (4, 4), (4, 4), (4,))

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.block(x))


def test_a_block_that_a_first_stage_calls_twice_is_split() -> None:
    module = Twice()
    batches = [x_of(3, 4, grad=False) for _ in range(3)]
    truth = accumulate(module, batches)
    module.block.compile(backend=EAGER)
    backward = choose_method(module, strict=True)
    run_split(backward, module, batches, truth)
    assert_same_parameters(module, truth.module)
    assert set(backward.choice.deferred) == {"block.weights.0", "block.weights.1"}
    assert backward.choice.computed_in_input == ("block.weights.2",)
