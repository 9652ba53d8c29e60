"""Train a small model on several processes, one pipeline rank each.

    torchrun --nproc-per-node 4 examples/torchrun_pipeline.py [schedule]

With CUDA, every process takes the device of its local rank and NCCL carries the tensors; otherwise
everything runs on the CPU with gloo.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn

import pipeloom

WIDTH = 32
MICROBATCHES = 8


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(self.norm(x))


def choose_device() -> torch.device:
    """This process's GPU if there is one for each, else the CPU."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if torch.cuda.device_count() > local_rank:
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    torch.set_num_threads(1)
    return torch.device("cpu")


def main(schedule: str = "zbv") -> None:
    """Train for 30 steps and print the loss, which every rank has, on rank 0."""
    device = choose_device()
    dist.init_process_group()
    rank = dist.get_rank()
    planned = pipeloom.build_schedule(
        schedule, ranks=dist.get_world_size(), microbatches=MICROBATCHES
    )
    stages: dict[int, nn.Module] = {}
    for stage in planned.placement.stages_on(rank):
        torch.manual_seed(stage)
        stages[stage] = Block().to(device)
    pipe = pipeloom.Pipeline(
        stages, schedule, microbatches=MICROBATCHES, loss_fn=nn.functional.mse_loss
    )
    parameters = [parameter for stage in stages.values() for parameter in stage.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=3e-3)

    # Inputs matter where the first stage is, targets where the last one is; the same everywhere is
    # the simplest way to have both.
    torch.manual_seed(0)
    batch = torch.randn(64, WIDTH, device=device)
    target = batch.roll(1, dims=-1)
    for step in range(30):
        optimizer.zero_grad()
        result = pipe.step(batch, target=target)
        optimizer.step()
        if rank == 0 and step % 10 == 0:
            print(f"step {step:2}  loss {float(result.loss):.4f}")
    if rank == 0:
        print(f"at the end   {float(result.loss):.4f}")

    with pipe.record() as recording:
        pipe.step(batch, target=target)
    if rank == 0:
        timeline = recording.timeline
        print(f"recorded {len(timeline.spans)} spans of {timeline.num_ranks} ranks on one clock")
    pipe.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
