"""What the demo trains: a small GPT over characters, cut into stages, and text to train it on.

::

    text "The `for` st…" ─► tokens ─► stage 0: embedding, blocks ─► … ─► last: blocks, norm, head
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor, nn

from pipeloom.errors import PipeloomError

__all__ = ["CharacterStage", "ModelShape", "Text", "find_loss", "load_text", "make_parts"]


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """How large the model is."""

    width: int = 64
    heads: int = 4
    context: int = 64
    #: In the whole model; every stage gets at least one.
    blocks: int = 8
    vocabulary: int = 128


class Block(nn.Module):
    """Attention and a perceptron, each added to what it was given."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.attention_norm, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        cut = self.query_key_value(self.attention_norm(x)).view(rows, length, 3, self.heads, -1)
        query, key, value = cut.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.narrow(nn.functional.gelu(self.widen(self.norm(x))))


class CharacterStage(nn.Module):
    """Some blocks of the model; the first stage has the embedding, the last one the head."""

    def __init__(
        self, shape: ModelShape, num_blocks: int, *, is_first: bool, is_last: bool
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width) if is_first else None
        self.position = (
            nn.Parameter(0.02 * torch.randn(shape.context, shape.width)) if is_first else None
        )
        self.blocks = nn.Sequential(*(Block(shape) for _ in range(num_blocks)))
        self.head = (
            nn.Sequential(nn.LayerNorm(shape.width), nn.Linear(shape.width, shape.vocabulary))
            if is_last
            else None
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            assert self.position is not None
            x = self.embedding(x) + self.position[: x.shape[1]]
        x = self.blocks(x)
        return x if self.head is None else self.head(x)


def make_parts(shape: ModelShape, num_parts: int, *, seed: int = 0) -> list[CharacterStage]:
    """The model in ``num_parts`` parts, with the same weights in every process.

    Put one after the other, the parts are the unpipelined model.
    """
    blocks = max(shape.blocks, num_parts)
    ends = [part * blocks // num_parts for part in range(num_parts + 1)]
    shares = [end - start for start, end in pairwise(ends)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return [
            CharacterStage(shape, share, is_first=part == 0, is_last=part == num_parts - 1)
            for part, share in enumerate(shares)
        ]


def find_loss(scores: Tensor, target: Tensor) -> Tensor:
    """Cross entropy per character."""
    return nn.functional.cross_entropy(scores.flatten(0, -2), target.flatten())


@dataclass(frozen=True)
class Text:
    """Characters as numbers."""

    tokens: Tensor
    vocabulary: int

    def batch(self, step: int, *, rows: int, context: int) -> tuple[Tensor, Tensor]:
        """Windows of the text and, as targets, the character after each of theirs; the same for
        the same step in every process."""
        generator = torch.Generator().manual_seed(step)
        starts = torch.randint(len(self.tokens) - context, (rows, 1), generator=generator)
        windows = self.tokens[starts + torch.arange(context + 1)]
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


@cache
def load_text() -> Text:
    """The help texts that come with Python: 460,000 characters, nothing to download."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise PipeloomError(
            "the demo reads the help texts of Python (pydoc_data.topics), which this Python lacks; "
            "install the whole standard library"
        ) from error
    text = "\n".join(topics[name] for name in sorted(topics))
    alphabet = {character: number for number, character in enumerate(sorted(set(text)))}
    tokens = torch.tensor([alphabet[character] for character in text])
    return Text(tokens, len(alphabet))
