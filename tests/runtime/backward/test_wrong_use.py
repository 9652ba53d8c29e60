"""What is overwritten between I and W, and what is wrong from the start."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pipeloom.errors import BackwardError, BackwardMethodError
from pipeloom.runtime.backward import BackwardMethod, SavedMicrobatch, choose_method
from tests.runtime.backward.harness import (
    run_forward,
)
from tests.runtime.backward.small import every_method, three_layers, x_of
from tests.runtime.backward.zoo import DTYPE

torch.set_num_threads(1)


@pytest.mark.parametrize("what", ["gradient", "input"])
@pytest.mark.parametrize("method", ["auto", "graph"])
def test_overwriting_what_waits_for_weight(method: str, what: str) -> None:
    module, [x] = three_layers(), x_of()
    x = x.detach()
    backward = choose_method(module, method=method, stage=1)
    for index in range(2):
        with backward.forward():
            y = module(x)
        saved = backward.save(microbatch=index, inputs=[], outputs=[y])
        grad = torch.ones_like(y)
        del y
        backward.input(saved, [grad])
        if index == 1:
            (grad if what == "gradient" else x).zero_()
            name = r"2\.weight" if what == "gradient" else r"0\.weight"
            with pytest.raises(BackwardError, match=rf"stage 1, microbatch 1: .*{name}"):
                backward.weight(saved)
        else:
            backward.weight(saved)


def saved_of(backward: BackwardMethod, module: nn.Module) -> SavedMicrobatch:
    return run_forward(backward, module, x_of(), 7)


@every_method
@pytest.mark.parametrize(
    ("grads", "words"),
    [
        (lambda: [torch.ones(3, 4, dtype=DTYPE)] * 2, "2 gradients were given for 1 outputs"),
        (lambda: [torch.ones(2, 2, dtype=DTYPE)], r"does not fit its output: .*\[2, 2\]"),
    ],
)
def test_gradients_that_do_not_fit(
    grads: Callable[[], list[Tensor]], words: str, method: str
) -> None:
    module = three_layers()
    backward = choose_method(module, method=method, stage=2)
    saved = saved_of(backward, module)
    with pytest.raises(BackwardError, match=rf"stage 2, microbatch 7: .*{words}"):
        backward.input(saved, grads())
    with pytest.raises(BackwardError, match="the last was a failed I"):
        backward.weight(saved)


def fail(*given: object) -> None:
    raise ArithmeticError("no such number")


@every_method
def test_errors_of_others_are_told_where_they_arose(method: str) -> None:
    """As they are, with the place as a note."""
    module, [x] = three_layers(), x_of()
    leaf, grads = x.detach().requires_grad_(), [torch.ones(3, 4, dtype=DTYPE)]
    backward = choose_method(module, method=method, stage=2)
    with backward.forward():
        hidden = module[1](module[0](leaf))
        y = module[2](hidden)
    saved = backward.save(microbatch=7, inputs=[leaf], outputs=[y])
    with torch.no_grad():
        hidden.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
        backward.input(saved, grads)
    assert caught.value.__notes__ == ["in the backward of stage 2, microbatch 7"]
    handle = module[0].weight.register_post_accumulate_grad_hook(fail)
    saved = saved_of(backward, module)
    if method != "whole":
        backward.input(saved, grads)
    last = backward.input if method == "whole" else lambda saved, grads: backward.weight(saved)
    with pytest.raises(ArithmeticError) as caught:
        last(saved, grads)
    assert caught.value.__notes__ == ["in the backward of stage 2, microbatch 7"]
    with pytest.raises(BackwardError, match="a failed"):
        backward.weight(saved)
    handle.remove()


def test_one_error_that_is_raised_again_is_told_once() -> None:
    module, error = three_layers(), ArithmeticError("always this one")

    def fail_again(*given: object) -> None:
        raise error

    module[0].weight.register_hook(fail_again)
    backward = choose_method(module, method="whole", stage=2)
    for _ in range(3):
        with pytest.raises(ArithmeticError):
            backward.full(saved_of(backward, module), [torch.ones(3, 4, dtype=DTYPE)])
    assert error.__notes__ == ["in the backward of stage 2, microbatch 7"]


@every_method
def test_inputs_that_are_results_of_other_operations(method: str) -> None:
    module, [x] = three_layers(), x_of()
    backward = choose_method(module, method=method, stage=2)
    made = 2 * x
    with pytest.raises(BackwardError, match=r"stage 2, microbatch 0: inputs 0 .*detach\(\)"):
        backward.save(microbatch=0, inputs=[made], outputs=[module(made)])


@pytest.mark.parametrize("share", [-1, 0, "x", float("nan"), float("inf"), True])
def test_shares_that_are_none(share: object) -> None:
    with pytest.raises(BackwardMethodError, match="hold_at_most"):
        choose_method(three_layers(), hold_at_most=share)


def test_the_type_of_gradients_that_are_there_cannot_change() -> None:
    module = nn.Linear(4, 4, dtype=torch.bfloat16)
    module(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
    with pytest.raises(BackwardMethodError, match=r"weight, bias; call zero_grad\(\)"):
        choose_method(module, accumulate_fp32=True)
    module.zero_grad()
    choose_method(module, accumulate_fp32=True)


def test_a_weight_backward_that_cannot_be_built() -> None:
    def build() -> Callable[[], object]:
        raise ValueError("nothing to run")

    backward = choose_method(three_layers(), weight_backward=build, stage=4)
    saved = run_forward(backward, three_layers(), x_of(), 0)
    with pytest.raises(ValueError, match="nothing to run"):
        backward.input(saved, [torch.ones(3, 4, dtype=DTYPE)])
    with pytest.raises(BackwardError, match=r"stage 4, microbatch 0: W needs I .* a failed I"):
        backward.weight(saved)
