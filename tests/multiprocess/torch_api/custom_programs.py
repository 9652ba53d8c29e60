"""Schedules and functions of a user's own; each function runs on every rank."""

from __future__ import annotations

import importlib
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.multiprocess.torch_api import programs as work

# The zoo: what users write. Idle cells are dots.
V_ORDER = (
    "0F0 . . 3F0 3B0 . . 0B0 0F1 . . 3F1 3B1 . . 0B1",
    ". 1F0 2F0 . . 2B0 1B0 . . 1F1 2F1 . . 2B1 1B1 .",
)
UNBALANCED = (
    "0F0 1F0 . . . 1B0 0B0 0F1 1F1 . . . 1B1 0B1",
    ". . 2F0 3F0 4F0 4B0 3B0 2B0 . . . 2F1 3F1 4F1 4B1 3B1 2B1",
)
SEPARATE_W = (
    "0F0 0F1 . 0I0 0W0 0I1 0W1",
    ". 1F0 1I0 1F1 1I1 1W0 1W1",
)
#: The last stage runs its microbatches out of order: torch returns losses and outputs so, too.
OUT_OF_ORDER = ("0F1 0F0 . . 0B1 0B0", ". 1F1 1B1 1F0 1B0 .")
REORDERED_B = (
    "0F0 0F1 0SEND_F0 0SEND_F1 0RECV_B1 0RECV_B0 0B1 0B0",
    "1RECV_F0 1RECV_F1 1F0 1F1 1B1 1SEND_B1 1B0 1SEND_B0",
)


def parse(package: str, rows: tuple[str, ...]) -> dict[int, list[Any]]:
    action = importlib.import_module(f"{package}.schedules")._Action
    return {
        rank: [None if cell == "." else action.from_str(cell) for cell in row.split()]
        for rank, row in enumerate(rows)
    }


def make_class(package: str, rows: tuple[str, ...], *, base: str) -> type:
    """What a user writes: a subclass that sets its order."""
    schedules = importlib.import_module(f"{package}.schedules")

    class Custom(getattr(schedules, base)):  # type: ignore[misc]
        def __init__(
            self,
            stages: list[Any],
            n_microbatches: int,
            loss_fn: Any = None,
            scale_grads: bool = True,
        ) -> None:
            super().__init__(
                stages=stages,
                n_microbatches=n_microbatches,
                loss_fn=loss_fn,
                scale_grads=scale_grads,
            )
            order = parse(package, rows)
            if "SEND" in rows[0]:
                self.pipeline_order_with_comms = order
            elif base == "PipelineScheduleMulti":
                self.pipeline_order = order
                self._validate_and_set_stage_mapping(order)
            else:
                self._prepare_schedule_with_comms(order)

    return Custom


def make_stages(package: str, placed: list[list[int]], modules: list[nn.Module]) -> list[Any]:
    stage_class = importlib.import_module(f"{package}.stage").PipelineStage
    return [
        stage_class(modules[index], index, len(modules), torch.device("cpu"))
        for index in placed[dist.get_rank()]
    ]


def run_custom(rows: tuple[str, ...], placed: list[list[int]], base: str) -> list[str]:
    """Two steps of an order of a user's own, beside the unpipelined model."""
    num_stages = sum(map(len, placed))
    modules, truth = work.make_model(num_stages), work.make_model(num_stages)
    stages = make_stages(work.OURS, placed, modules)
    schedule = make_class(work.OURS, rows, base=base)(stages, 2, loss_fn=work.mean_loss)
    problems = []
    for step in range(2):
        x, y, _ = work.make_batch(4, seed=step)
        losses: list[Tensor] = []
        output = schedule.step(x, target=y, losses=losses)
        parts = [(a, b, {}) for a, b in zip(x.chunk(2), y.chunk(2), strict=True)]
        true_losses, true_output = work.run_plainly(truth, parts)
        mine = {
            f"{i}.{k}": p.grad
            for i in placed[dist.get_rank()]
            for k, p in modules[i].named_parameters()
        }
        theirs = {
            f"{i}.{k}": p.grad
            for i in placed[dist.get_rank()]
            for k, p in truth[i].named_parameters()
        }
        if any(stage.is_last for stage in stages):
            mine |= {"output": output, "losses": torch.stack(losses)}
            theirs |= {"output": true_output, "losses": torch.stack(true_losses)}
        problems += work.differences(mine, theirs)
    return problems


def load_csv(directory: str, format: str) -> list[str]:
    """A file that torch wrote, run by ours."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    path = Path(directory) / f"{format}-{rank}.csv"
    theirs, *_ = work.build(work.TORCH, "ZBVZeroBubble", 4)
    theirs._dump_csv(path, format=format)
    modules = work.make_model(2 * ranks)
    stages = make_stages(
        work.OURS, [work.stages_of("ZBVZeroBubble", r, ranks, 2) for r in range(ranks)], modules
    )
    runtime = importlib.import_module(f"{work.OURS}.schedules")._PipelineScheduleRuntime
    schedule = runtime(stages, 4, loss_fn=work.mean_loss)
    schedule._load_csv(path, format=format)
    x, y, _ = work.make_batch(8)
    schedule.step(x, target=y)
    truth = work.make_model(2 * ranks)
    work.run_plainly(truth, [(a, b, {}) for a, b in zip(x.chunk(4), y.chunk(4), strict=True)])
    own = [stage.stage_index for stage in stages]
    return work.differences(
        {f"{i}.{k}": p.grad for i in own for k, p in modules[i].named_parameters()},
        {f"{i}.{k}": p.grad for i in own for k, p in truth[i].named_parameters()},
    )


# ── functions in place of actions ────────────────────────────────────────────────────────────────


def forward_by_hand(package: str, action: Any, ctx: Any) -> None:
    """What torch's own runtime does for F, written by a user."""
    schedules = importlib.import_module(f"{package}.schedules")
    schedule = ctx.schedule_ref
    local = {stage.stage_index: stage for stage in schedule._stages}
    stage, microbatch = local[action.stage_index], action.microbatch_index
    schedule._assert_unsharded(stage)
    if not stage.is_first and stage.stage_index - 1 not in local:
        assert (stage.stage_index, microbatch) in schedule.fwd_recv_ops
        schedules._wait_batch_p2p(schedule.fwd_recv_ops.pop((stage.stage_index, microbatch)))
    output = stage.forward_one_chunk(microbatch, ctx.arg_mbs[microbatch], ctx.kwarg_mbs[microbatch])
    schedule._maybe_compute_loss(stage, output, ctx.target_mbs, microbatch)
    if stage.stage_index + 1 in local:
        local[stage.stage_index + 1].set_local_fwd_input(output, microbatch)


def backward_by_hand(package: str, action: Any, ctx: Any) -> None:
    """What torch's own runtime does for B and I."""
    schedules = importlib.import_module(f"{package}.schedules")
    schedule = ctx.schedule_ref
    local = {stage.stage_index: stage for stage in schedule._stages}
    stage, microbatch = local[action.stage_index], action.microbatch_index
    schedule._assert_unsharded(stage)
    if not stage.is_last and stage.stage_index + 1 not in local:
        assert (stage.stage_index, microbatch) in schedule.bwd_recv_ops
        schedules._wait_batch_p2p(schedule.bwd_recv_ops.pop((stage.stage_index, microbatch)))
    loss = schedule._maybe_get_loss(stage, microbatch)
    full = action.computation_type is schedules.FULL_BACKWARD
    if full:
        schedule.backward_counter[stage.stage_index] += 1
    last = schedule.backward_counter[stage.stage_index] == schedule._n_microbatches
    stage.backward_one_chunk(microbatch, loss=loss, full_backward=full, last_backward=full and last)
    if stage.stage_index - 1 in local:
        local[stage.stage_index - 1].set_local_bwd_input(
            stage.get_local_bwd_output(microbatch), microbatch
        )


def weight_by_hand(package: str, action: Any, ctx: Any) -> None:
    schedule = ctx.schedule_ref
    stage = next(s for s in schedule._stages if s.stage_index == action.stage_index)
    schedule.backward_counter[stage.stage_index] += 1
    stage.backward_weight_one_chunk(action.microbatch_index)


def interleave(package: str, action: Any, ctx: Any) -> None:
    """An overlap that interleaves the two stages: the backward on a thread of its own."""
    forward, backward = action.sub_actions
    errors: list[BaseException] = []

    def run() -> None:
        try:
            backward_by_hand(package, backward, ctx)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    forward_by_hand(package, forward, ctx)
    thread.join()
    if errors:
        raise errors[0]


def train_by_hand(package: str, name: str, microbatches: int) -> dict[str, Any]:
    schedule, stages, _ = work.build(package, name, microbatches)
    schedules = importlib.import_module(f"{package}.schedules")
    seen: list[str] = []

    def register(kind: Any, function: Any) -> None:
        def noting(action: Any, ctx: Any) -> None:
            seen.append(str(action))
            function(package, action, ctx)

        schedule.register_custom_function(kind, noting)

    register(schedules.FORWARD, forward_by_hand)
    register(schedules.FULL_BACKWARD, backward_by_hand)
    register(schedules.BACKWARD_INPUT, backward_by_hand)
    register(schedules.BACKWARD_WEIGHT, weight_by_hand)
    register(schedules.OVERLAP_F_B, interleave)
    results: dict[str, Any] = {}
    for step in range(2):
        x, y, scale = work.make_batch(2 * microbatches, seed=step)
        losses: list[Tensor] = []
        schedule.step(x, target=y, losses=losses, scale=scale, return_outputs=False)
        results |= {f"{step} {k}": v for k, v in work.gradients(stages).items()}
        if losses:
            results[f"{step} losses"] = torch.stack(losses).detach()
        for stage in stages:
            stage.submod.zero_grad()
    assert seen
    return results


def compare_functions(name: str, microbatches: int) -> list[str]:
    ours = train_by_hand(work.OURS, name, microbatches)
    return work.differences(ours, train_by_hand(work.TORCH, name, microbatches))


# ── deferred weights, reassigned modules, static forms ───────────────────────────────────────────


class Deferring(nn.Module):
    """A linear layer that leaves its weight gradient for later."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(work.WIDTH, work.WIDTH, dtype=torch.float64))
        self.queue: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight.detach().T
        if y.requires_grad:
            y.register_hook(lambda grad: self.queue.append((x.detach(), grad)))
        return y

    def build(self) -> Any:
        todo, self.queue = self.queue, []

        def run() -> None:
            for x, grad in todo:
                product = grad.T @ x
                weight = self.weight
                weight.grad = product if weight.grad is None else weight.grad + product

        return run


def deferred_weights(name: str) -> list[str]:
    """``dw_builder``: gradients equal those of an ordinary layer."""
    torch.manual_seed(1)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    own = work.stages_of(name, rank, ranks, 2)
    layers = [Deferring() for _ in range(2 * ranks)]
    stage_class = importlib.import_module(f"{work.OURS}.stage").PipelineStage
    stages = [
        stage_class(layers[i], i, 2 * ranks, torch.device("cpu"), dw_builder=layers[i].build)
        for i in own
    ]
    get = importlib.import_module(f"{work.OURS}.schedules").get_schedule_class
    schedule = get(name)(stages, 4, loss_fn=work.mean_loss)
    x, y, _ = work.make_batch(8)
    x.requires_grad_()
    schedule.step(x, target=y)
    weights = [layer.weight.detach().clone().requires_grad_() for layer in layers]
    for a, b in zip(x.detach().chunk(4), y.chunk(4), strict=True):
        for weight in weights:
            a = a @ weight.T
        (work.mean_loss(a, b) / 4).backward()
    return work.differences(
        {str(i): layers[i].weight.grad for i in own}, {str(i): weights[i].grad for i in own}
    )


def graph_forward(action: Any, ctx: Any) -> None:
    """F as compiled graphs run it: no autograd between stages, caches by hand."""
    schedule = ctx.schedule_ref
    stage = next(s for s in schedule._stages if s.stage_index == action.stage_index)
    microbatch = action.microbatch_index
    x = (
        ctx.arg_mbs[microbatch][0]
        if stage.is_first
        else stage._retrieve_recv_activations(microbatch)[0]
    )
    assert not torch.is_grad_enabled()
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        y = stage.submod(leaf)
        if stage.is_last:
            loss = schedule._loss_fn(y, ctx.target_mbs[microbatch])
            schedule._internal_losses.append(loss.detach())
            y_root: Any = loss / schedule._n_microbatches
        else:
            y_root = y
    stage.kept[microbatch] = (leaf, y_root)
    stage.fwd_cache[microbatch] = ((y.detach(),), [x])


def graph_backward(action: Any, ctx: Any) -> None:
    stage = next(s for s in ctx.schedule_ref._stages if s.stage_index == action.stage_index)
    microbatch = action.microbatch_index
    leaf, root = stage.kept.pop(microbatch)
    grads = (None,) if stage.is_last else stage._retrieve_recv_grads(microbatch)
    root.backward(grads[0])
    stage.bwd_cache[microbatch] = (leaf.grad,)


def train_graphs(name: str) -> list[str]:
    """``backward_requires_autograd=False``: handlers keep graphs of their own."""
    schedule, stages, modules = work.build(work.OURS, name, 4, backward_requires_autograd=False)
    schedules = importlib.import_module(f"{work.OURS}.schedules")
    for stage in stages:
        stage.kept = {}
    schedule.register_custom_function(schedules.FORWARD, graph_forward)
    schedule.register_custom_function(schedules.FULL_BACKWARD, graph_backward)
    x, y, _ = work.make_batch(8)
    losses: list[Tensor] = []
    with torch.no_grad():
        schedule.step(x, target=y, losses=losses)
    truth = work.make_model(len(modules))
    true_losses, _ = work.run_plainly(
        truth, [(a, b, {}) for a, b in zip(x.chunk(4), y.chunk(4), strict=True)]
    )
    expected = {
        f"{stage.stage_index}.{key}": p.grad
        for stage in stages
        for key, p in truth[stage.stage_index].named_parameters()
    }
    problems = work.differences(work.gradients(stages), expected)
    if losses:
        problems += work.differences(
            {"losses": torch.stack(losses)}, {"losses": torch.stack(true_losses)}
        )
    return problems


def refuse(rows: tuple[str, ...]) -> tuple[str, str]:
    """A program that would never end; what is raised instead."""
    modules = work.make_model(2)
    stages = make_stages(work.OURS, [[0], [1]], modules)
    schedule = make_class(work.OURS, rows, base="_PipelineScheduleRuntime")(
        stages, 2, loss_fn=work.mean_loss
    )
    x, y, _ = work.make_batch(4)
    try:
        schedule.step(x, target=y)
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def differ() -> tuple[str, str]:
    """Ranks with different programs."""
    complete = (
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1",
    )
    if dist.get_rank() == 0:
        return refuse(complete)
    return refuse((complete[0], complete[1].replace("1F0 1RECV_F1", "1RECV_F1 1F0")))
