"""Skip connections: a U-Net of four stages, several consumers, routed outputs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pipeloom
from pipeloom import LocalPipeline, Routed, StepFailed
from support.models import WIDTH, Block, compare_gradients, copy_stages, make_batch, squared_error

CHAINS = [entry.name for entry in pipeloom.list_schedules() if entry.name != "forward_only"]


class Decoder(Block):
    """Takes what comes up and what was skipped; returns both kinds of output."""

    def __init__(self) -> None:
        super().__init__()
        self.merge = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, up, skipped):
        return super().forward(self.merge(torch.cat([up, skipped], dim=-1)))


def make_unet(num_stages: int = 4) -> list[nn.Module]:
    """The middle stages of longer chains have no skips."""
    stages: list[nn.Module] = [Block() for _ in range(num_stages)]
    stages[2], stages[3] = Bottom(), Decoder()
    return [stage.double() for stage in stages]


class Bottom(Block):
    """Stage 2: its chain predecessor and its skip connection are the same stage's output twice."""

    def forward(self, x, *again):
        return super().forward(x + sum(again))


def run_unet(stages, x):
    zero = stages[0](x)
    one = stages[1](zero)
    value = stages[2](one)
    value = stages[3](value, zero)
    for stage in stages[4:]:
        value = stage(value)
    return value


@pytest.mark.parametrize("schedule", CHAINS)
def test_the_unet_under_every_schedule(schedule):
    entry = next(e for e in pipeloom.list_schedules() if e.name == schedule)
    ranks = 4 // entry.default_chunks
    microbatches = 8
    parts = make_unet()
    plain = copy_stages(parts)
    shape = pipeloom.build_schedule(schedule, ranks=ranks, microbatches=microbatches)
    stages = [stage for _ in shape.topology.chains for stage in copy_stages(parts)]
    pipe = LocalPipeline(
        stages,
        schedule,
        ranks=ranks,
        microbatches=microbatches,
        loss_fn=squared_error,
        skip_connections=[(0, 3)],
    )
    x, y = make_batch(16)
    result = pipe.step(x, target=y, return_output=True)
    for xm, ym in zip(x.chunk(8), y.chunk(8), strict=True):
        (squared_error(run_unet(plain, xm), ym) / 8).backward()
    for first in range(0, len(stages), 4):
        compare_gradients(stages[first : first + 4], plain)
    torch.testing.assert_close(result.output, run_unet(plain, x))
    torch.testing.assert_close(pipe.eval(x).output, run_unet(plain, x))


class Splitting(Block):
    """Sends different values to its two successors, and one more value to both."""

    def forward(self, x):
        hidden = super().forward(x)
        shared = hidden.tanh()
        return Routed({1: (hidden, shared), 3: {"skip": hidden * 2, "shared": shared}})


class Plain(Block):
    def forward(self, x, shared):
        return super().forward(x + shared)


class Joining(Block):
    def forward(self, x, skipped):
        return super().forward(x + skipped["skip"] * skipped["shared"])


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_routed_outputs(schedule):
    stages = [Splitting().double(), Plain().double(), Block().double(), Joining().double()]
    plain = copy_stages(stages)
    pipe = LocalPipeline(
        stages, schedule, microbatches=4, loss_fn=squared_error, skip_connections=[(0, 3)]
    )
    x, y = make_batch(8)
    pipe.step(x, target=y)
    for xm, ym in zip(x.chunk(4), y.chunk(4), strict=True):
        routed = plain[0](xm)
        value = plain[3](plain[2](plain[1](*routed[1])), routed[3])
        (squared_error(value, ym) / 4).backward()
    compare_gradients(stages, plain)


def test_a_route_to_nobody_is_an_error():
    stages = [Splitting().double(), Plain().double()]
    pipe = LocalPipeline(stages, "1f1b", microbatches=2, loss_fn=squared_error)
    x, y = make_batch(4)
    with pytest.raises(StepFailed, match=r"successors are \[1\]"):
        pipe.step(x, target=y)


def test_skip_connections_must_lead_forward():
    with pytest.raises(ValueError, match="3→0"):
        LocalPipeline(make_unet(), "1f1b", microbatches=4, skip_connections=[(3, 0)])
    with pytest.raises(ValueError, match=r"\(0, 9\)"):
        LocalPipeline(make_unet(), "1f1b", microbatches=4, skip_connections=[(0, 9)])
