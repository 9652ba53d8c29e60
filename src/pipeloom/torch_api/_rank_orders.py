"""The row of one rank of an interleaved schedule, for programs that make orders of their own.

::

    F F F F F │ · · │ F B  F B  F B │ · B  · B  · B         idle cells are ·
     warmup    wait      steady          cooldown
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

from pipeloom.torch_api._actions import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    _Action,
    _ComputationType,
)


def _get_warmup_ops(
    rank: int,
    n_local_stages: int,
    microbatches_per_round: int,
    pp_group_size: int,
    n_microbatches: int,
    multiply_factor: int = 2,
) -> int:
    """How many forwards a rank runs before its first backward."""
    warmup = (n_local_stages - 1) * microbatches_per_round
    warmup += multiply_factor * (pp_group_size - 1 - rank)
    return min(warmup, n_microbatches * n_local_stages)


def _get_1f1b_rank_ops(
    n_local_stages: int,
    pp_group_size: int,
    warmup_ops: int,
    fwd_bwd_ops: int,
    cooldown_ops: int,
    rank: int,
    forward_stage_index: Callable[[int], int],
    backward_stage_index: Callable[[int], int],
    num_1f1b_microbatches: int = 0,
    enable_zero_bubble: bool = False,
) -> list[_Action | None]:
    """The row of a rank; the two functions say which stage is on at a step.

    With ``enable_zero_bubble`` backwards are split, and each W follows so many steps later as
    ``num_1f1b_microbatches`` says; what is left comes at the end.
    """
    row: list[_Action | None] = [None] * rank
    numbers: Counter[tuple[int, _ComputationType]] = Counter()
    weights: deque[int] = deque()
    backward = BACKWARD_INPUT if enable_zero_bubble else FULL_BACKWARD

    def add(stage: int, kind: _ComputationType) -> None:
        """The stage's next microbatch."""
        row.append(_Action(stage, kind, numbers[stage, kind]))
        numbers[stage, kind] += 1

    if enable_zero_bubble:
        wait = pp_group_size - rank - 1
    else:
        first_backward = n_local_stages * pp_group_size + 2 * (pp_group_size - 1 - rank)
        wait = first_backward - (warmup_ops + rank)
    steady_end = warmup_ops + fwd_bwd_ops
    for step in range(steady_end + cooldown_ops):
        if step < steady_end:
            add(forward_stage_index(step), FORWARD)
        if step == warmup_ops - 1:
            row += [None] * wait
        if step < warmup_ops:
            continue
        if step >= steady_end and not enable_zero_bubble:
            row.append(None)
        add(backward_stage_index(step), backward)
        if enable_zero_bubble:
            weights.append(backward_stage_index(step))
            if step - warmup_ops >= num_1f1b_microbatches:
                add(weights.popleft(), BACKWARD_WEIGHT)
    while weights:
        add(weights.popleft(), BACKWARD_WEIGHT)
    return row
