"""Checking and printing orders, with the words programs written for torch look for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest

from pipeloom.ir.questions import is_backward
from pipeloom.torch_api._actions import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    Order,
    _Action,
    _ComputationType,
    to_ir,
)
from pipeloom.torch_api._lowering import parts_of


def _format_pipeline_order(pipeline_order: Order, error_step_number: int | None = None) -> str:
    """The order as a grid, a row a step and a column a rank; a step can be marked as wrong.

    >>> order = {0: [_Action(0, FORWARD, 0)], 1: [_Action(1, FORWARD, 0)]}
    >>> print(_format_pipeline_order(order, error_step_number=0), end="")
            Rank 0 Rank 1
    Step 0: 0F0    1F0    <-- ERROR HERE
    """
    columns = [
        ["" if action is None else str(action) for action in pipeline_order[rank]]
        for rank in sorted(pipeline_order)
    ]
    num_steps = max(map(len, columns), default=0)
    digits = len(str(num_steps - 1))
    labels = [f"Step {step:0{digits}d}" for step in range(num_steps)]
    label_width = max(map(len, labels), default=0)
    widths = [max([label_width, *map(len, column)]) for column in columns]
    heads = [f"Rank {number}" for number in range(len(columns))]
    lines = [" " * (label_width + 2) + _pad(heads, widths)]
    for step, cells in enumerate(zip_longest(*columns, fillvalue="")):
        mark = " <-- ERROR HERE" if step == error_step_number else ""
        lines.append(f"{labels[step]}: {_pad(cells, widths)}{mark}")
    return "\n".join(lines) + "\n"


def _pad(cells: Sequence[str], widths: Sequence[int]) -> str:
    return " ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True))


#: What must have run before, and how both are called.
_BEFORE: Mapping[_ComputationType, tuple[_ComputationType, str, str]] = {
    FULL_BACKWARD: (FORWARD, "Full Backward", "Forward"),
    BACKWARD_INPUT: (FORWARD, "Backward Input", "Forward"),
    BACKWARD_WEIGHT: (BACKWARD_INPUT, "Backward Weight", "Backward Input"),
}


def _validate_schedule(
    actions: Order, pp_group_size: int, num_stages: int, num_microbatches: int
) -> dict[int, int]:
    """Which rank holds which stage, if the order is complete; ``AssertionError`` if it is not.

    Every F and B (or I and W) there once on each stage, in their order, a stage on one rank only:
    all that is wrong is told, with the schedule and the step at which it first goes wrong. That a
    program with its messages runs through is proved when it first runs.
    """
    if len(actions) != pp_group_size:
        raise AssertionError(
            f"Schedule has incorrect number of ranks - expected {pp_group_size}, "
            f"actual {len(actions)}"
        )
    missing = [rank for rank in range(pp_group_size) if rank not in actions]
    if missing:
        raise AssertionError(f"Schedule is missing actions for rank {missing[0]}")
    check = _Check(num_stages, num_microbatches)
    for rank in sorted(actions):
        for step, action in enumerate(actions[rank]):
            if action is not None:
                check.add(rank, step, action)
    problems = [*check.problems, *check.find_missing()]
    if problems:
        grid = _format_pipeline_order(actions, error_step_number=check.error_step)
        raise AssertionError("\n".join(problems) + f"\n\nFull pipeline schedule:\n{grid}")
    return check.stage_to_rank


class _Check:
    """Walks an order and notes what is wrong."""

    def __init__(self, num_stages: int, num_microbatches: int) -> None:
        self.num_stages = num_stages
        self.num_microbatches = num_microbatches
        self.problems: list[str] = []
        self.error_step: int | None = None
        self.stage_to_rank: dict[int, int] = {}
        self._done: dict[tuple[int, _ComputationType], set[int | None]] = defaultdict(set)

    def _report(self, rank: int, step: int, problem: str) -> None:
        if self.error_step is None:
            self.error_step = step
        self.problems.append(f"Rank {rank}, step {step}: {problem}")

    def add(self, rank: int, step: int, action: object) -> None:
        if not isinstance(action, _Action):
            self._report(
                rank, step, f"Got an invalid action: {action}, expected instance of _Action"
            )
            return
        for part in parts_of(action):
            self._add_part(rank, step, part)

    def _add_part(self, rank: int, step: int, action: _Action) -> None:
        stage, kind, microbatch, _ = action
        if not 0 <= stage < self.num_stages:
            self._report(rank, step, f"{action} names a stage outside 0..{self.num_stages - 1}")
            return
        if kind in _BEFORE:
            before, name, name_before = _BEFORE[kind]
            if microbatch not in self._done[stage, before]:
                self._report(
                    rank,
                    step,
                    f"Running {name} for stage {stage}, microbatch {microbatch} "
                    f"without first running {name_before}",
                )
        if kind is FORWARD or kind in _BEFORE:
            if microbatch in self._done[stage, kind]:
                self._report(rank, step, f"{action} runs twice")
            self._done[stage, kind].add(microbatch)
        holder = self.stage_to_rank.setdefault(stage, rank)
        if holder != rank:
            self._report(
                rank, step, f"Stage {stage} is assigned to both rank {rank} and rank {holder}"
            )

    def find_missing(self) -> Iterator[str]:
        expected = self.num_microbatches
        for stage in range(self.num_stages):
            num_f, num_b, num_i, num_w = (
                len(self._done[stage, kind])
                for kind in (FORWARD, FULL_BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
            )
            if num_f != expected:
                yield f"Got {num_f} F microbatches for stage {stage}, expected {expected}"
            if num_i != num_w:
                yield (
                    f"Invalid backward microbatches for stage {stage}: I and W must have equal "
                    f"counts, but got I={num_i}, W={num_w}"
                )
            elif num_b + num_i != expected:
                yield (
                    f"Invalid backward microbatches for stage {stage}: expected {expected} total "
                    f"backwards, but got B={num_b}, I={num_i}, W={num_w}"
                )


def has_backward(order: Order) -> bool:
    """True if an order computes gradients."""
    return any(is_backward(to_ir(a)) for row in order.values() for a in row if a is not None)
