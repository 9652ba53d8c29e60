"""Captured stages, against plain autograd.

What is recorded is either CUDA graphs, where there is a device, or operations on the CPU, which are
played again in the same way: into the same memory, without running any other code.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pipeloom
from pipeloom.errors import BackwardError, BackwardMethodError, ShapeError, StepFailed
from pipeloom.runtime.backward import choose_method
from pipeloom.runtime.backward.cuda_graphs import (
    CapturedStage,
    CudaRecorder,
    Recorder,
    slots_needed,
)
from tests.runtime.backward.harness import accumulate, assert_same_parameters
from tests.runtime.backward.stages import WIDTH, Block
from tests.runtime.backward.zoo import build, feed
from tests.support.op_recorder import OpRecorder

torch.set_num_threads(1)

NewRecorder = Callable[[], Recorder]


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


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(8, 16), nn.LayerNorm(16)
        self.second = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(nn.functional.gelu(self.norm(self.first(x))))


def stage(recorder: Recorder, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Layers().to(recorder.device)


def sample(recorder: Recorder, *, grad: bool = True) -> Tensor:
    return torch.zeros(4, 8, device=recorder.device, requires_grad=grad)


def batches(recorder: Recorder, num: int) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(4, 8, device=recorder.device) for _ in range(num)]


@pytest.mark.parametrize("method", ["auto", "deferred", "graph", "whole"])
def test_interleaved_slots_give_the_gradients_of_a_plain_loop(
    method: str, new_recorder: NewRecorder
) -> None:
    recorder = new_recorder()
    module, plain = stage(recorder), stage(recorder)
    for ones, twos in zip(module.parameters(), plain.parameters(), strict=True):
        ones.grad, twos.grad = torch.ones_like(ones), torch.ones_like(twos)
    captured = CapturedStage(
        module, sample(recorder), num_slots=2, recorder=recorder, method=method
    )
    backward = choose_method(module, weight_backward=captured.weight_backward)
    inputs, grads = batches(recorder, 8)[:4], batches(recorder, 8)[4:]
    expected, found = [], []
    for x, grad in zip(inputs, grads, strict=True):
        leaf = x.clone().requires_grad_()
        plain(leaf).backward(grad)
        expected.append(leaf.grad)

    def forward(index: int) -> Any:
        leaf = inputs[index].clone().requires_grad_()
        with backward.forward():
            y = module(leaf)
        return backward.save(microbatch=index, inputs=[leaf], outputs=[y])

    for first in (0, 2):
        saved = [forward(first), forward(first + 1)]
        found += [backward.input(saved[i], [grads[first + i]])[0] for i in (0, 1)]
        for one in reversed(saved):
            backward.weight(one)
        del saved, one
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)
    for mine, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_capturing_leaves_no_trace(new_recorder: NewRecorder) -> None:
    recorder = new_recorder()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)).to(recorder.device)
    module[0].weight.grad = torch.full_like(module[0].weight, 3)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    random = torch.get_rng_state()
    captured = CapturedStage(module, sample(recorder), num_slots=2, recorder=recorder)
    assert torch.equal(torch.get_rng_state(), random)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert torch.equal(module[0].weight.grad, torch.full_like(module[0].weight, 3))
    assert module[0].bias.grad is None
    captured.release()
    assert "forward" not in vars(module)


SCHEDULES = [("1f1b", 4), ("zb-h1", 4), ("zbv", 2), ("interleaved_1f1b", 2), ("gpipe", 4)]


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize(("schedule", "ranks"), SCHEDULES)
def test_pipelines_of_captured_stages(
    schedule: str, ranks: int, set_to_none: bool, new_recorder: NewRecorder
) -> None:
    probe = new_recorder()
    captured_stages = [stage(probe, seed) for seed in range(4)]
    plain_stages = [stage(probe, seed) for seed in range(4)]
    options: dict[str, Any] = {
        "schedule": schedule,
        "ranks": ranks,
        "microbatches": 8,
        "loss_fn": nn.functional.mse_loss,
    }
    plain = pipeloom.LocalPipeline(plain_stages, **options)
    captured = [
        CapturedStage(
            module,
            torch.zeros(2, 8, device=probe.device, requires_grad=index > 0),
            num_slots=slots_needed(plain.schedule, index),
            stage=index,
            recorder=new_recorder(),
        )
        for index, module in enumerate(captured_stages)
    ]
    pipe = pipeloom.LocalPipeline(
        captured_stages,
        weight_backward={index: one.weight_backward for index, one in enumerate(captured)},
        **options,
    )
    x, target = torch.randn(2, 16, 8, device=probe.device)
    for _ in range(3):
        for module in (*plain_stages, *captured_stages):
            module.zero_grad(set_to_none=set_to_none)
        mine, theirs = pipe.step(x, target=target), plain.step(x, target=target)
        torch.testing.assert_close(mine.loss, theirs.loss)
        for a, b in zip(captured_stages, plain_stages, strict=True):
            for one, other in zip(a.parameters(), b.parameters(), strict=True):
                torch.testing.assert_close(one.grad, other.grad)
    torch.testing.assert_close(pipe.eval(x, target=target).loss, plain.eval(x, target=target).loss)
    gc.collect()
    assert [len(one._free) for one in captured] == [one.num_slots for one in captured]


@pytest.mark.parametrize("name", ["transformer", "convolution", "first stage", "merged lora"])
def test_stages_of_the_zoo(name: str) -> None:
    """Whatever is deferred, and how: a first stage of tokens, buffers, weights made of weights."""
    module, inputs = build(name), [feed(name) for _ in range(4)]
    truth = accumulate(module, inputs)
    captured = CapturedStage(module, *feed(name), num_slots=4, recorder=OpRecorder())
    backward = choose_method(module, weight_backward=captured.weight_backward)
    saved, found = [], []
    for index, leaves in enumerate(inputs):
        leaves = [x.detach().clone().requires_grad_(x.requires_grad) for x in leaves]
        outputs = module(*leaves)
        saved.append(backward.save(microbatch=index, inputs=leaves, outputs=[outputs]))
    for one, grads in zip(saved, truth.output_grads, strict=True):
        found.append(backward.input(one, grads))
    for one in saved[::-1]:
        backward.weight(one)
    assert_same_parameters(module, truth.module)
    for (mine, *_), (theirs, *_) in zip(found, truth.input_grads, strict=True):
        assert mine is theirs or torch.allclose(mine, theirs)
    for mine, theirs in zip(module.buffers(), truth.module.buffers(), strict=True):
        assert torch.equal(mine, theirs)


class Pytrees(nn.Module):
    """Arguments by name, nested; results in a dict, one of them without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: dict[str, Tensor], *, scale: Tensor, times: int) -> dict[str, Any]:
        y = self.layer(x["hidden"]) * scale * times
        return {"y": y, "largest": y.detach().argmax(-1), "nothing": None, "times": times}


def test_nested_arguments_and_results(new_recorder: NewRecorder) -> None:
    recorder = new_recorder()
    module = Pytrees().to(recorder.device)
    scale = torch.ones(8, device=recorder.device)
    captured = CapturedStage(
        module,
        {"hidden": sample(recorder)},
        kwargs={"scale": scale, "times": 3},
        num_slots=1,
        recorder=recorder,
    )
    [x] = batches(recorder, 1)
    leaf = x.clone().requires_grad_()
    result = module({"hidden": leaf}, scale=2 * scale, times=3)
    expected = 6 * (x @ module.layer.weight.T + module.layer.bias)
    torch.testing.assert_close(result["y"], expected)
    assert torch.equal(result["largest"], expected.argmax(-1))
    assert (result["nothing"], result["times"]) == (None, 3)
    result["y"].sum().backward()
    captured.weight_backward()()
    torch.testing.assert_close(leaf.grad, 6 * module.layer.weight.sum(0).expand(4, 8))
    torch.testing.assert_close(module.layer.weight.grad, 6 * x.sum(0).expand(8, 8))
    with pytest.raises(ShapeError, match=r"arguments\[1\]\['times'\] is the value 2, captured"):
        module({"hidden": leaf}, scale=scale, times=2)


# ── what would go wrong in silence ───────────────────────────────────────────────────────────────


def make(new_recorder: NewRecorder, num_slots: int = 1) -> tuple[nn.Module, CapturedStage, Tensor]:
    recorder = new_recorder()
    module = stage(recorder)
    captured = CapturedStage(
        module, sample(recorder), num_slots=num_slots, recorder=recorder, stage=3
    )
    return module, captured, batches(recorder, 1)[0].requires_grad_()


def test_gradients_set_to_none_between_any_two_parts(new_recorder: NewRecorder) -> None:
    """Recordings add to memory that the optimizer may have let go of meanwhile."""
    module, captured, x = make(new_recorder)
    grads = []
    for when in ("before F", "before I", "before W"):
        module.zero_grad(set_to_none=False)
        for part in ("before F", "before I", "before W"):
            if part == when:
                module.zero_grad(set_to_none=True)
            if part == "before F":
                y = module(x)
            elif part == "before I":
                y.sum().backward()
                run = captured.weight_backward()
            else:
                run()
        del y, run  # the microbatch is over
        grads.append(module.second.weight.grad.clone())
    assert torch.equal(grads[0], grads[1])
    assert torch.equal(grads[0], grads[2])


def test_replaced_gradients_are_an_error_before_anything_is_written(
    new_recorder: NewRecorder,
) -> None:
    module, _, x = make(new_recorder)
    y = module(x)
    module.first.bias.grad = torch.zeros_like(module.first.bias)
    with pytest.raises(BackwardError, match=r"stage 3 adds to .*zero_grad\(\).*first\.bias"):
        y.sum().backward()
    assert not module.first.bias.grad.any()


@pytest.mark.parametrize("change", ["data", "parameter", "buffer"])
def test_other_memory_for_parameters_and_buffers_is_an_error(
    change: str, new_recorder: NewRecorder
) -> None:
    recorder = new_recorder()
    module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).to(recorder.device)
    CapturedStage(module, sample(recorder), num_slots=1, recorder=recorder)
    if change == "data":
        module[0].weight.data = module[0].weight.data.clone()
    elif change == "parameter":
        module[0].weight = nn.Parameter(module[0].weight.detach().clone())
    else:
        module[1].running_mean = module[1].running_mean.clone()
    with pytest.raises(BackwardError, match=r"other memory for (weight|running_mean)"):
        module(batches(recorder, 1)[0].requires_grad_())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lambda x: x[:1].detach().requires_grad_(), r"has shape \[1, 8\], captured \[4, 8\]"),
        (lambda x: x.double().detach().requires_grad_(), "has type torch.float64"),
        (lambda x: x.detach(), "does not require grad"),
    ],
)
def test_other_inputs_are_an_error(
    given: Callable[[Tensor], Tensor], words: str, new_recorder: NewRecorder
) -> None:
    module, captured, x = make(new_recorder)
    with pytest.raises(ShapeError, match=words):
        module(given(x))
    module(x).sum().backward()  # and nothing is left half-done
    captured.weight_backward()()


def test_results_stay_as_they_are_when_the_slot_is_used_again(new_recorder: NewRecorder) -> None:
    module, captured, x = make(new_recorder)
    y = module(x)
    [dx] = torch.autograd.grad(y.sum(), [x])
    captured.weight_backward()()
    kept = y.detach(), dx
    copies = [one.clone() for one in kept]
    del y
    module((2 * x).detach().requires_grad_()).pow(2).sum().backward()
    captured.weight_backward()()
    for one, copy in zip(kept, copies, strict=True):
        assert torch.equal(one, copy)


def test_too_few_slots_and_how_many_are_needed(new_recorder: NewRecorder) -> None:
    module, _, x = make(new_recorder)
    y = module(x)
    with pytest.raises(BackwardError, match=r"1 slots, and as many .*slots_needed"):
        module(x)
    del y
    module(x)  # the slot of a graph that was let go is free again


def test_nobody_who_asks_for_the_weights(new_recorder: NewRecorder) -> None:
    module, _, x = make(new_recorder, num_slots=2)
    module(x).sum().backward()
    with pytest.raises(BackwardError, match="weight_backward="):
        module(x)


def test_without_gradients_and_in_the_other_mode_the_module_itself_runs(
    new_recorder: NewRecorder,
) -> None:
    module, captured, x = make(new_recorder)
    with torch.no_grad():
        torch.testing.assert_close(module(x[:1]), captured._own_forward(x[:1]))
    module.eval()
    module(x[:2]).sum().backward()
    assert module.first.weight.grad is not None


def test_a_failed_step_gives_its_slots_back() -> None:
    torch.manual_seed(0)
    stages = [Layers(), Layers()]
    schedule = pipeloom.build_schedule("zb_h1", ranks=2, microbatches=4)
    captured = [
        CapturedStage(
            module,
            torch.zeros(2, 8, requires_grad=index > 0),
            num_slots=slots_needed(schedule, index),
            recorder=OpRecorder(),
        )
        for index, module in enumerate(stages)
    ]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if target.sum() > 1e6:
            raise ValueError("no such target")
        return (output - target).square().mean()

    pipe = pipeloom.LocalPipeline(
        stages,
        schedule=schedule,
        loss_fn=loss,
        weight_backward={index: one.weight_backward for index, one in enumerate(captured)},
    )
    target = torch.zeros(8, 8)
    target[5] = 1e7
    with pytest.raises(StepFailed):
        pipe.step(torch.randn(8, 8), target=target)
    del pipe
    gc.collect()
    assert [len(one._free) for one in captured] == [one.num_slots for one in captured]


# ── what cannot be captured ──────────────────────────────────────────────────────────────────────


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
