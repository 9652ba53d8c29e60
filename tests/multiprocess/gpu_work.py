"""What the ranks do on a GPU; each function runs on every rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from pipeloom import LocalPipeline, Pipeline
from tests.support.models import ZOO, copy_stages, squared_error


def compare_on_gpu(backend: str, model: str) -> list[str]:
    """One step on the GPU, over the backend and in one process: what differs."""
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(backend=backend)
    torch.manual_seed(5)
    stages = [stage.to(device) for stage in ZOO[model].make_stages(ranks)]
    own = copy_stages(stages)[rank]
    x, y = (tensor.to(device) for tensor in ZOO[model].make_batch(8))
    options: dict[str, Any] = {"microbatches": 4, "loss_fn": squared_error}
    expected = LocalPipeline(stages, "1f1b", ranks=ranks, **options).step(x, target=y)
    pipe = Pipeline({rank: own}, "1f1b", group=group, **options)
    result = pipe.step(x, target=y)
    problems = [] if torch.equal(result.loss, expected.loss) else ["the loss differs"]
    theirs = dict(stages[rank].named_parameters())
    problems += [
        f"{name} differs"
        for name, parameter in own.named_parameters()
        if not torch.equal(parameter.grad, theirs[name].grad)
    ]
    pipe.close()
    return problems
