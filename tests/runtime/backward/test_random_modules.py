"""Random stages: any expression of inputs and parameters, split, against plain autograd."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeloom.runtime.backward import SplitBackwardWarning, choose_method
from tests.runtime.backward.harness import (
    accumulate,
    assert_same_inputs,
    assert_same_parameters,
    run_split,
)

torch.set_num_threads(1)

SIZE = 4  # every value and every matrix is SIZE × SIZE, so that any may meet any


def halved(tensor: Tensor) -> Tensor:
    """The tensor, with a hook on it."""
    if tensor.requires_grad:
        tensor.register_hook(lambda grad: 0.5 * grad)
    return tensor


# (values, parameters) are pools; an operation picks from them by number.
Pick = Callable[[int], Tensor]
OPERATIONS: list[Callable[[Pick, Pick, int, int], Tensor]] = [
    lambda v, p, i, j: v(i) @ p(j),
    lambda v, p, i, j: p(j) @ v(i),
    lambda v, p, i, j: F.linear(v(i), p(j), p(j + 1)[0]),
    lambda v, p, i, j: F.linear(v(i), p(j).t()),
    lambda v, p, i, j: torch.addmm(p(j), v(i), p(j), beta=0.5, alpha=2),
    lambda v, p, i, j: v(i) @ v(j),
    lambda v, p, i, j: v(i) * p(j),
    lambda v, p, i, j: v(i) + p(j)[1],
    lambda v, p, i, j: torch.tanh(v(i)),
    lambda v, p, i, j: v(i) + 0.5 * v(j),
    lambda v, p, i, j: F.layer_norm(v(i), (SIZE,), p(j)[0], p(j)[1]),
    lambda v, p, i, j: v(i) @ (p(j) @ p(i)),
    lambda v, p, i, j: v(i) @ torch.sin(p(j)),
    lambda v, p, i, j: torch.cat(torch.tanh(v(i)).chunk(2, dim=0)[::-1]),
    lambda v, p, i, j: torch.einsum("ab,cb->ac", v(i), p(j)),
    lambda v, p, i, j: torch.bmm(v(i)[None], p(j).mT[None])[0],
    lambda v, p, i, j: F.embedding(torch.arange(SIZE).flip(0), p(j)) * v(i),
    lambda v, p, i, j: v(i) + p(j).square().mean(),
    lambda v, p, i, j: torch.tanh(v(i).detach()) @ p(j),
    lambda v, p, i, j: torch.tanh(p(j)).t() @ torch.tanh(p(i)),
    lambda v, p, i, j: torch.addmm(v(j), p(i), p(j)),
    lambda v, p, i, j: F.conv1d(v(i)[None], p(j)[:, :, None])[0],
    lambda v, p, i, j: F.bilinear(v(i), v(j), p(j)[None].expand(SIZE, SIZE, SIZE)),
    lambda v, p, i, j: p(j)[torch.arange(SIZE)] @ v(i),
    lambda v, p, i, j: torch.where(v(i) > 0, v(i) @ p(j), p(j)),
    lambda v, p, i, j: (v(i).to(torch.complex128) @ p(j).to(torch.complex128)).real,
    lambda v, p, i, j: halved(v(i)),
    lambda v, p, i, j: v(i) * halved(p(j).exp()),
    lambda v, p, i, j: v(i) @ halved(p(j).t()),
    lambda v, p, i, j: v(i) @ halved(p(j) * p(i)),
]
STEP = st.tuples(
    st.integers(0, len(OPERATIONS) - 1), st.integers(0, 9), st.integers(0, 9), st.booleans()
)


class RandomStage(nn.Module):
    def __init__(self, steps: list[tuple[int, int, int, bool]], frozen: list[bool]) -> None:
        super().__init__()
        self.steps = steps
        self.pool = nn.ParameterList(
            nn.Parameter(torch.randn(SIZE, SIZE, dtype=torch.float64) / 2, requires_grad=not frost)
            for frost in frozen
        )

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        values = list(inputs)
        for operation, i, j, checkpointed in self.steps:

            def run(*pool: Tensor, operation: int = operation, i: int = i, j: int = j) -> Tensor:
                return OPERATIONS[operation](
                    lambda k: pool[-1 - k % len(pool)],
                    lambda k: self.pool[k % len(self.pool)],
                    i,
                    j,
                )

            if checkpointed:
                values.append(checkpoint(run, *values, use_reentrant=False))
            else:
                values.append(run(*values))
        return values[-1], values[len(values) // 2]


@settings(max_examples=250, deadline=None, derandomize=True)
@given(
    steps=st.lists(STEP, min_size=1, max_size=9),
    frozen=st.lists(st.booleans(), min_size=2, max_size=4),
    needs_grad=st.lists(st.booleans(), min_size=1, max_size=2),
    method=st.sampled_from(["auto", "auto", "deferred", "graph"]),
)
def test_random_stages(
    steps: list[tuple[int, int, int, bool]],
    frozen: list[bool],
    needs_grad: list[bool],
    method: str,
) -> None:
    torch.manual_seed(0)
    module = RandomStage(steps, frozen)
    batches = [
        [torch.randn(SIZE, SIZE, dtype=torch.float64, requires_grad=need) for need in needs_grad]
        for _ in range(3)
    ]
    probe = module(*batches[0])
    if not any(output.requires_grad for output in probe):
        return
    truth = accumulate(module, batches)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SplitBackwardWarning)
        # The numeric check never replaces a result unnoticed: it would warn and leave the split.
        backward = choose_method(module, method=method)
        gradients = run_split(backward, module, batches, truth)
    assert_same_parameters(module, truth.module)
    assert_same_inputs(gradients, truth.input_grads)
