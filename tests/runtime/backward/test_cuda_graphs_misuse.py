"""What a replay would get wrong in silence."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import pipeloom
from pipeloom.errors import BackwardError, BackwardMethodError, ShapeError, StepFailed
from pipeloom.runtime.backward.cuda_graphs import (
    CapturedStage,
    slots_needed,
)
from tests.runtime.backward.capturing import (
    Layers,
    NewRecorder,
    batches,
    sample,
    stage,
)
from tests.support.op_recorder import OpRecorder

torch.set_num_threads(1)


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
    for one, before in zip(kept, copies, strict=True):
        assert torch.equal(one, before)


def test_too_few_slots_and_how_many_are_needed(new_recorder: NewRecorder) -> None:
    module, _, x = make(new_recorder)
    y = module(x)
    with pytest.raises(BackwardError, match=r"1 slots, and as many .*slots_needed"):
        module(x)
    del y
    module(x)  # the slot of a graph that was let go is free again


def test_results_that_are_kept_keep_no_slot(new_recorder: NewRecorder) -> None:
    module, captured, x = make(new_recorder)
    kept = []
    for _ in range(3):
        kept.append(module(x))
        kept[-1].sum().backward()
        captured.weight_backward()()


def test_a_microbatch_has_one_backward(new_recorder: NewRecorder) -> None:
    module, captured, x = make(new_recorder)
    y = module(x)
    y.sum().backward(retain_graph=True)
    captured.weight_backward()()
    with pytest.raises(BackwardError, match=r"stage 3 was asked for the backward .* twice"):
        y.sum().backward()


def freeze(module: nn.Module) -> None:
    module.first.weight.requires_grad_(False)


def scale(module: nn.Module) -> None:
    module.first.weight.register_hook(lambda grad: 2 * grad)


def step(module: nn.Module) -> None:
    module.first.weight.register_post_accumulate_grad_hook(lambda parameter: None)


def look_inside(module: nn.Module) -> None:
    module.second.register_forward_hook(lambda *args: None)


def evaluate_a_part(module: nn.Module) -> None:
    module.norm.eval()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (freeze, r"whether first\.weight needs a gradient"),
        (scale, r"hooks of first\.weight"),
        (step, r"hooks of first\.weight"),
        (look_inside, "hooks of second"),
        (evaluate_a_part, "the mode of norm"),
    ],
)
def test_other_settings_than_those_of_the_capture_are_an_error(
    new_recorder: NewRecorder, change: Callable[[nn.Module], None], named: str
) -> None:
    module, captured, x = make(new_recorder)
    change(module)
    with pytest.raises(BackwardError, match=rf"captured stage 3 .*other settings: {named}; "):
        module(x)
    captured.release()
    module(x)


def test_autocast_that_is_switched_on_later_is_an_error(new_recorder: NewRecorder) -> None:
    module, _, x = make(new_recorder)
    with (
        torch.autocast(x.device.type, torch.bfloat16),
        pytest.raises(BackwardError, match="other settings: autocast"),
    ):
        module(x)
    module(x)


def test_hooks_on_the_stage_itself_run_as_ever(new_recorder: NewRecorder) -> None:
    module, _, x = make(new_recorder)
    plain = module(x).detach().clone()
    module.register_forward_hook(lambda module, args, result: 2 * result)
    assert torch.equal(module(x), 2 * plain)


def test_nothing_is_written_before_those_who_play_are_in_turn() -> None:
    """Another stream may still play from the memory that a microbatch is copied to."""
    recorder = OpRecorder()
    module = stage(recorder)
    captured = CapturedStage(module, sample(recorder), num_slots=1, recorder=recorder)
    [slot] = captured._free
    before = []
    recorder.before_replay = lambda: before.append(
        [tensor.abs().sum().item() for tensor in (slot.inputs[0], slot.output_grads[0])]
    )
    module(torch.ones(4, 8, requires_grad=True)).sum().backward()
    captured.weight_backward()()
    assert before == [[0, 0], [32, 0], [32, 32]]


def test_captured_modules_are_not_copied_or_captured_twice(new_recorder: NewRecorder) -> None:
    module, captured, x = make(new_recorder)
    for copy_it in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"captured stage 3 cannot be .*release\(\) it first"):
            copy_it(module)
    with pytest.raises(BackwardMethodError, match=r"stage 3 .*captured already; release\(\)"):
        CapturedStage(
            module, sample(captured._recorder), num_slots=1, stage=3, recorder=new_recorder()
        )
    captured.release()
    copy.deepcopy(module)(x)


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


class GrowingTable(Layers):
    """Makes its table longer for longer inputs, and keeps something to look at in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = torch.ones(1, 8), torch.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        if len(self.table) < len(x):
            self.table = 2 * torch.ones(len(x), 8)
        if not self.training:
            self.last = x.detach().sum()
        return super().forward(x) * self.table[: len(x)]


def test_attributes_that_an_evaluation_replaces() -> None:
    torch.manual_seed(0)
    module, recorder = GrowingTable(), OpRecorder()
    CapturedStage(module, sample(recorder), num_slots=1, recorder=recorder)
    [x] = batches(recorder, 1)
    before = module(x.requires_grad_()).detach().clone()
    module.eval()
    module(torch.zeros(9, 8))
    module.train()
    assert len(module.table) == 9
    assert torch.equal(module(x), before)
    module.table = 3 * module.table  # by somebody else
    with pytest.raises(BackwardError, match="other memory for table"):
        module(x)


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
