"""Models to run through pipelines: each a list of stages, a batch and a loss, small and in float64.

The truth is :func:`run_plainly`: the same stages called one after the other, microbatch by
microbatch, with an ordinary backward each, in a loop that knows nothing of pipelines.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

WIDTH = 4


@dataclass
class Carried:
    """A dataclass that crosses boundaries."""

    hidden: Tensor
    mask: Tensor
    layer: int
    nothing: None = None


pytree.register_pytree_node(
    Carried,
    lambda c: ([c.hidden, c.mask, c.layer, c.nothing], None),
    lambda children, _: Carried(*children),
)


class Block(nn.Module):
    """x + linear(tanh(linear(x))), every weight with a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.first = nn.Linear(WIDTH, 2 * WIDTH)
        self.second = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.tanh(self.first(self.norm(x))))


class Embedding(Block):
    """Tokens in, so the stage has no differentiable input."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(self.table(tokens))


class Shared(Block):
    """One weight used twice."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


class LowRank(Block):
    """A frozen base and a small trainable part, as LoRA has."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            parameter.requires_grad_(False)
        self.down = nn.Linear(WIDTH, 1, bias=False)
        self.up = nn.Linear(1, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.up(self.down(x))


class Frozen(Block):
    """Nothing to train; gradients only pass through."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            parameter.requires_grad_(False)


class InDict(Block):
    """Dicts with tensors of several types, None and Python values."""

    def forward(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            value = {"hidden": value, "ids": torch.arange(len(value)), "layer": 0, "no": None}
        hidden = super().forward(value["hidden"])
        phase = torch.complex(hidden, torch.zeros_like(hidden))
        return {
            "hidden": phase.real,
            "ids": value["ids"] + 1,
            "half": hidden.detach().to(torch.bfloat16),
            "layer": value["layer"] + 1,
            "no": None,
        }


class InComplex(Block):
    """A complex, differentiable boundary."""

    def forward(self, value: Tensor) -> Tensor:
        real = value.real if value.is_complex() else value
        hidden = super().forward(real)
        return torch.complex(hidden, 0.5 * hidden)


class InDataclass(Block):
    """A dataclass that is registered as a pytree."""

    def forward(self, value: Any) -> Carried:
        if isinstance(value, Tensor):
            value = Carried(value, value > 0, 0)
        hidden = super().forward(value.hidden) * value.mask
        return Carried(hidden, value.mask, value.layer + 1)


class InTuple(Block):
    """Two positional arguments, one of which is passed through untouched; both differentiable."""

    def forward(self, x: Tensor, start: Tensor | None = None) -> tuple[Tensor, Tensor]:
        start = 2 * x if start is None else start
        return super().forward(x + 0.1 * start), start


class AsView(Block):
    """The output is a view that is not contiguous."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1) if x.shape[0] == WIDTH else x
        wide = torch.cat([super().forward(x), x], dim=-1)
        return wide[:, :WIDTH].transpose(0, 1)


class Wasteful(Block):
    """An output that no later stage uses, made by a weight that therefore gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, unused: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return super().forward(x), self.spare(x)


class Partial(Block):
    """An output that needs no gradient beside one that does."""

    def forward(self, x: Tensor, fixed: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return super().forward(x), x.detach().sum(dim=-1)


class Checkpointed(Block):
    """Activation checkpointing, either variant."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


class Normalised(Block):
    """Batch normalisation: buffers that every forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.batch_norm(super().forward(x))


class WithKeyword(Block):
    """A keyword argument at every stage."""

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        assert scale is not None
        return super().forward(x) * scale


def make_batch(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, WIDTH).double(), torch.randn(rows, WIDTH).double()


def make_tokens(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randint(7, (rows,)), torch.randn(rows, WIDTH).double()


def squared_error(output: Any, target: Tensor) -> Tensor:
    """Mean squared error of the first tensor that an output has."""
    if isinstance(output, dict):
        output = output["hidden"]
    elif isinstance(output, Carried):
        output = output.hidden
    elif isinstance(output, tuple):
        output = output[0]
    if output.is_complex():
        output = output.real + output.imag
    if output.shape != target.shape:
        output = output.transpose(0, 1)
    return nn.functional.mse_loss(output, target)


@dataclass(frozen=True)
class Model:
    """A model of the zoo."""

    name: str
    #: Makes the stage of an index, given how many there are.
    make_stage: Callable[[int, int], nn.Module]
    make_batch: Callable[[int], tuple[Tensor, Tensor]] = make_batch
    keywords: Callable[[int], dict[str, Tensor]] = lambda rows: {}

    def make_stages(self, num_stages: int) -> list[nn.Module]:
        return [self.make_stage(index, num_stages).double() for index in range(num_stages)]


def _every(kind: Callable[[], nn.Module]) -> Callable[[int, int], nn.Module]:
    return lambda index, num_stages: kind()


def _at(position: int, kind: Callable[[], nn.Module]) -> Callable[[int, int], nn.Module]:
    return lambda index, num_stages: kind() if index == position % num_stages else Block()


ZOO = {
    model.name: model
    for model in (
        Model("blocks", _every(Block)),
        Model("tokens", _at(0, Embedding), make_tokens),
        Model("shared", _every(Shared)),
        Model("low_rank", _every(LowRank)),
        Model("frozen_first", _at(0, Frozen)),
        Model("frozen_middle", _at(1, Frozen)),
        Model("frozen_last", _at(-1, Frozen)),
        Model("dict", _every(InDict)),
        Model("complex", _every(InComplex)),
        Model("dataclass", _every(InDataclass)),
        Model("tuple", _every(InTuple)),
        Model("view", _every(AsView)),
        Model("wasteful", _every(Wasteful)),
        Model("partial", _every(Partial)),
        Model(
            "keyword", _every(WithKeyword), keywords=lambda r: {"scale": torch.rand(r, 1).double()}
        ),
        Model("checkpoint", _every(lambda: Checkpointed(reentrant=False))),
        # Without a differentiable input the reentrant variant has no gradients, pipelined or not.
        Model(
            "checkpoint_reentrant",
            lambda index, num_stages: Checkpointed(reentrant=True) if index else Block(),
        ),
    )
}


def call_plainly(stages: Sequence[nn.Module], *args: Any, **kwargs: Any) -> Any:
    """The unpipelined model."""
    value: Any = args
    for stage in stages:
        value = stage(*value, **kwargs) if type(value) in (tuple, list) else stage(value, **kwargs)
    return value


def run_plainly(
    stages: Sequence[nn.Module],
    microbatches: Sequence[tuple[Any, Any]],
    loss_fn: Callable[[Any, Any], Tensor] = squared_error,
    *,
    total: float | None = None,
    keywords: Sequence[dict[str, Any]] | None = None,
) -> list[Tensor]:
    """The plain loop: forward, loss, backward, for one microbatch after the other."""
    losses = []
    for index, (arguments, target) in enumerate(microbatches):
        arguments = arguments if isinstance(arguments, tuple) else (arguments,)
        own = keywords[index] if keywords else {}
        loss = loss_fn(call_plainly(stages, *arguments, **own), target)
        (loss / (len(microbatches) if total is None else total)).backward()
        losses.append(loss.detach())
    return losses


def copy_stages(stages: Sequence[nn.Module]) -> list[nn.Module]:
    return copy.deepcopy(list(stages))


def compare_gradients(
    actual: Sequence[nn.Module], expected: Sequence[nn.Module], *, tolerance: float = 1e-10
) -> None:
    """Every gradient is there exactly where it should be, and equal to a relative tolerance."""
    for stage, (one, other) in enumerate(zip(actual, expected, strict=True)):
        theirs = dict(other.named_parameters())
        for name, parameter in one.named_parameters():
            truth = theirs[name].grad
            where = f"stage {stage}, {name}"
            assert (parameter.grad is None) == (truth is None), (
                f"{where}: {parameter.grad}, {truth}"
            )
            if truth is not None:
                torch.testing.assert_close(
                    parameter.grad,
                    truth,
                    rtol=tolerance,
                    atol=tolerance,
                    msg=lambda m, w=where: f"{w}: {m}",
                )
