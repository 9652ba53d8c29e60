"""Errors, forms, data parallelism, DTensors; each function runs on every rank."""

from __future__ import annotations

import gc
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from pipeloom.torch_api import _utils, schedules
from pipeloom.torch_api.microbatch import TensorChunkSpec, _Replicate
from pipeloom.torch_api.stage import PipelineStage
from tests.multiprocess.torch_api import programs as work

CPU = torch.device("cpu")


def raised(function: Any) -> tuple[str, bool, str]:
    """The class, whether torch's class catches it, and the message."""
    try:
        function()
    except Exception as error:
        return type(error).__name__, isinstance(error, _utils.PipeliningMetadataError), str(error)
    return "nothing", False, ""


def fail_with_declared_form(what: str) -> tuple[str, bool, str]:
    """A hook, added after construction, changes what the first stage declared."""
    x, y, _ = work.make_batch(8)
    example = torch.empty(2, work.WIDTH, dtype=torch.float64, device="meta")
    schedule, stages, _ = work.build(
        work.OURS, "1F1B", 4, stage_options={"input_args": example, "output_args": example}
    )
    if stages[0].is_first:
        stages[0].submod.register_forward_hook(changing(what))
    return raised(lambda: schedule.step(x, target=y))


def changing(what: str) -> Any:
    def hook(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        return output.float() if what == "dtype" else output.flatten()

    return hook


def fail_with_shown_form(what: str) -> tuple[str, bool, str]:
    """The same, with forms that the first step showed."""
    x, y, _ = work.make_batch(8)
    schedule, stages, _ = work.build(work.OURS, "1F1B", 4)
    schedule.step(x, target=y)
    if stages[0].is_first:
        stages[0].submod.register_forward_hook(changing(what))
    return raised(lambda: schedule.step(x, target=y))


def fail_in_forward(name: str) -> tuple[str, bool, str]:
    x, y, _ = work.make_batch(16)
    schedule, stages, _ = work.build(work.OURS, name, 8)
    if stages[0].is_first:
        stages[0].submod.register_forward_hook(explode)
    return raised(lambda: schedule.step(x, target=y))


def explode(*_: Any) -> None:
    raise ArithmeticError("the stage broke")


def forget_target() -> tuple[str, bool, str]:
    x, _, _ = work.make_batch(8)
    schedule, _, _ = work.build(work.OURS, "1F1B", 4)
    return raised(lambda: schedule.step(x))


def misuse() -> list[str]:
    """What is refused before anything runs; afterwards the schedule still works."""
    x, y, _ = work.make_batch(8)
    schedule, stages, _ = work.build(work.OURS, "1F1B", 4)
    problems = []

    def expect(error: str, part: str, function: Any) -> None:
        kind, _, message = raised(function)
        if kind != error or part not in message:
            problems.append(f"{kind}: {message} instead of {error}: {part}")

    with torch.no_grad():
        expect("RuntimeError", "eval()", lambda: schedule.step(x, target=y))
    expect("ValueError", "Expecting 4 arg_mbs", lambda: schedule.step(arg_mbs=[(x,)]))
    expect("TypeError", "must be a list", lambda: schedule.step(arg_mbs=((x,),) * 4))
    expect("ValueError", "exclude", lambda: schedule.step(x, target_mbs=[y] * 4))
    expect("TypeError", "losses", lambda: schedule.step(x, target=y, losses=()))
    stages[0].has_backward = True
    expect("AssertionError", "smaller", lambda: schedule.step(x[:8], target=y[:2]))
    expect(
        "AssertionError",
        "backward_one_chunk",
        lambda: stages[0].backward_weight_one_chunk(bwd_chunk_id=0),
    )
    schedule.step(x, target=y)
    return problems


def wrong_stages() -> tuple[str, bool, str]:
    """Two ranks that hold each other's stages."""
    rank = dist.get_rank()
    modules = work.make_model(2)
    stage = PipelineStage(modules[1 - rank], 1 - rank, 2, CPU)
    schedule = schedules.Schedule1F1B(stage, 2, loss_fn=work.mean_loss)
    x, y, _ = work.make_batch(4)
    return raised(lambda: schedule.step(x, target=y))


# ── things that work ─────────────────────────────────────────────────────────────────────────────


def chunk_specs() -> list[str]:
    """Cut along dimension 1, a replicated keyword, merged along dimension 1."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 3, dtype=torch.float64))

        def forward(self, x: Tensor, *, shift: Tensor) -> Tensor:
            return torch.tanh(self.weight @ x) + shift

    torch.manual_seed(0)
    modules = [Wide() for _ in range(2)]
    x, y = (torch.randn(3, 8, dtype=torch.float64) for _ in range(2))
    shift = torch.randn(3, 1, dtype=torch.float64)
    rank = dist.get_rank()
    stage = PipelineStage(modules[rank], rank, 2, CPU)
    schedule = schedules.ScheduleGPipe(
        stage,
        4,
        loss_fn=lambda output, target, weight: weight * work.mean_loss(output, target),
        args_chunk_spec=TensorChunkSpec.from_tuple((1,)),
        kwargs_chunk_spec={"shift": _Replicate()},
        output_merge_spec=TensorChunkSpec(1),
    )
    targets = list(y.chunk(4, 1))
    losses: list[Tensor] = []
    output = schedule.step(
        arg_mbs=[(part,) for part in x.chunk(4, 1)],
        kwarg_mbs=[{"shift": shift}] * 4,
        target_mbs=targets,
        losses=losses,
        loss_kwargs={"weight": 3.0},
    )
    expected = x
    for module in modules:
        expected = module(expected, shift=shift)
    evaluated = schedule.eval(x, shift=shift)
    problems = []
    if rank == 1:
        problems += work.differences({"output": output}, {"output": expected.detach()})
        problems += work.differences({"eval": evaluated}, {"eval": expected.detach()})
        true = 3.0 * work.mean_loss(expected, y)
        problems += work.differences({"loss": torch.stack(losses).mean()}, {"loss": true.detach()})
    return problems


def reassigned_modules() -> list[str]:
    """``submod`` and ``_loss_fn`` reassigned after construction, and again between steps."""
    problems = []
    x, y, _ = work.make_batch(8)
    schedule, stages, _ = work.build(work.OURS, "ZBVZeroBubble", 4, loss_fn=work.summed_loss)
    schedule._loss_fn = work.mean_loss
    for seed in (11, 12):
        modules, truth = work.make_model(4, seed), work.make_model(4, seed)
        for stage in stages:
            stage.submod = modules[stage.stage_index]
        schedule.step(x, target=y)
        work.run_plainly(truth, [(a, b, {}) for a, b in zip(x.chunk(4), y.chunk(4), strict=True)])
        own = [stage.stage_index for stage in stages]
        problems += work.differences(
            work.gradients(stages),
            {f"{i}.{k}": p.grad for i in own for k, p in truth[i].named_parameters()},
        )
    return problems


def forward_only() -> list[str]:
    x, _, _ = work.make_batch(8)
    rank = dist.get_rank()
    modules = work.make_model(2)
    stage = PipelineStage(modules[rank], rank, 2, CPU)
    problems = []
    for kind in (schedules._ScheduleForwardOnly, schedules.ScheduleGPipe):
        output = kind(stage, 4).step(x)
        if rank == 1:
            expected = modules[1](modules[0](x)).detach()
            problems += work.differences({"output": output}, {"output": expected})
    return problems


def outputs_are_dropped() -> tuple[int, int]:
    """Bytes of outputs alive after a step that does not want them, and after one that does."""
    x, y, _ = work.make_batch(8)
    schedule, stages, _ = work.build(work.OURS, "1F1B", 4)
    schedule.step(x, target=y, return_outputs=False)
    gc.collect()
    without = len(stages[0].output_chunks)
    schedule.step(x, target=y)
    return without, len(stages[0].output_chunks)


def profile(name: str) -> set[str]:
    """The names that a profiler shows."""
    x, y, _ = work.make_batch(16)
    schedule, _, _ = work.build(work.OURS, name, 8)
    with torch.profiler.profile() as profiler:
        schedule.step(x, target=y)
    return {event.name for event in profiler.events() if event.name.startswith("PP:")}


# ── data parallelism and DTensors, on four ranks ─────────────────────────────────────────────────


def register_sharding_by_hand(schedule: Any) -> None:
    """UNSHARD, RESHARD and REDUCE_GRAD as a user writes them."""

    def find(action: Any, ctx: Any) -> Any:
        return next(s for s in ctx.schedule_ref._stages if s.stage_index == action.stage_index)

    def unshard(action: Any, ctx: Any) -> None:
        for part in find(action, ctx).submod.modules():
            if isinstance(part, FSDPModule):
                handle = part.unshard(async_op=True)
                ctx.schedule_ref.unshard_ops[action.stage_index].append(handle)

    def reshard(action: Any, ctx: Any) -> None:
        ctx.schedule_ref._assert_unsharded(find(action, ctx))
        for part in find(action, ctx).submod.modules():
            if isinstance(part, FSDPModule):
                part.reshard()

    def reduce(action: Any, ctx: Any) -> None:
        find(action, ctx).perform_reduce_grad(ctx.schedule_ref._n_microbatches)

    schedule.register_custom_function(schedules.UNSHARD, unshard)
    schedule.register_custom_function(schedules.RESHARD, reshard)
    schedule.register_custom_function(schedules.REDUCE_GRAD, reduce)


def train_data_parallel(name: str, how: str, by_hand: bool = False) -> list[str]:
    """Pipeline × data parallel: gradients equal those of both halves of the batch together."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    group, replica = mesh["pp"].get_group(), mesh["dp"].get_local_rank()
    rank = mesh["pp"].get_local_rank()
    chunks = 1 if name in work.SINGLE else 2
    modules, truth = work.make_model(2 * chunks), work.make_model(2 * chunks)
    own = work.stages_of(name, rank, 2, chunks)
    stages = [PipelineStage(modules[i], i, 2 * chunks, CPU, group=group) for i in own]
    for stage in stages:
        if how == "fsdp":
            fully_shard(stage.submod.first, mesh=mesh["dp"])
            fully_shard(stage.submod, mesh=mesh["dp"])
        else:
            stage.submod = nn.parallel.DistributedDataParallel(
                stage.submod, process_group=mesh["dp"].get_group()
            )
    given = stages[0] if name in work.SINGLE else stages
    schedule = schedules.get_schedule_class(name)(given, 4, loss_fn=work.mean_loss)  # type: ignore[arg-type]
    if by_hand:
        register_sharding_by_hand(schedule)
    halves = [work.make_batch(8, seed=s) for s in (1, 2)]
    problems = []
    for step in range(2):
        x, y, _ = halves[replica]
        schedule.step(x, target=y)
        schedule.eval(x, target=y)
        for a, b, _ in halves:
            work.run_plainly(
                truth, [(p, q, {}) for p, q in zip(a.chunk(4), b.chunk(4), strict=True)]
            )
        mine, theirs = {}, {}
        for i in own:
            expected = dict(truth[i].named_parameters())
            for key, p in modules[i].named_parameters():
                grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
                mine[f"{step} {i}.{key}"] = grad
                theirs[f"{step} {i}.{key}"] = expected[key].grad / 2
        problems += work.differences(mine, theirs)
    return problems


class Sharded(nn.Module):
    """Takes a DTensor or makes one, and returns one."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))
        self.mesh = mesh

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(x, DTensor):
            x = distribute_tensor(x, self.mesh, [Shard(1)], src_data_rank=None)
        assert x.placements == (Shard(1),)
        weight = DTensor.from_local(self.weight, self.mesh, run_check=False)
        return torch.tanh(x) * weight.sum(0)


def dtensor_boundary(with_callback: bool) -> Any:
    """Stages that exchange DTensors; on the last one they are made plain for the loss."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    rank, tp = mesh["pp"].get_local_rank(), mesh["tp"]
    torch.manual_seed(2)
    modules = [Sharded(tp), Sharded(tp)]
    asked = []

    def get_mesh(names: tuple[str, ...], layout: Any) -> Any:
        asked.append(names)
        return tp

    stage = PipelineStage(
        modules[rank],
        rank,
        2,
        CPU,
        group=mesh["pp"].get_group(),
        get_mesh=get_mesh if with_callback else None,
    )

    def loss_fn(output: Any, target: Tensor) -> Tensor:
        return ((output.full_tensor() - target) ** 2).mean()

    schedule = schedules.ScheduleGPipe(stage, 2, loss_fn=loss_fn)
    x, y, _ = work.make_batch(4)
    if not with_callback:
        return raised(lambda: schedule.step(x, target=y))
    output = schedule.step(x, target=y)
    weights = [module.weight.detach().clone().requires_grad_() for module in modules]
    value = x
    for weight in weights:
        value = torch.tanh(value) * weight.sum(0)
    ((value - y) ** 2).mean().backward()
    grad = modules[rank].weight.grad
    assert grad is not None
    problems = work.differences({"grad": grad}, {"grad": weights[rank].grad}, tolerance=1e-10)
    if rank == 1:
        assert asked == [("tp",)]
        problems += work.differences({"y": output.full_tensor()}, {"y": value.detach()})
    return problems


def two_schedules_of_one_stage() -> list[str]:
    """A second schedule on the same stages, in turns with the first, as some programs evaluate."""
    x, y, _ = work.make_batch(8)
    schedule, stages, _ = work.build(work.OURS, "1F1B", 4)
    other = schedules.ScheduleGPipe(stages[0], 2, loss_fn=work.mean_loss)
    truth = work.make_model(2)
    for _ in range(2):
        schedule.step(x, target=y)
        other.step(x, target=y)
        other.eval(x, target=y)
        for parts in (4, 2):
            pairs = zip(x.chunk(parts), y.chunk(parts), strict=True)
            work.run_plainly(truth, [(a, b, {}) for a, b in pairs])
    expected = {f"{stages[0].stage_index}.{k}": p.grad
                for k, p in truth[stages[0].stage_index].named_parameters()}  # fmt: skip
    return work.differences(work.gradients(stages), expected)


def arguments_that_want_gradients() -> list[str]:
    """The batch, and a keyword of every stage."""
    x, y, scale = work.make_batch(8)
    x, scale = x.requires_grad_(), scale.requires_grad_()
    schedule, stages, _ = work.build(work.OURS, "1F1B", 4)
    schedule.step(x, target=y, scale=scale)
    truth = work.make_model(2)
    a, b = x.detach().requires_grad_(), scale.detach()
    own = [b.clone().requires_grad_() for _ in truth]
    value = a
    for module, one in zip(truth, own, strict=True):
        value = module(value, scale=one)
    work.mean_loss(value, y).backward()
    index = stages[0].stage_index
    problems = work.differences({"scale": scale.grad}, {"scale": own[index].grad})
    if stages[0].is_first:
        problems += work.differences({"x": x.grad}, {"x": a.grad})
    return problems


class Several(nn.Module):
    """Two tensors in, two out, one of them without a gradient."""

    def __init__(self, *, last: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(work.WIDTH, work.WIDTH).double()
        self.last = last

    def forward(self, x: Tensor, count: Tensor | None = None) -> Any:
        count = torch.zeros(len(x), dtype=torch.int64) if count is None else count + 1
        y = torch.tanh(self.linear(x))
        return {"y": y, "count": count} if self.last else [y, count]


def several_values() -> list[str]:
    torch.manual_seed(4)
    modules = [Several(last=False), Several(last=True)]
    rank = dist.get_rank()
    stage = PipelineStage(modules[rank], rank, 2, CPU)

    def loss_fn(output: dict[str, Tensor], target: Tensor) -> Tensor:
        assert set(output["count"].tolist()) == {1}
        return work.mean_loss(output["y"], target)

    schedule = schedules.Schedule1F1B(stage, 4, loss_fn=loss_fn)
    x, y, _ = work.make_batch(8)
    output = schedule.step(x, target=y)
    own = [p.grad.clone() for p in modules[rank].parameters() if p.grad is not None]
    for module in modules:
        module.zero_grad()
    expected = modules[1](*modules[0](x))
    work.mean_loss(expected["y"], y).backward()
    problems = work.differences(
        dict(enumerate(own)),  # type: ignore[arg-type]
        {i: p.grad for i, p in enumerate(modules[rank].parameters())},  # type: ignore[misc]
    )
    if rank == 1:
        problems += work.differences(output, {k: v.detach() for k, v in expected.items()})
    return problems
