"""Every kind of stage, by every method, several microbatches in flight, against plain autograd."""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch
from torch import nn

from pipeloom.runtime.backward import SavedMicrobatch, SplitBackwardWarning, choose_method
from tests.runtime.backward.harness import (
    accumulate,
    assert_same_inputs,
    assert_same_parameters,
    run_forward,
    run_split,
)
from tests.runtime.backward.memory import bytes_of, watched_saves, weight_storages
from tests.runtime.backward.zoo import ZOO, batches_of, build

torch.set_num_threads(1)

# Between I and W: bytes that a microbatch holds (operands and gradients of products, gradients that
# came out of I, what the graph of the weights themselves saved).
BYTES_ALIVE: dict[str, int] = {
    "added matrix": 12288,
    "attention": 9216,
    "bilinear": 7808,
    "checkpointed": 56064,
    "chunked outputs": 6144,
    "complex": 9216,
    "convolution": 16128,
    "convolution 1d": 2560,
    "custom function": 5120,
    "dict outputs": 3360,
    "experts": 24864,
    "first stage": 27408,
    "first stage of floats": 7168,
    "frozen": 3200,
    "functions around": 6144,
    "fused lstm": 0,
    "fused lstm and head": 10304,
    "gru": 12672,
    "in place": 6144,
    "lora": 6912,
    "lstm": 15872,
    "merged lora": 6664,
    "mlp": 10752,
    "no parameters": 0,
    "only a custom function": 0,
    "only norms": 0,
    "parameter outputs": 4096,
    "reentrant checkpoint": 0,
    "reused": 9472,
    "routed experts": 3072,
    "shared subgraph": 14472,
    "tied": 29184,
    "transformer": 49920,
    "unused branch": 3072,
    "view outputs": 3072,
    "weight norm": 11408,
}

METHODS = ("auto", "deferred", "graph", "whole")
# Stages of which nothing can be split, where asking for a split by name warns.
UNSPLIT = {
    "deferred": {"fused lstm", "only a custom function", "reentrant checkpoint", "only norms"},
    "graph": {"reentrant checkpoint"},
    "auto": {"reentrant checkpoint"},
    "whole": set(),
}


@contextlib.contextmanager
def unsplit_warning(name: str, method: str):
    """Expect the warning exactly where it belongs."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    said = any(issubclass(warning.category, SplitBackwardWarning) for warning in caught)
    assert said == (name in UNSPLIT[method]), [str(warning.message) for warning in caught]


@pytest.mark.parametrize("self_check", ["structural", "numeric"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ZOO)
def test_split_gives_the_gradients_of_a_plain_backward(
    name: str, method: str, self_check: str
) -> None:
    module, batches = build(name), batches_of(name)
    truth = accumulate(module, batches)
    with unsplit_warning(name, method):
        backward = choose_method(module, method=method, self_check=self_check, stage=1)
        gradients = run_split(backward, module, batches, truth)
    assert_same_parameters(module, truth.module)
    assert_same_inputs(gradients, truth.input_grads)
    assert_same_state(module, truth.module)


def assert_same_state(module: nn.Module, truth: nn.Module) -> None:
    for (name, mine), theirs in zip(module.named_buffers(), truth.buffers(), strict=True):
        assert torch.equal(mine, theirs), f"buffer {name} changed"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ZOO)
def test_full_backward_is_the_plain_backward_bit_for_bit(name: str, method: str) -> None:
    module, batches = build(name), batches_of(name, 2)
    truth = accumulate(module, batches)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SplitBackwardWarning)
        backward = choose_method(module, method=method, stage=0)
        saved = [run_forward(backward, module, x, i) for i, x in enumerate(batches)]
    found = [backward.full(s, g) for s, g in zip(saved, truth.output_grads, strict=True)]
    assert_same_inputs(found, truth.input_grads)
    for (pname, mine), theirs in zip(
        module.named_parameters(), truth.module.parameters(), strict=True
    ):
        same = mine.grad is theirs.grad or torch.equal(mine.grad, theirs.grad)
        assert same, f"{pname} differs from a plain backward"


@pytest.mark.parametrize("name", ZOO)
def test_auto_chooses(name: str) -> None:
    entry, module, batches = ZOO[name], build(name), batches_of(name)
    truth = accumulate(module, batches)
    backward = choose_method(module, stage=2)
    with unsplit_warning(name, "auto"):
        run_split(backward, module, batches, truth)
    choice = backward.choice
    assert choice is not None
    assert choice.method == entry.choice
    if entry.choice == "whole":
        assert entry.reason in choice.reason
    else:
        assert set(choice.computed_in_input) == set(entry.in_input)
        trainable = {n for n, p in truth.module.named_parameters() if p.grad is not None}
        assert set(choice.deferred) == trainable - set(entry.in_input)


@pytest.mark.parametrize("name", ZOO)
def test_bytes_alive_between_input_and_weight(name: str) -> None:
    """What is counted as held is pinned; of what F saved, nothing else is alive."""
    module, batches = build(name), batches_of(name)
    truth = accumulate(module, batches)
    held, beyond = [], []
    with warnings.catch_warnings(), watched_saves() as alive:
        warnings.simplefilter("ignore", SplitBackwardWarning)
        backward = choose_method(module, stage=2)

        def look(index: int, saved: SavedMicrobatch) -> None:
            held.append(backward.held_bytes(saved))
            kept = saved.pending.tensors() if saved.pending is not None else []
            counted = weight_storages(module) | {
                t.untyped_storage().data_ptr() for t in kept if t.layout is torch.strided
            }
            beyond.append(bytes_of(alive(), excluded=counted))

        for index, inputs in enumerate(batches):  # one at a time: nothing else in flight
            saved = run_forward(backward, module, inputs, index)
            backward.input(saved, truth.output_grads[index])
            look(index, saved)
            backward.weight(saved)
            assert backward.held_bytes(saved) == 0
            del saved
            assert bytes_of(alive(), excluded=weight_storages(module)) == 0
    assert (held[-1], beyond[-1]) == (BYTES_ALIVE[name], 0)
