"""The part of README.md that needs several processes, run in four."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import pipeloom
from tests.support.process_pool import ProcessPool

pytestmark = pytest.mark.multiprocess

README = Path(__file__).parents[2] / "README.md"


def train_as_the_page_says(code: str) -> tuple[float, float]:
    """Run the block with the names that a reader has; the first and the last loss."""
    import torch
    import torch.distributed as dist
    from torch import nn

    schedule = pipeloom.build_schedule("zbv", ranks=4, microbatches=8)
    modules: list[nn.Module] = []
    losses: list[float] = []

    def make_stage(index: int) -> nn.Module:
        torch.manual_seed(index)
        modules.append(nn.Linear(16, 16))
        return modules[-1]

    class Optimizer:
        """Made before there are parameters, as the page leaves it to the reader."""

        def zero_grad(self) -> None:
            for module in modules:
                module.zero_grad()

        def step(self) -> None:
            losses.append(float(namespace["result"].loss))
            with torch.no_grad():
                for parameter in (p for module in modules for p in module.parameters()):
                    parameter -= 0.5 * parameter.grad

    torch.manual_seed(100)
    batch, target = torch.randn(32, 16), torch.zeros(32, 16)
    namespace = {
        "pipeloom": pipeloom,
        "schedule": schedule,
        "rank": dist.get_rank(),
        "make_stage": make_stage,
        "loss_fn": nn.functional.mse_loss,
        "loader": [(batch, target)] * 5,
        "optimizer": Optimizer(),
    }
    exec(code, namespace)
    namespace["pipe"].close()
    return losses[0], losses[-1]


def test_under_torchrun(four_ranks: ProcessPool) -> None:
    text = README.read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    [code] = [block for block in blocks if "pipeloom.Pipeline(" in block]
    results = four_ranks.run(train_as_the_page_says, code)
    assert len(set(results)) == 1, "the loss is the same on every rank"
    first, last = results[0]
    assert last < first
