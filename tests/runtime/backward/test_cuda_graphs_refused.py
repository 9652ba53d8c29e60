"""Stages that cannot be captured, and how that is said."""

from __future__ import annotations

import random
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pipeloom
from pipeloom.errors import BackwardError, BackwardMethodError
from pipeloom.runtime.backward.cuda_graphs import CapturedStage, Recorder
from pipeloom.runtime.backward.cuda_graphs.recorder import explain
from tests.runtime.backward.capturing import Layers
from tests.runtime.backward.stages import WIDTH, Block
from tests.support.op_recorder import OpRecorder

torch.set_num_threads(1)


def refusal(module: nn.Module, *args: Any, recorder: Recorder | None = None) -> str:
    with pytest.raises(BackwardMethodError) as caught:
        CapturedStage(module, *args, num_slots=1, stage=3, recorder=recorder or OpRecorder())
    message = str(caught.value)
    assert message.startswith("stage 3 cannot be captured as CUDA graphs: ")
    assert "forward" not in vars(module)
    return message


def test_everything_in_the_way_is_said_at_once() -> None:
    module = Layers()
    module.first.bias.register_hook(lambda grad: None)
    module.norm.register_forward_hook(lambda *args: None)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        message = refusal(module, torch.zeros(4, 8))
    for part in ("first.bias has hooks", "its part 'norm' has hooks", "no_grad", "cache_enabled"):
        assert part in message


def test_stages_on_the_cpu() -> None:
    with pytest.raises(
        BackwardMethodError, match=r"parameter first\.weight is on cpu.* input 0 is"
    ):
        CapturedStage(Layers(), torch.zeros(4, 8), num_slots=1)


def test_tensors_on_several_devices() -> None:
    module = Layers()
    module.register_buffer("elsewhere", torch.zeros(2, device="meta"))
    assert "buffer elsewhere is on meta, not on cpu" in refusal(module, torch.zeros(4, 8))


def test_graphs_that_are_still_held() -> None:
    module = Layers()
    loss = module(torch.zeros(4, 8)).sum()
    assert "parameter first.weight is part of a graph" in refusal(module, torch.zeros(4, 8))
    del loss
    CapturedStage(module, torch.zeros(4, 8), num_slots=1, recorder=OpRecorder())


class Checkpointed(nn.Module):
    def __init__(self, *, dropout: float, reentrant: bool) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Dropout(dropout))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=self.reentrant)


@pytest.mark.filterwarnings("ignore::pipeloom.runtime.backward.SplitBackwardWarning")
@pytest.mark.parametrize("reentrant", [True, False])
def test_random_numbers_that_a_checkpoint_draws_twice(reentrant: bool) -> None:
    x = torch.zeros(4, 8, requires_grad=True)
    message = refusal(Checkpointed(dropout=0.5, reentrant=reentrant), x)
    assert "recomputes random numbers" in message
    CapturedStage(
        Checkpointed(dropout=0.0, reentrant=reentrant), x, num_slots=1, recorder=OpRecorder()
    )


class Replacing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = self.mean + x.detach().mean(0)
        return self.layer(x)


def test_buffers_that_are_replaced() -> None:
    module = Replacing()
    assert "in the place of buffer mean" in refusal(module, torch.zeros(4, 8))


class AsksTheHost(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum().item() >= 0 else x


def test_what_a_recording_cannot_hold_is_found_before_there_is_one() -> None:
    recorder = OpRecorder()
    message = refusal(AsksTheHost(), torch.zeros(4, 8), recorder=recorder)
    assert "_local_scalar_dense.default asks the host" in message
    assert recorder.num_recorded == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: Layers.forward(self, x) * x.sum().item(),
        lambda self, x: Layers.forward(self, x) * torch.tensor(2.0, device="cuda"),
    ],
)
def test_what_a_device_waits_for(forward: Callable[..., Tensor]) -> None:
    module = Layers().cuda()
    module.forward = types.MethodType(forward, module)
    with pytest.raises(BackwardMethodError, match="waits for the device or copies from the host"):
        CapturedStage(module, torch.zeros(4, 8, device="cuda"), num_slots=1)
    torch.rand(3, device="cuda").sum().item()  # the device is as usable as before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_checkpoints_that_save_the_state_of_random_numbers() -> None:
    module, x = nn.Linear(8, 8).cuda(), torch.zeros(4, 8, device="cuda", requires_grad=True)

    def checkpointed(preserve: bool) -> nn.Module:
        stage = nn.Sequential(module)
        stage.forward = lambda x: checkpoint(
            module, x, use_reentrant=False, preserve_rng_state=preserve
        )
        return stage

    with pytest.raises(BackwardMethodError, match="preserve_rng_state=False"):
        CapturedStage(checkpointed(True), x, num_slots=1)
    CapturedStage(checkpointed(False), x, num_slots=1)


def test_errors_in_a_recording_say_what_came_first() -> None:
    first = RuntimeError("operation not permitted when stream is capturing\nhere")
    last = RuntimeError("capture failed due to a previous error during capture")
    last.__context__ = first
    assert "recording failed: operation not permitted when stream is capturing; " in explain(last)
    drawn = RuntimeError("Cannot call CUDAGeneratorImpl::current_seed during CUDA graph capture.")
    assert "preserve_rng_state=False" in explain(drawn)


class RandomDepth(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if random.random() < 2 else x


def test_random_numbers_of_the_host() -> None:
    assert "draws random numbers on the host" in refusal(RandomDepth(), torch.zeros(4, 8))


class Keeping(Layers):
    """Keeps tensors as attributes: a table made once, or something new each time."""

    def __init__(self, *, again: bool) -> None:
        super().__init__()
        self.again, self.table = again, None

    def forward(self, x: Tensor) -> Tensor:
        if self.again or self.table is None:
            self.table = torch.ones(8)
        return super().forward(x) * self.table


def test_generators_of_any_kind() -> None:
    numpy = pytest.importorskip("numpy")
    before = numpy.random.get_bit_generator()
    numpy.random.set_bit_generator(numpy.random.PCG64())
    try:
        CapturedStage(Layers(), torch.zeros(4, 8), num_slots=1, recorder=OpRecorder())
    finally:
        numpy.random.set_bit_generator(before)


class LazyTable(Layers):
    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "table"):
            self.register_buffer("table", torch.ones(8), persistent=False)
        return super().forward(x) * self.table


def test_buffers_that_the_first_forward_makes() -> None:
    x = torch.zeros(4, 8, requires_grad=True)
    CapturedStage(LazyTable(), x, num_slots=1, recorder=OpRecorder())


def test_tensors_that_are_kept_as_attributes() -> None:
    x = torch.zeros(4, 8, requires_grad=True)
    message = refusal(nn.Sequential(Keeping(again=True)), x)
    assert "keeps a new tensor as 0.table" in message
    module = Keeping(again=False)
    CapturedStage(module, x, num_slots=1, recorder=OpRecorder())
    module(x)
    module.table = 2 * module.table
    with pytest.raises(BackwardError, match="other memory for table"):
        module(x)


def test_code_that_torch_compiles_into_graphs_of_its_own() -> None:
    module = nn.Sequential(Layers())
    module[0].compile(mode="reduce-overhead")
    assert "its part '0' is compiled into CUDA graphs" in refusal(module, torch.zeros(4, 8))


def test_sparse_gradients() -> None:
    module = nn.Embedding(5, 8, sparse=True)
    message = refusal(module, torch.zeros(4, dtype=torch.long))
    assert "parameter weight gets sparse gradients" in message
    assert module.weight.grad is None


def test_stages_whose_gradients_are_reduced_are_refused_by_the_pipeline() -> None:
    stages = [Layers() for _ in range(4)]
    captured = CapturedStage(stages[0], torch.zeros(2, 8), num_slots=4, recorder=OpRecorder())
    with pytest.raises(BackwardMethodError, match="stages 0 were captured"):
        pipeloom.LocalPipeline(
            stages,
            schedule="chimera",
            ranks=2,
            microbatches=4,
            loss_fn=nn.functional.mse_loss,
            weight_backward={0: captured.weight_backward},
        )


def test_a_failed_capture_leaves_no_trace() -> None:
    class Fails(Block):
        num_calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.num_calls += 1
            if self.num_calls > 3:  # while recording
                raise ValueError("not now")
            return super().forward(x)

    module = Fails()
    with pytest.raises(ValueError, match="not now"):
        CapturedStage(module, torch.zeros(2, 4, WIDTH), num_slots=1, recorder=OpRecorder())
    assert all(parameter.grad is None for parameter in module.parameters())
    assert "forward" not in vars(module)
