"""Two pipelines of two ranks side by side; each function runs on every one of four ranks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import pipeloom
from pipeloom import Pipeline
from tests.multiprocess.pipeline_work import legal_microbatches, place
from tests.support.models import ZOO, copy_stages, run_plainly, squared_error


class CollectiveCounter(TorchDispatchMode):
    """Counts the collectives that go out while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
        if function.namespace == "c10d":
            self.counts[function._schema.name] += 1
        return function(*args, **(kwargs or {}))


def wrap(module: nn.Module, kind: str, mesh: DeviceMesh) -> nn.Module:
    if kind == "fsdp":
        return fully_shard(module, mesh=mesh)
    if kind == "fsdp nested":
        fully_shard(module.first, mesh=mesh)  # type: ignore[arg-type]
        return fully_shard(module, mesh=mesh)
    return DistributedDataParallel(module, process_group=mesh.get_group())


def gradients_of(module: nn.Module) -> dict[str, Tensor | None]:
    inner = module.module if isinstance(module, DistributedDataParallel) else module
    return {
        name: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        for name, p in inner.named_parameters()
    }


def find_gathered(modules: dict[int, nn.Module], when: str) -> list[str]:
    return [
        f"stage {stage} is still gathered after {when}"
        for stage, module in modules.items()
        if isinstance(module, FSDPModule)
        and not all(isinstance(parameter, DTensor) for parameter in module.parameters())
    ]


def compare_with_plain(name: str, kind: str, steps: int) -> tuple[list[str], dict[str, int]]:
    """Several steps without zero_grad, evaluation between them; what differs from the unpipelined,
    unsharded model, and the collectives of the last step."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "stages"))
    rank, share = mesh["stages"].get_local_rank(), mesh["data"].get_local_rank()
    count = legal_microbatches(name, 2)
    schedule = pipeloom.build_schedule(name, ranks=2, microbatches=count)
    torch.manual_seed(3)
    parts = ZOO["blocks"].make_stages(schedule.num_stages)
    plain = copy_stages(parts)
    own = {
        stage: wrap(module, kind, mesh["data"])
        for stage, module in place(parts, schedule, rank).items()
    }
    pipe = Pipeline(own, name, microbatches=count, loss_fn=squared_error, group=mesh["stages"])
    problems: list[str] = []
    counter = CollectiveCounter()
    for step in range(steps):
        x, y = ZOO["blocks"].make_batch(4 * count)
        mine = slice(share * 2 * count, (share + 1) * 2 * count)
        pipe.eval(x[mine], target=y[mine])
        problems += find_gathered(own, "eval")
        if step == steps - 1:
            with counter:
                pipe.step(x[mine], target=y[mine])
        else:
            pipe.step(x[mine], target=y[mine])
        microbatches = list(zip(x.chunk(2 * count), y.chunk(2 * count), strict=True))
        run_plainly(plain, microbatches)
    problems += find_gathered(own, "the step")
    for stage, module in own.items():
        truth = {key: p.grad for key, p in plain[stage].named_parameters()}
        for key, gradient in gradients_of(module).items():
            expected = truth[key]
            assert expected is not None
            if gradient is None or not torch.allclose(gradient, expected, rtol=1e-10, atol=1e-10):
                problems.append(f"stage {stage}, {key}: {gradient} is not {expected}")
    pipe.close()
    return problems, dict(counter.counts)
