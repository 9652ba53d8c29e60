"""The same programs with torch's package, with ours, and without a pipeline."""

from __future__ import annotations

from typing import Any

import pytest

from tests.multiprocess.torch_api import programs as work
from tests.support.process_pool import ProcessPool

pytestmark = pytest.mark.multiprocess

EVERY = (*work.SINGLE, *work.LOOPED, *work.V_SHAPED)


def microbatches_for(name: str, ranks: int) -> int:
    return 2 * ranks


@pytest.mark.parametrize("name", EVERY)
def test_two_ranks_give_what_torch_gives(two_ranks: ProcessPool, name: str) -> None:
    options: dict[str, Any] = {"microbatches": 4}
    assert two_ranks.run(work.compare_with_torch, [(name, options)]) == [[]] * 2


@pytest.mark.parametrize("name", EVERY)
def test_two_ranks_give_what_the_model_gives(two_ranks: ProcessPool, name: str) -> None:
    options: dict[str, Any] = {"microbatches": 4, "with_eval": True, "zero_grad": False}
    presplit = dict(options, form="microbatches", scale_grads=False, loss_fn=work.summed_loss)
    assert two_ranks.run(work.compare_with_truth, [(name, options), (name, presplit)]) == [[]] * 2
