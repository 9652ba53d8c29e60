"""Cutting batches, lists cut already, merging; and what is refused before anything runs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipeloom import REPLICATE, LocalPipeline, PreSplit, ShapeError
from pipeloom.runtime.microbatches import merge_outputs, split_batch
from support.models import (
    ZOO,
    Block,
    compare_gradients,
    copy_stages,
    make_batch,
    run_plainly,
    squared_error,
)


@pytest.mark.parametrize("shapes", ["per_step", "fixed", "per_microbatch"])
@pytest.mark.parametrize(("rows", "count"), [(10, 4), (7, 7), (5, 2), (9, 8)])
def test_batches_that_do_not_divide(rows, count, shapes):
    stages = ZOO["blocks"].make_stages(3)
    plain = copy_stages(stages)
    pipe = LocalPipeline(stages, "1f1b", microbatches=count, loss_fn=squared_error, shapes=shapes)
    for _ in range(3):
        x, y = make_batch(rows)
        pipe.step(x, target=y)
        sizes = zip(x.tensor_split(count), y.tensor_split(count), strict=True)
        run_plainly(plain, list(sizes))
        pipe.eval(x, target=y)
    compare_gradients(stages, plain)


@pytest.mark.parametrize("shapes", ["per_step", "fixed"])
def test_lists_that_are_cut_already(shapes):
    """Any sizes, in any order, without a word about shapes."""
    stages = ZOO["blocks"].make_stages(3)
    plain = copy_stages(stages)
    xs, ys = zip(*[make_batch(rows) for rows in (3, 1, 1, 5, 3)], strict=True)
    pipe = LocalPipeline(stages, "1f1b", microbatches=5, loss_fn=squared_error, shapes=shapes)
    for _ in range(2):
        result = pipe.step(PreSplit(xs), target=PreSplit(ys))
        losses = run_plainly(plain, list(zip(xs, ys, strict=True)))
    torch.testing.assert_close(torch.stack(result.losses), torch.stack(losses))
    compare_gradients(stages, plain)


def test_fixed_shapes_with_another_cut_are_refused():
    pipe = LocalPipeline(
        ZOO["blocks"].make_stages(2), "1f1b", microbatches=2, loss_fn=squared_error, shapes="fixed"
    )
    x, y = make_batch(4)
    pipe.step(x, target=y)
    x, y = make_batch(5)
    with pytest.raises(ShapeError, match="shapes='per_step'"):
        pipe.step(x, target=y)
    x, y = make_batch(4)
    pipe.step(x, target=y)


def test_rules():
    x = torch.arange(12).reshape(6, 2)
    positions = torch.arange(6).reshape(1, 6)
    batch = split_batch(
        3,
        arguments=(x, {"positions": positions, "size": 5}),
        keywords={"frequencies": torch.arange(4), "offsets": torch.tensor([0, 2, 5, 6])},
        target=[x, None],
        rules={
            1: {"positions": 1},
            "frequencies": REPLICATE,
            "offsets": lambda value, count: [value[i : i + 2] for i in range(count)],
        },
    )
    assert batch.size == 6
    assert [arguments[0].tolist() for arguments in batch.arguments] == [
        [[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], [10, 11]],
    ]  # fmt: skip
    assert batch.arguments[2][1]["positions"].tolist() == [[4, 5]]
    assert batch.arguments[2][1]["size"] == 5
    assert batch.keywords[1]["frequencies"].tolist() == [0, 1, 2, 3]
    assert batch.keywords[1]["offsets"].tolist() == [2, 5]
    assert batch.targets[1][0].tolist() == [[4, 5], [6, 7]]
    assert batch.targets[1][1] is None
    assert batch.forms is None


def test_every_undeclared_leaf_is_named():
    with pytest.raises(ShapeError) as caught:
        split_batch(
            2,
            arguments=(torch.zeros(4, 2), {"mask": torch.zeros(5, 5)}),
            keywords={"positions": torch.zeros(1, 4), "scale": torch.tensor(2.0)},
            target={"y": torch.zeros(3)},
        )
    text = str(caught.value)
    for name in ("args[1]['mask']", "target['y']", "kwargs['positions']", "kwargs['scale']"):
        assert name in text, text
    assert 'split={"positions": REPLICATE}' in text
    assert "split={1: REPLICATE}" in text
    assert 'split={"target": REPLICATE}' in text


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"arguments": (torch.zeros(2, 3),)}, "fewer than microbatches"),
        ({"arguments": (PreSplit([1, 2]),)}, "already split into 2 microbatches, not 4"),
        ({"arguments": (torch.zeros(8),), "rules": {0: "rows"}}, "must be a dimension"),
        ({"arguments": (torch.zeros(8),), "rules": {0: lambda v, m: [v]}}, "returned 1 pieces"),
        ({"arguments": ({"a": 1},), "rules": {0: {"b": 0}}}, "does not have"),
        ({"arguments": ([1, 2],), "rules": {0: [0]}}, "value's form"),
    ],
)
def test_rules_that_cannot_be_followed(call, message):
    with pytest.raises(ShapeError, match=message):
        split_batch(4, **call)


def test_nothing_runs_when_the_batch_is_refused():
    calls = []
    stages = ZOO["blocks"].make_stages(2)
    stages[0].register_forward_hook(lambda *_: calls.append(1))
    pipe = LocalPipeline(stages, "1f1b", microbatches=2, loss_fn=squared_error)
    x, y = make_batch(4)
    with pytest.raises(ShapeError, match=r"kwargs\['scale'\]"):
        pipe.step(x, target=y, scale=torch.ones(3))
    assert not calls
    pipe.step(x, target=y)  # the pipeline is as good as before
    assert len(calls) == 2


def test_merging():
    outputs = [{"y": torch.ones(2, 1), "n": torch.tensor(i), "s": "same", "i": i} for i in (0, 1)]
    merged = merge_outputs(outputs)
    assert merged["y"].shape == (4, 1)
    assert merged["n"].tolist() == [0, 1]
    assert merged["s"] == "same"
    assert merged["i"] == [0, 1]
    assert merge_outputs([torch.ones(2, 1)] * 3, 1).shape == (2, 3)
    assert merge_outputs([1, 2, 3], sum) == 6
    with pytest.raises(ShapeError, match="differ in structure"):
        merge_outputs([[1], [1, 2]])


def test_block_masks_are_cut_along_their_batch():
    from torch.nn.attention.flex_attention import create_block_mask

    lengths = torch.tensor([3, 64, 130, 256])

    def within(batch, head, query, key):
        return key < lengths[batch]

    mask = create_block_mask(within, 4, None, 256, 256, device="cpu")
    one = create_block_mask(lambda b, h, q, k: q >= k, None, None, 256, 256, device="cpu")
    batch = split_batch(2, arguments=(torch.zeros(4, 1),), keywords={"mask": mask, "causal": one})
    assert batch.keywords[1]["causal"] is one
    dense = mask.to_dense()
    for index, keywords in enumerate(batch.keywords):
        part = keywords["mask"]
        rows = slice(2 * index, 2 * index + 2)
        assert torch.equal(part.to_dense(), dense[rows])
        grid = [[bool(part.mask_mod(torch.tensor(b), 0, 0, k)) for k in range(256)] for b in (0, 1)]
        assert grid == [[bool(k < n) for k in range(256)] for n in lengths[rows]]


def test_keywords_for_one_stage_and_for_all():
    seen: dict[int, list[set[str]]] = {0: [], 1: []}

    class Reporting(Block):
        def __init__(self, index: int) -> None:
            super().__init__()
            self.index = index

        def forward(self, x, **keywords):
            seen[self.index].append(set(keywords))
            return super().forward(x)

    stages: list[nn.Module] = [Reporting(0).double(), Reporting(1).double()]
    pipe = LocalPipeline(stages, "gpipe", microbatches=2, loss_fn=squared_error)
    x, y = make_batch(4)
    pipe.step(x, target=y, everywhere=1, stage_kwargs={1: {"here": torch.ones(4)}})
    assert seen == {0: [{"everywhere"}] * 2, 1: [{"everywhere", "here"}] * 2}
    with pytest.raises(ValueError, match=r"stages \[7\]"):
        pipe.step(x, target=y, stage_kwargs={7: {}})


def test_another_number_of_microbatches_from_step_to_step():
    stages = ZOO["blocks"].make_stages(3)
    plain = copy_stages(stages)
    pipe = LocalPipeline(stages, "1f1b", microbatches=4, loss_fn=squared_error)
    for count, rows in ((4, 8), (1, 3), (6, 6), (4, 9)):
        x, y = make_batch(rows)
        result = pipe.step(x, target=y, microbatches=count)
        assert len(result.losses) == count
        run_plainly(plain, list(zip(x.tensor_split(count), y.tensor_split(count), strict=True)))
    compare_gradients(stages, plain)
    given = LocalPipeline(stages, pipe.schedule, loss_fn=squared_error)
    with pytest.raises(ValueError, match="given by name"):
        given.step(*make_batch(8)[:1], microbatches=8)
