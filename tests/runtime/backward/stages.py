"""Stages of every kind that a split backward has to get right: the modules."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

BATCH, LENGTH, WIDTH = 2, 6, 16


class Attention(nn.Module):
    """Causal attention with rotary embeddings."""

    def __init__(self, width: int = WIDTH, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        half = width // heads // 2
        angles = torch.outer(torch.arange(64.0), 10000 ** (-torch.arange(half) / half))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def rotate(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
        return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, t, d))


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Experts(nn.Module):
    """A mixture of experts: top-1 routing by mask, weights of all experts in one tensor."""

    def __init__(self, width: int = WIDTH, num_experts: int = 3) -> None:
        super().__init__()
        self.router = nn.Linear(width, num_experts)
        self.up = nn.Parameter(torch.randn(num_experts, width, 2 * width) / math.sqrt(width))
        self.down = nn.Parameter(torch.randn(num_experts, 2 * width, width) / math.sqrt(width))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.router(x).softmax(-1)
        rows = x.flatten(0, 1)
        everyone = rows.expand(self.up.shape[0], *rows.shape)
        y = torch.bmm(torch.relu(torch.bmm(everyone, self.up)), self.down)
        return torch.einsum("etd,te->td", y, weight.flatten(0, 1)).view_as(x)


class RoutedExperts(nn.Module):
    """A mixture of experts whose experts are modules: some get no rows."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        choice = (x.detach().sum(-1) > 0).long()  # expert 2 is never chosen
        y = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            mask = choice == index
            if mask.any():
                y = y.masked_scatter(mask.unsqueeze(-1), expert(x[mask]))
        return y


class ConvolutionNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 6, 3, stride=2, groups=2, bias=False)
        self.back = nn.ConvTranspose2d(6, 3, 3, stride=2, output_padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.back(F.relu(self.second(self.norm(self.first(x)))))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], head: bool = False) -> None:
        super().__init__()
        self.cells = kind(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, WIDTH) if head else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cells(x)[0])


class Tied(nn.Module):
    """A first and last stage in one: the embedding is the output layer too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH, padding_idx=3)
        self.block = Block()

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.block(self.embedding(tokens)), self.embedding.weight)


class Reused(nn.Module):
    """One layer three times, its bias once more on its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layer(x))
        x = torch.tanh(self.layer(x)) + self.layer.bias
        return self.layer(x) * self.layer.weight.diagonal()


class LowRank(nn.Module):
    """LoRA: a frozen layer and two small trainable factors."""

    def __init__(self, merged: bool) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(4, WIDTH) / 4)
        self.up = nn.Parameter(torch.randn(WIDTH, 4) / 4)
        self.merged = merged
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.merged:  # the product reaches the output through parameters alone
            y = F.linear(x, self.base.weight + 0.5 * self.up @ self.down, self.base.bias)
        else:
            y = self.base(x) + x @ self.down.t() @ self.up.t()
        return self.head(F.silu(y))


class TwoResults(torch.autograd.Function):
    """A custom Function with two outputs and a weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        return x @ weight, x * 2

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        gradient = x.flatten(0, -2).mT @ first.flatten(0, -2)
        return first @ weight.mT + 2 * second, gradient


class CustomFunction(nn.Module):
    def __init__(self, head: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.head = nn.Linear(WIDTH, WIDTH) if head else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        a, b = TwoResults.apply(x, self.weight)
        return self.head(a) + b


class Doubling(torch.autograd.Function):
    """A Function written in Python, whose node lives only as long as the graph above it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


class FunctionsAround(nn.Module):
    """Custom Functions at the end, and between a weight and its use."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return Doubling.apply(torch.tanh(self.layer(x)) @ Doubling.apply(self.weight))


class ChunkedOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.layer(x).chunk(3, dim=-1)


class ViewOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.layer(x)
        return y.transpose(0, 1)[1:], y.view(-1)


class Checkpointed(nn.Module):
    """Two checkpointed blocks between two plain layers; counts how often a block ran."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.last = nn.Linear(WIDTH, WIDTH)
        self.reentrant = reentrant
        self.num_runs = 0

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        self.num_runs += 1
        return block(x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(self.run, block, x, use_reentrant=self.reentrant)
        return self.last(x)


class ComplexMixing(nn.Module):
    """Mixing in the frequency domain with a complex weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex128) / 4)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.fft(self.layer(x), dim=1) @ self.weight
        return torch.fft.ifft(spectrum, dim=1).real


class DictOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"hidden": self.left(x), "extra": {"logits": self.right(x), "name": "a"}, "n": None}


class NoParameters(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x) * 2


class OnlyNorms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.norm(x))


class FirstStage(nn.Module):
    """Tokens in: no input needs a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(11, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.block = Block()

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1])
        return self.block(self.tokens(tokens) + self.positions(places))


class FirstStageFloats(nn.Module):
    """Features in, without a gradient: normalised, shifted by a parameter, then two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.shift = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(self.norm(x) + self.shift)))


class ParameterOutputs(nn.Module):
    """An output that is made of parameters alone, and one that is a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.table = nn.Parameter(torch.randn(4, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.layer(x), F.linear(self.table, self.layer.weight).exp(), self.table


class WeightNormed(nn.Module):
    """Weights that are functions of parameters, with a penalty on one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.second = nn.utils.parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH))
        self.third = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.third(torch.tanh(self.second(self.first(x))))
        return y + self.third.weight.pow(2).sum() + self.third.bias.sum()


class SharedSubgraph(nn.Module):
    """A weight computed once, used twice in different ways; a transposed view used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.b = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.tanh(self.a) @ self.b
        turned = self.b.t()
        y = torch.tanh(x @ weight) @ turned
        return (y @ weight.t()) @ turned + weight.sum() * turned[0]


class AddedMatrix(nn.Module):
    """addmm and baddbmm with scales; the weight on either side; a matrix as the added term."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Parameter(torch.randn(BATCH * LENGTH, BATCH * LENGTH) / 4)
        self.right = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.added = nn.Parameter(torch.randn(WIDTH))
        self.batched = nn.Parameter(torch.randn(BATCH, WIDTH, WIDTH) / 4)
        self.offset = nn.Parameter(torch.randn(1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.addmm(self.added, x.flatten(0, 1), self.right, beta=0.5, alpha=2)
        rows = torch.addmm(self.offset, self.left, rows, beta=2, alpha=0.5)
        y = torch.baddbmm(x, rows.view_as(x), self.batched, beta=0.3, alpha=1.5)
        return torch.bmm(self.batched.mT, y.mT).mT


class BilinearStage(nn.Module):
    """A product without a recipe."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Bilinear(WIDTH, WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mix(torch.tanh(x), x))


class FrozenMiddle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.biased = nn.Linear(WIDTH, WIDTH)
        self.biased.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.biased(torch.tanh(self.frozen(torch.tanh(self.first(x)))))


class UnusedBranch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.used(x), self.unused(x).detach(), x


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y[:, 0] *= 2
        y = y.relu_()
        return self.second(y).add_(1)
