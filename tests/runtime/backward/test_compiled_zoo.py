"""The zoo compiled: what comes out of I, what is left for W, and what is alive between them."""

from __future__ import annotations

import warnings

import pytest
import torch

from pipeloom.runtime.backward import (
    choose_method,
)
from tests.runtime.backward.compiling import compile_all, skip_where_torch_cannot
from tests.runtime.backward.harness import (
    accumulate,
    assert_same_inputs,
    assert_same_parameters,
    run_forward,
    run_split,
)
from tests.runtime.backward.memory import bytes_of, watched_saves, weight_storages
from tests.runtime.backward.zoo import ZOO, batches_of, build, feed

torch.set_num_threads(1)
pytestmark = pytest.mark.usefixtures("nothing_compiled_before")


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
    if name == "complex":
        skip_where_torch_cannot("aot_eager", module, feed(name))
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
