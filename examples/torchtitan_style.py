"""Pipeline × FSDP2 as torchtitan drives it, with torch's package or with pipeloom's.

    torchrun --nproc-per-node 4 examples/torchtitan_style.py
    PIPELINING=torch torchrun --nproc-per-node 4 examples/torchtitan_style.py

A small llama-like model, built without memory, cut into stages, sharded over two data-parallel
ranks, then given its weights; the stages' modules are assigned after that, as torchtitan does.
"""

from __future__ import annotations

import os
import zlib
from copy import deepcopy
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

PACKAGES = {"torch": "torch.distributed.pipelining", "pipeloom": "pipeloom.torch_api"}
VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH = 64, 32, 4, 6, 16


class Attention(nn.Module):
    """Causal attention with one projection for queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        parts = self.project(x).view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*parts.unbind(), is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(rows, length, WIDTH))


class FeedForward(nn.Module):
    """The gated layers between attentions."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One layer of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.feed_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention, self.feed = Attention(), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed(self.feed_norm(x))


class Llama(nn.Module):
    """Embedding, blocks, norm and head; a stage lacks some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding: nn.Module | None = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({str(number): Block() for number in range(LAYERS)})
        self.norm: nn.Module | None = nn.RMSNorm(WIDTH)
        self.head: nn.Module | None = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x) if self.embedding else x
        for layer in self.layers.values():
            x = layer(x)
        x = self.norm(x) if self.norm else x
        return self.head(x) if self.head else x


def cut(whole: Llama, stage: int, num_stages: int) -> Llama:
    """What a stage keeps of the model."""
    part = deepcopy(whole)
    kept = {int(name) for name in torch.arange(LAYERS).tensor_split(num_stages)[stage]}
    for number in set(range(LAYERS)) - kept:
        del part.layers[str(number)]
    if stage > 0:
        part.embedding = None
    if stage < num_stages - 1:
        part.norm = part.head = None
    return part


def parallelise(part: Llama, mesh: Any) -> Llama:
    """Shard every layer, and what is left, over the data-parallel ranks."""
    for layer in part.layers.values():
        fully_shard(layer, mesh=mesh)
    return fully_shard(part, mesh=mesh)


@torch.no_grad()
def fill(part: Llama) -> None:
    """Weights that depend on their names alone: the same however the model is cut and sharded."""
    part.to_empty(device="cpu")
    for name, parameter in part.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        values = torch.randn(parameter.shape, generator=generator) * 0.2
        if "norm" in name:
            values = torch.ones(parameter.shape)
        if isinstance(parameter, DTensor):
            values = distribute_tensor(values, parameter.device_mesh, parameter.placements)
        parameter.copy_(values)


def sum_of_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Over the tokens; the division by their number comes once, for the whole batch."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def train(package: str, schedule_name: str = "Interleaved1F1B", steps: int = 3) -> list[float]:
    """The losses of a few steps and of an evaluation; known on the last stage's ranks."""
    get_schedule_class = import_module(f"{package}.schedules").get_schedule_class
    stage_class = import_module(f"{package}.stage").PipelineStage
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    pipeline, data = mesh["pp"], mesh["dp"]
    rank, ranks = pipeline.get_local_rank(), pipeline.size()

    with torch.device("meta"):
        whole = Llama()
    v_shaped = schedule_name in ("ZBVZeroBubble", "DualPipeV")
    indices = [rank, 2 * ranks - 1 - rank] if v_shaped else [rank, rank + ranks]
    parts = [cut(whole, index, 2 * ranks) for index in indices]
    stages = [
        stage_class(part, index, 2 * ranks, torch.device("cpu"), group=pipeline.get_group())
        for index, part in zip(indices, parts, strict=True)
    ]
    for number, stage in enumerate(stages):
        parts[number] = parallelise(parts[number], data)
        stage.submod = parts[number]
        fill(parts[number])

    microbatches, rows = 4, 8
    tokens = 2 * rows * LENGTH

    def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
        # FSDP averages over data-parallel ranks, so each counts its share of all tokens twice.
        return sum_of_losses(logits, labels) * data.size() / tokens

    schedule = get_schedule_class(schedule_name)(
        stages, microbatches, loss_fn=loss_fn, scale_grads=False
    )
    optimizer = torch.optim.AdamW([p for part in parts for p in part.parameters()], lr=1e-2)
    is_first = any(stage.is_first for stage in stages)
    is_last = any(stage.is_last for stage in stages)
    generator = torch.Generator().manual_seed(data.get_local_rank())
    batch = torch.randint(VOCABULARY, (rows, LENGTH + 1), generator=generator)
    inputs, labels = batch[:, :-1], batch[:, 1:]
    found: list[float] = []
    for step in range(steps + 1):
        losses: list[Tensor] = []
        arguments = (inputs,) if is_first else ()
        target = labels if is_last else None
        if step < steps:
            optimizer.zero_grad()
            schedule.step(*arguments, target=target, losses=losses, return_outputs=False)
            nn.utils.clip_grad_norm_([p for part in parts for p in part.parameters()], 1e9)
            optimizer.step()
        else:
            schedule.eval(*arguments, target=target, losses=losses)
        if is_last:
            found.append(torch.sum(torch.stack(losses)).item() / data.size())
    return found


def main() -> None:
    """Train with the package that the environment names."""
    dist.init_process_group("gloo")
    package = PACKAGES[os.environ.get("PIPELINING", "pipeloom")]
    losses = train(package)
    if losses and dist.get_rank() == dist.get_world_size() - 1:
        *trained, evaluated = (f"{loss:.4f}" for loss in losses)
        print(f"{package}: losses {', '.join(trained)}; evaluation {evaluated}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
