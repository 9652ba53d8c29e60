"""Train a small model on four pipeline ranks in one process, and look at what was run.

    python examples/local_pipeline.py [schedule]        1f1b, zbv, interleaved_1f1b, dualpipev, …

No launcher and no process group: every rank runs in this process, one after the other, so a
breakpoint in a stage or in the loss stops where you expect it.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

import pipeloom

WIDTH = 32


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(self.norm(x))


def main(schedule: str = "zbv") -> float:
    """Train for 30 steps; the last loss."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # tensors this small are not worth more
    ranks, microbatches = 4, 8
    planned = pipeloom.build_schedule(schedule, ranks=ranks, microbatches=microbatches)
    print(planned)

    stages = [Block() for _ in range(planned.num_stages)]
    pipe = pipeloom.LocalPipeline(
        stages,
        schedule,
        ranks=ranks,
        microbatches=microbatches,
        loss_fn=nn.functional.mse_loss,
    )
    parameters = [parameter for stage in stages for parameter in stage.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=3e-3)

    batch = torch.randn(64, WIDTH)
    target = batch.roll(1, dims=-1)
    loss = float("inf")
    for step in range(30):
        optimizer.zero_grad()
        loss = float(pipe.step(batch, target=target).loss)
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step:2}  loss {loss:.4f}")
    print(f"at the end   {loss:.4f}")

    with pipe.record() as recording:
        pipe.step(batch, target=target)
    spans = [span for span in recording.timeline.spans if span.lane == "compute"]
    longest = max(spans, key=lambda span: span.duration)
    print(
        f"longest action: {longest.action} on rank {longest.rank}, {longest.duration * 1e3:.2f} ms"
    )

    outputs = pipe.eval(batch, microbatches=3).output
    print(f"evaluated with 3 microbatches: {tuple(outputs.shape)}")
    return loss


if __name__ == "__main__":
    main(*sys.argv[1:])
