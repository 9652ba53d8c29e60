"""Verify a schedule: run every check, collect every violation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pipeloom.errors import ScheduleError
from pipeloom.ir.schedule import Schedule
from pipeloom.verify.channels import check_channels
from pipeloom.verify.completeness import check_completeness
from pipeloom.verify.deadlock import Channel, Sends, check_deadlock, check_model
from pipeloom.verify.memory_limit import MemoryLimit, check_memory, limit_per_rank
from pipeloom.verify.ordering import check_order
from pipeloom.verify.program import Program
from pipeloom.verify.report import Report, Violation
from pipeloom.verify.sharding import check_sharding
from pipeloom.verify.wait_for import is_circular

if TYPE_CHECKING:
    from pipeloom.cost.model import CostModel


def verify(
    schedule: Schedule,
    *,
    sends: Sends = "rendezvous",
    channel: Channel = "edge",
    costs: CostModel | None = None,
    memory: MemoryLimit | None = None,
) -> Report:
    """Prove a schedule right, or collect everything that is wrong with it.

    A program with communication is proved free of deadlock under the model (``sends``,
    ``channel``), explained in :mod:`pipeloom.verify.deadlock`; a compute-only schedule under
    messages that are buffered. ``memory``, one limit or one per rank, as a number or as
    ``"40GiB"``, needs ``costs``.

    >>> from pipeloom.ir.notation import parse_grid
    >>> report = verify(parse_grid("0F0 0B0 \\n 1B0 1F0", name="tiny"))
    >>> report.codes
    ('BACKWARD_BEFORE_FORWARD',)
    >>> print(report)
    tiny does not verify: 1 violation
    <BLANKLINE>
    1. BACKWARD_BEFORE_FORWARD at rank 1, position 0: 1B0
       why:  it needs the output of stage 1 for microbatch 0, which 1F0 ...
       hint: move 1F0 before 1B0
         rank 1   1B0 ← here  1F0 ←
    <BLANKLINE>
    checked: soundness, completeness, order, channels, sharding, deadlock
    """
    check_model(sends, channel)
    limits = None
    if memory is not None:
        if costs is None:
            raise ScheduleError("a memory limit needs costs: verify(..., costs=..., memory=...)")
        limits = limit_per_rank(memory, schedule.num_ranks, costs.memory_unit)
    program = Program(schedule)
    violations = list(program.sound.violations)
    violations += check_completeness(program)
    violations += check_order(program)
    violations += check_channels(program)
    violations += check_sharding(program)
    violations += _check_deadlock(program, sends, channel, explained=bool(violations))
    checks = ["soundness", "completeness", "order", "channels", "sharding", "deadlock"]
    if limits is not None and costs is not None:
        violations += check_memory(program, costs, limits)
        checks.append("memory")
    model = (sends, channel) if program.has_communication else None
    return Report(schedule, tuple(violations), tuple(checks), model)


def _check_deadlock(
    program: Program, sends: Sends, channel: Channel, *, explained: bool
) -> Iterator[Violation]:
    for violation in check_deadlock(program, sends, channel):
        if explained and not is_circular(violation):
            continue  # the end of the story has been told: what it waits for is missing or late
        yield violation
