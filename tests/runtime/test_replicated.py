"""DDP stages in one process: a group of one, and a group whose other member has the same to say."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from pipeloom import LocalPipeline, StepFailed
from support.models import (
    ZOO,
    compare_gradients,
    copy_stages,
    make_batch,
    run_plainly,
    squared_error,
)


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def wrap(stages):
    return [DistributedDataParallel(stage) for stage in stages]


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "chimera", "dualpipe"])
def test_gradients_from_before_count_once(schedule):
    """Also where the average over replicas and the sum over copies meet in one stage."""
    parts = ZOO["blocks"].make_stages(2)
    directions = 2 if schedule in ("chimera", "dualpipe") else 1
    stages = [stage for _ in range(directions) for stage in copy_stages(parts)]
    pipe = LocalPipeline(wrap(stages), schedule, ranks=2, microbatches=4, loss_fn=squared_error)
    for _ in range(3):
        x, y = make_batch(8)
        pipe.step(x, target=y)
        run_plainly(parts, list(zip(x.chunk(4), y.chunk(4), strict=True)))
        for first in range(0, len(stages), 2):
            compare_gradients(stages[first : first + 2], parts)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("schedule", ["1f1b", "chimera"])
def test_gradients_from_before_survive_a_failure(schedule):
    stages = ZOO["blocks"].make_stages(4 if schedule == "chimera" else 2)
    pipe = LocalPipeline(wrap(stages), schedule, ranks=2, microbatches=4, loss_fn=squared_error)
    parameters = [parameter for stage in stages for parameter in stage.parameters()]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 7.0)
    before = [parameter.grad for parameter in parameters]

    def fail(event) -> None:
        raise RuntimeError("early")

    pipe.on("0F0", fail, when="before")
    x, y = make_batch(8)
    with pytest.raises(StepFailed):
        pipe.step(x, target=y)
    for parameter, grad in zip(parameters, before, strict=True):
        assert parameter.grad is grad
        assert torch.equal(grad, torch.full_like(grad, 7.0))


@pytest.mark.usefixtures("group")
def test_gradients_are_averaged_over_the_group(monkeypatch):
    """The other member of the group of two found the same: the mean is what each of them found."""
    stages = ZOO["blocks"].make_stages(2)
    plain = copy_stages(stages)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    reduced = []

    def all_reduce(tensor, group=None) -> None:
        reduced.append(tensor.numel())
        tensor.mul_(2)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    pipe = LocalPipeline(wrap(stages), "1f1b", microbatches=4, loss_fn=squared_error)
    x, y = make_batch(8)
    pipe.step(x, target=y)
    run_plainly(plain, list(zip(x.chunk(4), y.chunk(4), strict=True)))
    compare_gradients(stages, plain)
    # Once per step and stage: the gradients in one bucket, and who found any in another.
    assert len(reduced) == 4
