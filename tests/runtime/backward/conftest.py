"""Who records stages: CUDA graphs, where there is a device, and operations on the CPU."""

from __future__ import annotations

import pytest
import torch

from pipeloom.runtime.backward.cuda_graphs import CudaRecorder
from tests.runtime.backward.capturing import NewRecorder
from tests.support.op_recorder import OpRecorder


@pytest.fixture(
    params=[
        "cpu",
        pytest.param(
            "cuda",
            marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ),
    ]
)
def new_recorder(request: pytest.FixtureRequest) -> NewRecorder:
    if request.param == "cpu":
        return OpRecorder
    return lambda: CudaRecorder(torch.device("cuda", torch.cuda.current_device()))


@pytest.fixture
def nothing_compiled_before() -> None:
    """torch keeps compiled code, and gives up on functions that it compiled too often."""
    torch._dynamo.reset()
