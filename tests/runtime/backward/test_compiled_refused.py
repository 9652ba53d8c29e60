"""Compiled code that is not cut, and what is said of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pipeloom.errors import BackwardMethodError
from pipeloom.runtime.backward import (
    SavedMicrobatch,
    SplitBackwardWarning,
    check_compiled,
    choose_method,
)
from pipeloom.runtime.backward.compiled import backend, halves
from tests.runtime.backward.compiling import (
    COMPILED,
    EAGER,
    compile_all,
    make,
    skip_where_torch_cannot,
)
from tests.runtime.backward.harness import (
    accumulate,
    assert_same_inputs,
    assert_same_parameters,
    run_split,
)
from tests.runtime.backward.zoo import floats

torch.set_num_threads(1)
pytestmark = pytest.mark.usefixtures("nothing_compiled_before")


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
    skip_where_torch_cannot("aot_eager", module, [Doubled(x)])
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
