"""Stages with compiled code: what works, and what is refused when a pipeline is built."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pipeloom import LocalPipeline
from pipeloom.errors import BackwardMethodError
from pipeloom.runtime.backward import SplitBackwardWarning, check_compiled, choose_method
from tests.runtime.backward.harness import (
    accumulate,
    assert_same_inputs,
    assert_same_parameters,
    run_split,
)
from tests.runtime.backward.stages import WIDTH
from tests.runtime.backward.zoo import DTYPE, feed

torch.set_num_threads(1)


def wave(x: Tensor) -> Tensor:
    """Saves more than its input where it is compiled."""
    return torch.sin(x) * torch.cos(x)


class Middle(nn.Module):
    """A part with a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.wave = wave

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.wave(self.layer(x)))


class Half(nn.Module):
    """A plain linear layer around a part that can be compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Linear(WIDTH, WIDTH)
        self.middle = Middle()

    def forward(self, x: Tensor) -> Tensor:
        return self.plain(self.middle(self.plain(x)))


def stage(where: str, backend: str = "aot_eager") -> nn.Module:
    torch.manual_seed(0)
    torch._dynamo.reset()
    module = Half().to(DTYPE)
    if where == "block":
        module.middle.compile(backend=backend)
    elif where == "function":
        module.middle.forward = torch.compile(module.middle.forward, backend=backend)
    elif where == "stage function":
        module.forward = torch.compile(module.forward, backend=backend)
    elif where == "activation":  # a bare function, which no module shows
        module.middle.wave = torch.compile(wave, backend=backend)
    elif where == "stage":
        return torch.compile(module, backend=backend)
    return module


@pytest.mark.parametrize("method", ["auto", "deferred"])
@pytest.mark.parametrize("where", ["block", "function", "nowhere"])
def test_what_is_outside_compiled_code_is_deferred(where: str, method: str) -> None:
    module = stage(where)
    batches = [feed("mlp") for _ in range(4)]
    truth = accumulate(stage("nowhere"), batches)
    backward = choose_method(module, method=method)
    gradients = run_split(backward, module, batches, truth)
    assert_same_parameters(module, truth.module)
    assert_same_inputs(gradients, truth.input_grads)
    assert {"plain.weight", "plain.bias"} <= set(backward.choice.deferred)
    inside = {"middle.layer.weight", "middle.layer.bias"}
    assert inside <= set(
        backward.choice.deferred if where == "nowhere" else backward.choice.computed_in_input
    )


def test_a_compiled_stage_runs_whole_and_says_how_to_defer() -> None:
    module = stage("stage")
    batches = [feed("mlp") for _ in range(3)]
    truth = accumulate(stage("nowhere"), batches)
    backward = choose_method(module)
    gradients = run_split(backward, module, batches, truth)
    assert_same_parameters(module._orig_mod, truth.module)
    assert_same_inputs(gradients, truth.input_grads)
    assert backward.choice.method == "whole"
    assert 'compile it with torch.compile(…, backend="pipeloom")' in backward.choice.reason


@pytest.mark.parametrize(
    ("where", "method", "words"),
    [
        ("stage", "graph", "the stage itself"),
        ("stage", "deferred", "whose backward comes in halves"),
        ("block", "graph", "its part 'middle'"),
        ("function", "graph", "its part 'middle'"),
        ("stage function", "graph", "the stage itself"),
        ("stage function", "deferred", "whose backward comes in halves"),
    ],
)
def test_what_cannot_work_is_refused_when_built(where: str, method: str, words: str) -> None:
    module = stage(where)
    with pytest.raises(BackwardMethodError, match=words):
        check_compiled(module, method)
    with pytest.raises(BackwardMethodError, match='use method="auto"'):
        choose_method(module, method=method)


def test_code_made_by_the_default_compiler_is_run_backward_once() -> None:
    """Inductor's backward may reuse what the forward saved, so a second run of it would fail."""
    module = stage("block", backend="inductor")
    batches = [feed("mlp") for _ in range(3)]
    truth = accumulate(stage("nowhere"), batches)
    backward = choose_method(module)
    run_split(backward, module, batches, truth)
    assert_same_parameters(module, truth.module)
    assert "middle.layer.weight" in backward.choice.computed_in_input


@pytest.mark.parametrize("method", ["auto", "whole"])
@pytest.mark.parametrize("where", ["stage", "block"])
def test_everything_else_is_accepted(where: str, method: str) -> None:
    check_compiled(stage(where), method)


def test_compiled_functions_that_no_module_shows_keep_the_graph_from_being_kept() -> None:
    module = stage("activation")
    batches = [feed("mlp") for _ in range(3)]
    truth = accumulate(stage("nowhere"), batches)
    backward = choose_method(module, method="graph", stage=2)
    with pytest.warns(SplitBackwardWarning, match=r"stage 2, .*compiled code.*method=\"auto\""):
        gradients = run_split(backward, module, batches, truth)
    assert_same_parameters(module, truth.module)
    assert_same_inputs(gradients, truth.input_grads)


@pytest.mark.parametrize("where", ["stage", "stage function", "block", "function", "nowhere"])
def test_pipelines_of_compiled_stages_train_under_a_split_schedule(where: str) -> None:
    torch.manual_seed(2)
    x, target = torch.randn(2, 6, 2, WIDTH, dtype=DTYPE)
    results = []
    for compiled in (where, "nowhere"):
        stages = [stage(compiled), stage(compiled)]
        pipe = LocalPipeline(
            stages, schedule="zb-h1", ranks=2, microbatches=3, loss_fn=nn.functional.mse_loss
        )
        loss = pipe.step(x, target=target).loss
        results.append([loss, *(p.grad for module in stages for p in module.parameters())])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)
