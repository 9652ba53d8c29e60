"""A U-Net of four stages on four ranks: outputs that skip stages.

    python examples/skip_connections.py

    0 encode ──► 1 encode ──► 2 decode ──► 3 decode
       │            └─ in the chain ─┘        ▲
       └──────────────────────────────────────┘ skip connection

The last stage is called with the output of the stage before it and, after that, with what was
skipped to it. Gradients of an output that several stages use are added up.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import pipeloom


def convolve(channels_in: int, channels_out: int) -> nn.Sequential:
    """Two convolutions."""
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(channels_out, channels_out, 3, padding=1),
        nn.ReLU(),
    )


class EncodeWide(nn.Module):
    """Stage 0: full size. Sends its features down, and across to stage 3."""

    def __init__(self) -> None:
        super().__init__()
        self.features = convolve(1, 8)

    def forward(self, image: Tensor) -> pipeloom.Routed:
        features = self.features(image)
        return pipeloom.Routed({1: nn.functional.max_pool2d(features, 2), 3: features})


class EncodeNarrow(nn.Module):
    """Stage 1: half size. What stage 2 gets is a tuple: two positional arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.features = convolve(8, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.features(x)
        return nn.functional.max_pool2d(features, 2), features


class DecodeNarrow(nn.Module):
    """Stage 2: back to half size."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom = convolve(16, 16)
        self.merge = convolve(32, 8)

    def forward(self, x: Tensor, features: Tensor) -> Tensor:
        up = nn.functional.interpolate(self.bottom(x), scale_factor=2)
        return self.merge(torch.cat([up, features], dim=1))


class DecodeWide(nn.Module):
    """Stage 3: back to full size, with what stage 0 saw."""

    def __init__(self) -> None:
        super().__init__()
        self.merge = convolve(16, 8)
        self.head = nn.Conv2d(8, 1, 1)

    def forward(self, x: Tensor, features: Tensor) -> Tensor:
        up = nn.functional.interpolate(x, scale_factor=2)
        return self.head(self.merge(torch.cat([up, features], dim=1)))


def main() -> tuple[float, float]:
    """Learn to blur; the first and the last loss."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # tensors this small are not worth more
    stages = [EncodeWide(), EncodeNarrow(), DecodeNarrow(), DecodeWide()]
    pipe = pipeloom.LocalPipeline(
        stages,
        "1f1b",
        microbatches=4,
        skip_connections=[(0, 3)],
        loss_fn=nn.functional.mse_loss,
    )
    parameters = [parameter for stage in stages for parameter in stage.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=3e-3)
    images = torch.rand(8, 1, 16, 16)
    blurred = nn.functional.avg_pool2d(images, 3, stride=1, padding=1)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        losses.append(float(pipe.step(images, target=blurred).loss))
        optimizer.step()
    print(f"loss {losses[0]:.4f} → {losses[-1]:.4f}")
    return losses[0], losses[-1]


if __name__ == "__main__":
    main()
