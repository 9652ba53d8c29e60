"""Running a program step by step in the head, and as a trace for Chrome and Perfetto."""

from __future__ import annotations

import json
from collections.abc import Callable
from os import PathLike

from pipeloom.ir.products import Product
from pipeloom.ir.questions import is_compute, simple_actions
from pipeloom.torch_api._actions import Order, _Action, to_ir
from pipeloom.torch_api._lowering import _awaited, make_table
from pipeloom.torch_api._validation import _format_pipeline_order


def _simulate_comms_compute(
    pipeline_order: Order, stage_to_rank: Callable[[int], int], num_stages: int
) -> dict[int, list[_Action | None]]:
    """Every rank's actions by time step, ``None`` where it waits; an action takes one step.

    ``ValueError`` if the ranks come to a halt, with what each of them waits at. For durations,
    memory and causes of idle time there is :func:`pipeloom.simulate`.
    """
    table = make_table(stage_to_rank, num_stages, max(pipeline_order, default=0))
    there: set[Product] = set()
    left = {
        rank: [action for action in reversed(pipeline_order[rank]) if action is not None]
        for rank in sorted(pipeline_order)
    }
    steps: dict[int, list[_Action | None]] = {rank: [] for rank in left}

    def run_next(rank: int) -> _Action | None:
        """The rank's next action if it can run now."""
        action = left[rank][-1]
        parts = simple_actions(to_ir(action))
        if not all(there.issuperset(_awaited(table, part)) for part in parts):
            return None
        for part in parts:
            there.update(table.produces(part))
        return left[rank].pop()

    while running := [rank for rank in left if left[rank]]:
        for rank in running:
            steps[rank].append(run_next(rank))
        if all(steps[rank][-1] is None for rank in running):
            waiting = "\n".join(f"rank={rank} next action= {left[rank][-1]}" for rank in running)
            grid = _format_pipeline_order(steps)
            raise ValueError(f"Schedule is not progressing\n{waiting}\n\nSo far:\n{grid}")
        # A later rank of the same step may have sent what an earlier one waits for.
        for rank in running:
            if left[rank] and steps[rank][-1] is None:
                steps[rank][-1] = run_next(rank)
    return steps


def _dump_chrometrace(schedule: Order, filename: str | PathLike[str]) -> None:
    """Write steps as a trace: a process a rank, an event an action.

    A picture with durations, messages and memory is ``pipeloom.simulate(…).save("x.trace.json")``.
    """
    events = [
        {
            "name": str(action),
            "cat": "computation" if is_compute(to_ir(action)) else "communication",
            "ph": "X",
            "pid": rank,
            "tid": rank,
            "ts": step,
            "dur": 1,
        }
        for rank in sorted(schedule)
        for step, action in enumerate(schedule[rank])
        if action is not None
    ]
    with open(filename, "w") as file:
        json.dump({"traceEvents": events}, file)
