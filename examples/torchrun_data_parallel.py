"""Two pipelines side by side: stages along one dimension of a mesh, shards along the other.

torchrun --nproc-per-node 4 examples/torchrun_data_parallel.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import pipeloom

WIDTH = 32
MICROBATCHES = 4


def make_stage(stage: int) -> nn.Module:
    """The same weights in every pipeline."""
    torch.manual_seed(stage)
    return nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))


def main() -> None:
    """Train for 20 steps; each pipeline works on its half of the batch."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh(
        "cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("data", "stages")
    )
    stage, share = mesh["stages"].get_local_rank(), mesh["data"].get_local_rank()
    module = fully_shard(make_stage(stage), mesh=mesh["data"])
    pipe = pipeloom.Pipeline(
        {stage: module},
        "1f1b",
        microbatches=MICROBATCHES,
        loss_fn=nn.functional.mse_loss,
        group=mesh["stages"],
    )
    if dist.get_rank() == 0:
        print(f"rank 0 runs: {' '.join(map(str, pipe.program.actions[0]))}")
    optimizer = torch.optim.Adam(module.parameters(), lr=3e-3)
    torch.manual_seed(10)
    batch, target = torch.randn(2, 32, WIDTH), torch.randn(2, 32, WIDTH)
    for step in range(20):
        optimizer.zero_grad()
        result = pipe.step(batch[share], target=target[share])
        optimizer.step()
        if stage == 0 and step % 10 == 0:
            print(f"step {step:2}  pipeline {share}  loss {float(result.loss):.4f}")
    pipe.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
