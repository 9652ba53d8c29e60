"""Stages to compile, and ways to compile them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeloom.runtime.backward import (
    choose_method,
)
from tests.runtime.backward.harness import (
    Microbatch,
    accumulate,
    assert_same_inputs,
    assert_same_parameters,
    run_split,
)
from tests.runtime.backward.stages import WIDTH, Block
from tests.runtime.backward.zoo import DTYPE, flat

EAGER, COMPILED = "pipeloom_eager", "pipeloom"


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


def skip_where_torch_cannot(backend: str, module: nn.Module, inputs: Sequence[Tensor]) -> None:
    """Some versions of torch cannot compile some stages, whoever asks."""
    module = copy.deepcopy(module)
    compile_all(module, backend)
    try:
        outputs = flat(module(*inputs))
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
    except Exception as error:
        pytest.skip(f"torch {torch.__version__} itself cannot with {backend}: {error}")
    torch._dynamo.reset()


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
