"""What a training loop adds to a step: loss per token, accumulation, mixed precision, evaluation.

    python examples/training_loop.py

    step  step   optimizer      two steps add up in .grad before the optimizer moves, once
    ├────┼────┤──┤              the loss is a sum over tokens, divided by the tokens of the step
    autocast: bfloat16          scaled inside the loss, so that the backward is scaled, too

Sequences are padded, so microbatches hold unequal numbers of tokens; a mean of their means would
count the tokens of short sequences more.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import pipeloom

VOCABULARY, WIDTH, LENGTH, PADDING = 17, 32, 12, -100


class Residual(nn.Module):
    """A block of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


def make_stages() -> list[nn.Module]:
    """Four stages: tokens in, logits out."""
    return [
        nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), Residual()),
        Residual(),
        Residual(),
        nn.Sequential(Residual(), nn.Linear(WIDTH, VOCABULARY)),
    ]


def make_batch(sequences: int) -> tuple[Tensor, Tensor]:
    """Counting upwards; what comes after the end of a sequence is padding."""
    start = torch.randint(VOCABULARY, (sequences, 1))
    tokens = (start + torch.arange(LENGTH + 1)) % VOCABULARY
    ends = torch.randint(3, LENGTH + 1, (sequences, 1))
    target = torch.where(torch.arange(LENGTH) < ends, tokens[:, 1:], PADDING)
    return tokens[:, :-1], target


def add_up_losses(logits: Tensor, target: Tensor) -> Tensor:
    """The sum over tokens."""
    return nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), target.flatten(), ignore_index=PADDING, reduction="sum"
    )


def count_tokens(target: Tensor) -> Tensor:
    """The weight of a microbatch."""
    return (target != PADDING).sum()


def main(updates: int = 30) -> tuple[float, float]:
    """Train; the loss per token of held-out sequences before and after."""
    torch.manual_seed(0)
    stages = make_stages()
    optimizer = torch.optim.Adam((p for stage in stages for p in stage.parameters()), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    pipe = pipeloom.LocalPipeline(
        stages,
        "1f1b",
        microbatches=4,
        loss_fn=lambda logits, target: scaler.scale(add_up_losses(logits, target)),
        loss_weight=count_tokens,
    )
    held_out = make_batch(10)

    def evaluate() -> float:
        result = pipe.eval(held_out[0], target=held_out[1], microbatches=3, return_output=False)
        assert result.loss is not None
        return float(result.loss) / scaler.get_scale()

    before = evaluate()
    for _ in range(updates):
        optimizer.zero_grad()
        for _ in range(2):
            tokens, target = make_batch(16)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                pipe.step(tokens, target=target)
        scaler.step(optimizer)
        scaler.update()
    after = evaluate()
    print(f"loss per token: {before:.2f} before, {after:.2f} after {updates} updates")
    return before, after


if __name__ == "__main__":
    main()
