"""The same programs with torch's package, with ours, and without a pipeline."""

from __future__ import annotations

from typing import Any

import pytest

from tests.multiprocess.torch_api import programs as work
from tests.support.process_pool import ProcessPool

pytestmark = pytest.mark.multiprocess

EVERY = (*work.SINGLE, *work.LOOPED, *work.V_SHAPED)


@pytest.mark.parametrize("name", EVERY)
def test_two_ranks_give_what_torch_gives(two_ranks: ProcessPool, name: str) -> None:
    options: dict[str, Any] = {"microbatches": 4}
    assert two_ranks.run(work.compare_with_torch, [(name, options)]) == [[]] * 2


@pytest.mark.parametrize("name", EVERY)
def test_two_ranks_give_what_the_model_gives(two_ranks: ProcessPool, name: str) -> None:
    options: dict[str, Any] = {"microbatches": 4, "with_eval": True, "zero_grad": False}
    presplit = dict(options, form="microbatches", scale_grads=False, loss_fn=work.summed_loss)
    assert two_ranks.run(work.compare_with_truth, [(name, options), (name, presplit)]) == [[]] * 2


@pytest.mark.parametrize("name", EVERY)
def test_four_ranks_give_what_the_model_gives(four_ranks: ProcessPool, name: str) -> None:
    """Two steps without zero_grad and eval between them: there torch divides what is not its own.
    The batch does not divide into microbatches of one size."""
    options: dict[str, Any] = {"microbatches": 8, "with_eval": True, "zero_grad": False}
    uneven = {**options, "rows": 21}
    deferred = {**options, "defer_pp_recv": True} if name not in work.SINGLE else options
    cases = [(name, options), (name, uneven), (name, deferred)]
    assert four_ranks.run(work.compare_with_truth, cases) == [[]] * 4


@pytest.mark.parametrize("name", [*work.SINGLE, *work.LOOPED])
def test_four_ranks_give_what_torch_gives(four_ranks: ProcessPool, name: str) -> None:
    cases = [
        (name, {"microbatches": 8, "loss_fn": work.summed_loss, "scale_grads": False}),
        (name, {"microbatches": 4, "with_eval": True, "steps": 1}),
    ]
    assert four_ranks.run(work.compare_with_torch, cases) == [[]] * 4


def test_a_branch_of_parameters_alone_gets_its_gradient(two_ranks: ProcessPool) -> None:
    assert two_ranks.run(work.train_with_branch) == [[], []]
