"""Many steps of changing shapes, numbers of microbatches and evaluations; nothing adds up."""

from __future__ import annotations

import gc
import random

import pytest
import torch

import pipeloom
from pipeloom import LocalPipeline, PreSplit
from support.models import (
    ZOO,
    compare_gradients,
    copy_stages,
    make_batch,
    run_plainly,
    squared_error,
)


@pytest.mark.parametrize("shapes", ["per_step", "per_microbatch"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "interleaved_1f1b", "chimera"])
@pytest.mark.parametrize("model", ["tuple", "dict"])
def test_random_steps(model, schedule, shapes):
    choose = random.Random(f"{model} {schedule} {shapes}")
    shape = pipeloom.build_schedule(schedule, ranks=2, microbatches=4)
    parts = ZOO[model].make_stages(len(shape.topology.chains[0]))
    plain = copy_stages(parts)
    stages = [stage for _ in shape.topology.chains for stage in copy_stages(parts)]
    pipe = LocalPipeline(
        stages, schedule, ranks=2, microbatches=4, loss_fn=squared_error, shapes=shapes
    )
    for _ in range(15):
        count = choose.choice((2, 4, 6, 8))
        x, y = make_batch(choose.randint(count, 3 * count))
        if choose.random() < 0.5:
            evaluated = pipe.eval(x, target=y, microbatches=choose.randint(1, len(x)))
            assert torch.isfinite(evaluated.loss)
        if choose.random() < 0.3:
            for module in (*stages, *plain):
                module.zero_grad()
        if choose.random() < 0.4:
            sizes = [1] * (count - 1) + [len(x) - count + 1]
            choose.shuffle(sizes)
            xs, ys = x.split(sizes), y.split(sizes)
            result = pipe.step(PreSplit(xs), target=PreSplit(ys), microbatches=count)
        else:
            xs, ys = x.tensor_split(count), y.tensor_split(count)
            result = pipe.step(x, target=y, microbatches=count)
        losses = run_plainly(plain, list(zip(xs, ys, strict=True)))
        torch.testing.assert_close(torch.stack(result.losses), torch.stack(losses))
    for first in range(0, len(stages), len(plain)):
        compare_gradients(stages[first : first + len(plain)], plain, tolerance=1e-9)


def test_the_number_of_objects_does_not_grow():
    stages = ZOO["dict"].make_stages(2)
    pipe = LocalPipeline(stages, "1f1b", microbatches=4, loss_fn=squared_error)

    def run(steps: int) -> int:
        for step in range(steps):
            x, y = make_batch(4 + step % 5)
            pipe.step(x, target=y, microbatches=1 + step % 4)
            pipe.eval(x, microbatches=1 + step % 3)
        gc.collect()
        return len(gc.get_objects())

    run(12)
    before = run(12)
    assert run(60) <= before + 50
