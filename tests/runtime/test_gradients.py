"""Gradients of every schedule, split method and model, against a plain loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import pipeloom
from pipeloom import LocalPipeline
from pipeloom.runtime.microbatches import split_batch
from support import zoo as irregular
from support.models import (
    ZOO,
    Block,
    call_plainly,
    compare_gradients,
    copy_stages,
    make_batch,
    run_plainly,
    squared_error,
)

TRAINING = [e.name for e in pipeloom.list_schedules() if e.name != "forward_only"]
BIDIRECTIONAL = {"chimera", "dualpipe"}
SPLIT = ("interleaved_zero_bubble", "zbv")


def legal_microbatches(name: str, ranks: int) -> int:
    for count in range(ranks, 5 * ranks):
        try:
            pipeloom.build_schedule(name, ranks=ranks, microbatches=count)
        except pipeloom.ScheduleError:
            continue
        return count
    raise AssertionError(f"no number of microbatches suits {name}")


def run_case(model_name, schedule_name, ranks, *, microbatches=None, **options):
    """One step through a pipeline and through the plain loop; the stages of both, the losses."""
    model = ZOO[model_name]
    count = microbatches or legal_microbatches(schedule_name, ranks)
    schedule = pipeloom.build_schedule(schedule_name, ranks=ranks, microbatches=count)
    num_parts = len(schedule.topology.chains[0])
    parts = model.make_stages(num_parts)
    plain = copy_stages(parts)
    stages = [
        stage for _ in schedule.topology.chains for stage in copy_stages(parts)
    ]  # both directions have copies of their own
    rows = 2 * count
    x, y = model.make_batch(rows)
    keywords = model.keywords(rows)
    pipe = LocalPipeline(
        stages, schedule_name, ranks=ranks, microbatches=count, loss_fn=squared_error, **options
    )
    result = pipe.step(x, target=y, **keywords)
    batch = split_batch(count, arguments=(x,), keywords=keywords, target=y)
    losses = run_plainly(
        plain, list(zip(batch.arguments, batch.targets, strict=True)), keywords=batch.keywords
    )
    return pipe, result, stages, plain, losses


@pytest.mark.parametrize("schedule", TRAINING)
@pytest.mark.parametrize("model", ZOO)
@pytest.mark.filterwarnings("ignore::pipeloom.runtime.backward.SplitBackwardWarning")
def test_every_model_under_every_schedule(model, schedule):
    ranks = 2
    _, result, stages, plain, losses = run_case(model, schedule, ranks)
    for first in range(0, len(stages), len(plain)):
        compare_gradients(stages[first : first + len(plain)], plain)
    torch.testing.assert_close(torch.stack(result.losses), torch.stack(losses))
    torch.testing.assert_close(result.loss, torch.stack(losses).mean())
    assert result.output is None


@pytest.mark.parametrize("schedule", TRAINING)
def test_every_schedule_on_four_ranks(schedule):
    _, _, stages, plain, _ = run_case("blocks", schedule, 4)
    for first in range(0, len(stages), len(plain)):
        compare_gradients(stages[first : first + len(plain)], plain)


@pytest.mark.parametrize("method", ["deferred", "graph", "whole"])
@pytest.mark.parametrize("schedule", SPLIT)
@pytest.mark.parametrize("model", ZOO)
@pytest.mark.filterwarnings("ignore::pipeloom.runtime.backward.SplitBackwardWarning")
def test_every_way_of_splitting(model, schedule, method):
    _, _, stages, plain, _ = run_case(model, schedule, 2, backward=method)
    compare_gradients(stages, plain)


@pytest.mark.parametrize(
    "make", [irregular.V_SHAPED, irregular.UNBALANCED, irregular.SEPARATE_WEIGHTS,
             irregular.REORDERED_WITH_COMMUNICATION], ids=lambda make: make.__name__,
)  # fmt: skip
def test_irregular_schedules(make, tmp_path: Path):
    schedule = make()
    schedule.save(tmp_path / "schedule.json")
    for given in (schedule, tmp_path / "schedule.json"):
        torch.manual_seed(0)
        stages = ZOO["blocks"].make_stages(schedule.num_stages)
        plain = copy_stages(stages)
        x, y = make_batch(2 * schedule.num_microbatches)
        LocalPipeline(stages, given, loss_fn=squared_error).step(x, target=y)
        count = schedule.num_microbatches
        run_plainly(plain, list(zip(x.chunk(count), y.chunk(count), strict=True)))
        compare_gradients(stages, plain)


def test_a_csv_file(tmp_path: Path):
    path = pipeloom.build_schedule("zbv", ranks=2, microbatches=4).save(tmp_path / "zbv.csv")
    stages = ZOO["blocks"].make_stages(4)
    plain = copy_stages(stages)
    x, y = make_batch(8)
    LocalPipeline(stages, str(path), loss_fn=squared_error).step(x, target=y)
    run_plainly(plain, list(zip(x.chunk(4), y.chunk(4), strict=True)))
    compare_gradients(stages, plain)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1", "eager_1f1b"])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 7])
def test_fewer_and_more_microbatches_than_ranks(schedule, microbatches):
    _, _, stages, plain, _ = run_case("blocks", schedule, 4, microbatches=microbatches)
    compare_gradients(stages, plain)


def test_float32_agrees_to_rounding():
    stages = [stage.float() for stage in ZOO["blocks"].make_stages(4)]
    plain = copy_stages(stages)
    x, y = (tensor.float() for tensor in make_batch(8))
    LocalPipeline(stages, "1f1b", microbatches=4, loss_fn=squared_error).step(x, target=y)
    run_plainly(plain, list(zip(x.chunk(4), y.chunk(4), strict=True)))
    compare_gradients(stages, plain, tolerance=1e-6)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "dualpipe", "chimera"])
@pytest.mark.parametrize("zero_grad", [True, False])
def test_accumulation_rescales_nothing(schedule, zero_grad):
    """Gradients of earlier steps are neither rescaled nor, between copies, counted twice."""
    ranks = 2
    count = legal_microbatches(schedule, ranks)
    shape = pipeloom.build_schedule(schedule, ranks=ranks, microbatches=count)
    parts = ZOO["blocks"].make_stages(len(shape.topology.chains[0]))
    plain = copy_stages(parts)
    stages = [stage for _ in shape.topology.chains for stage in copy_stages(parts)]
    pipe = LocalPipeline(stages, schedule, ranks=ranks, microbatches=count, loss_fn=squared_error)
    for step in range(3):
        x, y = make_batch(2 * count)
        if zero_grad:
            for module in (*stages, *plain):
                module.zero_grad()
        pipe.eval(x, target=y, microbatches=count + step)
        pipe.step(x, target=y)
        pipe.eval(x, target=y)
        run_plainly(plain, list(zip(x.chunk(count), y.chunk(count), strict=True)))
        for first in range(0, len(stages), len(plain)):
            compare_gradients(stages[first : first + len(plain)], plain)


def test_the_tensor_of_grad_stays_the_same_object():
    stages = ZOO["blocks"].make_stages(2) * 1
    pipe = LocalPipeline(
        copy_stages(stages) + copy_stages(stages),
        "dualpipe",
        ranks=2,
        microbatches=4,
        loss_fn=squared_error,
    )
    x, y = make_batch(8)
    pipe.step(x, target=y)
    kept = [p.grad for module in pipe.modules.values() for p in module.parameters()]
    pipe.step(x, target=y)
    now = [p.grad for module in pipe.modules.values() for p in module.parameters()]
    assert all(one is other for one, other in zip(kept, now, strict=True))


def test_one_module_for_both_directions():
    parts = ZOO["blocks"].make_stages(2)
    plain = copy_stages(parts)
    pipe = LocalPipeline(parts, "chimera", ranks=2, microbatches=4, loss_fn=squared_error)
    for _ in range(2):
        x, y = make_batch(8)
        pipe.step(x, target=y)
        run_plainly(plain, list(zip(x.chunk(4), y.chunk(4), strict=True)))
    compare_gradients(parts, plain)


def test_copies_that_find_gradients_in_one_direction_only():
    """A weight that only some microbatches use: the other copy gets its gradient too."""

    class Sometimes(Block):
        def __init__(self) -> None:
            super().__init__()
            self.rare = nn.Linear(4, 4)
            self.never = nn.Linear(4, 4)

        def forward(self, x):
            return super().forward(self.rare(x) if float(x.detach()[0, 0]) > 50 else x)

    parts = [Sometimes().double(), Block().double()]
    plain = copy_stages(parts)
    stages = copy_stages(parts) + copy_stages(parts)
    x, y = make_batch(8)
    x[6:, 0] = 100.0
    LocalPipeline(stages, "chimera", ranks=2, microbatches=4, loss_fn=squared_error).step(
        x, target=y
    )
    run_plainly(plain, list(zip(x.chunk(4), y.chunk(4), strict=True)))
    assert plain[0].never.weight.grad is None
    compare_gradients(stages[:2], plain)
    compare_gradients(stages[2:], plain)


@pytest.mark.parametrize(("schedule", "num_stages"), [("1f1b", 2), ("zbv", 4), ("zb_h1", 2)])
def test_hooks_on_parameters_fire_once_per_microbatch(schedule, num_stages):
    stages = ZOO["blocks"].make_stages(num_stages)
    calls: dict[str, int] = {}

    def count(key: str) -> None:
        calls[key] = calls.get(key, 0) + 1

    for index, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            parameter.register_hook(lambda _, key=f"{index}.{name}": count(key))
    x, y = make_batch(8)
    LocalPipeline(stages, schedule, microbatches=4, loss_fn=squared_error).step(x, target=y)
    assert set(calls.values()) == {4}, calls
    assert len(calls) == sum(len(list(stage.parameters())) for stage in stages)


def test_arguments_get_their_gradients():
    stages = ZOO["keyword"].make_stages(3)
    plain = copy_stages(stages)
    x, y = make_batch(7)
    scale = torch.rand(7, 1).double()
    source = torch.randn(4, 4).double()

    def leaves():
        return [t.clone().requires_grad_() for t in (x, scale, source)]

    mine, theirs = leaves(), leaves()
    pipe = LocalPipeline(stages, "1f1b", microbatches=3, loss_fn=squared_error)
    pipe.step(mine[0] @ mine[2], target=y, scale=mine[1])
    a, scale_a = theirs[0] @ theirs[2], theirs[1]
    total = sum(
        squared_error(call_plainly(plain, xm, scale=sm), ym) / 3
        for xm, sm, ym in zip(
            a.tensor_split(3), scale_a.tensor_split(3), y.tensor_split(3), strict=True
        )
    )
    total.backward()
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    compare_gradients(stages, plain)


def test_copies_on_one_rank():
    """Two copies of one stage on the same rank: added up there, without a message."""
    rows = ["0F0 1F1 0B0 1B1"]
    schedule = pipeloom.make_schedule(
        [[pipeloom.parse_action(text) for text in row.split()] for row in rows],
        topology=pipeloom.Topology.bidirectional(1),
    )
    part = Block().double()
    stages = [part, *copy_stages([part])]
    plain = copy_stages([part])
    pipe = LocalPipeline(stages, schedule, loss_fn=squared_error)
    for _ in range(2):
        x, y = make_batch(4)
        pipe.step(x, target=y)
        run_plainly(plain, list(zip(x.chunk(2), y.chunk(2), strict=True)))
    compare_gradients(stages[:1], plain)
    compare_gradients(stages[1:], plain)
