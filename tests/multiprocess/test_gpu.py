"""Tensors on a GPU: staged through host memory by gloo, and through NCCL."""

from __future__ import annotations

import pytest
import torch

from tests.multiprocess import gpu_work as work
from tests.support.process_pool import ProcessPool

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("model", ["blocks", "dict"])
def test_a_backend_of_host_tensors_is_staged(two_ranks: ProcessPool, model: str) -> None:
    """Both ranks use one GPU."""
    assert two_ranks.run(work.compare_on_gpu, "gloo", model) == [[], []]


def test_one_rank_over_nccl() -> None:
    pool = ProcessPool(1)
    assert pool.run(work.compare_on_gpu, "nccl", "blocks") == [[]]
    pool.stop()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each rank")
def test_two_ranks_over_nccl(two_ranks: ProcessPool) -> None:
    assert two_ranks.run(work.compare_on_gpu, "nccl", "blocks") == [[], []]
