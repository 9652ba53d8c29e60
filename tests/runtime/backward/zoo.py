"""The zoo: each stage, what it is fed, and what ``auto`` must choose for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.runtime.backward.stages import (
    BATCH,
    LENGTH,
    WIDTH,
    AddedMatrix,
    Attention,
    BilinearStage,
    Block,
    Checkpointed,
    ChunkedOutputs,
    ComplexMixing,
    ConvolutionNorm,
    CustomFunction,
    DictOutputs,
    Experts,
    FirstStage,
    FirstStageFloats,
    FrozenMiddle,
    FunctionsAround,
    InPlace,
    LowRank,
    NoParameters,
    OnlyNorms,
    ParameterOutputs,
    Recurrent,
    Reused,
    RoutedExperts,
    SharedSubgraph,
    Tied,
    UnusedBranch,
    ViewOutput,
    WeightNormed,
)

DTYPE = torch.float64


def floats(*, grad: bool = True, shape: tuple[int, ...] = (BATCH, LENGTH, WIDTH)) -> list[Tensor]:
    return [torch.randn(shape, dtype=DTYPE, requires_grad=grad)]


def tokens() -> list[Tensor]:
    return [torch.randint(11, (BATCH, LENGTH))]


@dataclass(frozen=True)
class Entry:
    """A stage, what it is fed, and what ``auto`` must choose for it."""

    build: Callable[[], nn.Module]
    choice: str = "deferred"
    feed: Callable[[], list[Tensor]] = floats
    in_input: tuple[str, ...] = ()  # parameters whose gradients may come out of I
    dtype: torch.dtype = DTYPE
    reason: str = ""  # a part of the reason, where the choice is "whole"


BLOCK_NORMS = ("norm1.weight", "norm1.bias", "norm2.weight")


def norms(prefix: str) -> tuple[str, ...]:
    return tuple(prefix + name for name in BLOCK_NORMS)


LSTM_WEIGHTS = tuple(
    f"cells.{kind}_{which}_l0" for kind in ("weight", "bias") for which in ("ih", "hh")
)

ZOO: dict[str, Entry] = {
    "mlp": Entry(
        lambda: nn.Sequential(nn.Linear(WIDTH, 40), nn.GELU(), nn.Linear(40, WIDTH, bias=False))
    ),
    "attention": Entry(Attention),
    "transformer": Entry(
        lambda: nn.Sequential(Block(), Block()), in_input=norms("0.") + norms("1.")
    ),
    "experts": Entry(Experts),
    "routed experts": Entry(RoutedExperts),
    "convolution": Entry(
        ConvolutionNorm,
        feed=partial(floats, shape=(BATCH, 3, 8, 8)),
        in_input=("norm.weight", "norm.bias"),
    ),
    "convolution 1d": Entry(lambda: nn.Conv1d(LENGTH, 4, 3, padding=2, dilation=2), feed=floats),
    "gru": Entry(partial(Recurrent, nn.GRU), in_input=("cells.bias_ih_l0",)),
    "lstm": Entry(partial(Recurrent, nn.LSTM), in_input=("cells.bias_ih_l0",)),
    "fused lstm": Entry(
        partial(Recurrent, nn.LSTM),
        dtype=torch.float32,
        choice="whole",
        reason="MkldnnRnnLayerBackward0 computes both halves in one kernel",
    ),
    "fused lstm and head": Entry(
        partial(Recurrent, nn.LSTM, head=True),
        dtype=torch.float32,
        in_input=(*LSTM_WEIGHTS, "head.bias"),
    ),
    "tied": Entry(Tied, feed=tokens, in_input=norms("block.")),
    "reused": Entry(Reused, in_input=("layer.bias",)),
    "lora": Entry(partial(LowRank, merged=False)),
    "merged lora": Entry(partial(LowRank, merged=True)),
    "custom function": Entry(CustomFunction, in_input=("weight",)),
    "only a custom function": Entry(
        partial(CustomFunction, head=False), choice="whole", reason="TwoResultsBackward"
    ),
    "functions around": Entry(FunctionsAround),
    "chunked outputs": Entry(ChunkedOutputs),
    "view outputs": Entry(ViewOutput),
    "checkpointed": Entry(
        partial(Checkpointed, reentrant=False), in_input=norms("blocks.0.") + norms("blocks.1.")
    ),
    "reentrant checkpoint": Entry(
        partial(Checkpointed, reentrant=True), choice="whole", reason="use_reentrant=False"
    ),
    "complex": Entry(ComplexMixing),
    "dict outputs": Entry(DictOutputs),
    "no parameters": Entry(NoParameters, choice="whole", reason="no parameter needs a gradient"),
    "only norms": Entry(OnlyNorms, choice="whole", reason="worth deferring"),
    "first stage": Entry(FirstStage, feed=tokens, in_input=norms("block.")),
    "first stage of floats": Entry(
        FirstStageFloats,
        feed=partial(floats, grad=False),
        in_input=("norm.weight", "norm.bias", "shift"),
    ),
    "parameter outputs": Entry(ParameterOutputs, in_input=("table",)),
    "weight norm": Entry(WeightNormed),
    "shared subgraph": Entry(SharedSubgraph),
    "added matrix": Entry(AddedMatrix),
    "bilinear": Entry(BilinearStage, choice="graph", in_input=("mix.bias",)),
    "frozen": Entry(FrozenMiddle, in_input=("biased.bias",)),
    "unused branch": Entry(UnusedBranch),
    "in place": Entry(InPlace),
}


def build(name: str) -> nn.Module:
    """One entry of the zoo, in its type (complex parameters stay complex)."""
    torch.manual_seed(7)
    module, dtype = ZOO[name].build(), ZOO[name].dtype
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
    return module


def feed(name: str) -> list[Tensor]:
    """What one microbatch feeds an entry: leaves."""
    inputs = ZOO[name].feed()
    return [
        x.detach().to(ZOO[name].dtype).requires_grad_(x.requires_grad)
        if x.is_floating_point()
        else x
        for x in inputs
    ]


def batches_of(name: str, num: int = 4) -> list[list[Tensor]]:
    """Several microbatches for an entry."""
    torch.manual_seed(3)
    return [feed(name) for _ in range(num)]


def flat(value: Any) -> list[Tensor]:
    """The tensors of a nested output, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for part in value.values() for tensor in flat(part)]
    if isinstance(value, (list, tuple)):
        return [tensor for part in value for tensor in flat(part)]
    return []
