"""Run passes one after the other, verify after each, and show what each one changed.

::

    1f1b ── reduce_gradients ── insert_communication ── place_receives ──▶ a complete program
              │ verify             │ verify               │ verify
              └ + 8 REDUCE_GRAD    └ + 48 SEND_F …        └ 12 receives earlier
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, TypeAlias

from pipeloom.ir.schedule import Schedule
from pipeloom.passes.difference import Difference, compare_programs
from pipeloom.passes.registry import Pass, make_pass, parse_pass
from pipeloom.verify.deadlock import Channel, Sends

#: A name with options as text ("unshard_parameters:lookahead=2"), a function, or a Pass.
PassLike: TypeAlias = str | Pass | Callable[[Schedule], Schedule]


class PassPipeline:
    """A named list of passes.

    With ``verify_each`` (the default) what goes in and what each pass returns is verified under
    the communication model, so that a wrong pass is named at once.

    >>> from pipeloom.ir.notation import parse_grid
    >>> pipeline = PassPipeline(["merge_backward", "insert_communication"])
    >>> schedule = parse_grid("0F0 0I0 0W0\\n1F0 1I0 1W0", name="tiny")
    >>> print(pipeline.run(schedule))
    # tiny · 2 ranks · 2 stages · 1 microbatches
    rank 0   0F0       0SEND_F0  0RECV_B0  0B0
    rank 1   1RECV_F0  1F0       1B0       1SEND_B0
    >>> print(pipeline.explain(schedule)[0])
    merge_backward: +2 B, -2 I, -2 W
      rank 0   0F0  -0I0  -0W0  +0B0
      rank 1   1F0  -1I0  -1W0  +1B0
    """

    def __init__(
        self,
        passes: Iterable[PassLike],
        *,
        verify_each: bool = True,
        sends: Sends = "rendezvous",
        channel: Channel = "edge",
    ) -> None:
        self.passes = tuple(_resolve(item) for item in passes)
        self.verify_each = verify_each
        self.sends: Sends = sends
        self.channel: Channel = channel

    def run(self, schedule: Schedule) -> Schedule:
        """Run every pass; what the last one returned."""
        for _, result in self._steps(schedule):
            schedule = result
        return schedule

    def explain(self, schedule: Schedule) -> list[Difference]:
        """Run every pass; for each, what it added, removed and moved."""
        differences = []
        for step, result in self._steps(schedule):
            differences.append(compare_programs(schedule, result, name=str(step)))
            schedule = result
        return differences

    def _steps(self, schedule: Schedule) -> Iterator[tuple[Pass, Schedule]]:
        self._verify(schedule, "what goes in")
        for step in self.passes:
            schedule = step.run(schedule)
            self._verify(schedule, f"after the pass {step}")
            yield step, schedule

    def _verify(self, schedule: Schedule, when: str) -> None:
        if not self.verify_each:
            return
        from pipeloom.errors import VerificationError
        from pipeloom.verify.verifier import verify

        try:
            verify(schedule, sends=self.sends, channel=self.channel).raise_for_errors()
        except VerificationError as error:
            error.add_note(f"found by the pass pipeline: {when}")
            raise

    def __repr__(self) -> str:
        return f"<PassPipeline {' → '.join(map(str, self.passes))}>"


def _resolve(item: PassLike) -> Pass:
    if isinstance(item, Pass):
        return item
    if isinstance(item, str):
        return parse_pass(item)
    return make_pass(item)


def default_passes(
    schedule: Schedule,
    *,
    shard: bool | Iterable[int] = False,
    receives: Literal["early", "late"] | None = None,
    **options: Any,
) -> list[Pass]:
    """The passes that :func:`lower` runs for this schedule and these options."""
    from pipeloom.errors import ScheduleError

    known = {
        "lookahead": "unshard_parameters",
        "memory": "unshard_parameters",
        "costs": "unshard_parameters",
        "receive_lookahead": "place_receives",
        "sends": "place_receives",
        "channel": "place_receives",
    }
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ScheduleError(
            f"lower has no option {', '.join(map(repr, unknown))}; "
            f"it has shard, receives, {', '.join(known)}"
        )
    taken: dict[str, dict[str, Any]] = {"unshard_parameters": {}, "place_receives": {}}
    for option, value in options.items():
        taken[known[option]][option.removeprefix("receive_")] = value
    for owner, wanted, remedy in (
        ("unshard_parameters", shard is not False, "shard=True or shard={stages}"),
        ("place_receives", receives is not None, "receives='early' or 'late'"),
    ):
        if taken[owner] and not wanted:
            unused = ", ".join(option for option in options if known[option] == owner)
            raise ScheduleError(f"lower: {unused} has no effect without {remedy}")

    passes: list[Pass] = []
    if shard is not False:
        stages = None if shard is True else frozenset(shard)
        passes.append(make_pass("unshard_parameters", stages=stages, **taken["unshard_parameters"]))
    if schedule.has_backward and (schedule.topology.replicas or schedule.sharded_stages):
        passes.append(make_pass("reduce_gradients"))
    if not schedule.has_communication:
        passes.append(make_pass("insert_communication"))
    if receives is not None:
        passes.append(make_pass("place_receives", when=receives, **taken["place_receives"]))
    return passes


def lower(
    schedule: Schedule,
    *,
    shard: bool | Iterable[int] = False,
    receives: Literal["early", "late"] | None = None,
    **options: Any,
) -> Schedule:
    """Make a complete program: the default passes.

    Messages are always inserted, and so is the exchange of gradients between copies of a stage.
    ``shard`` gathers and reduces the stages named (``True``: all), with ``lookahead``, ``memory``
    and ``costs`` of :func:`~pipeloom.passes.unshard_parameters.unshard_parameters`.
    ``receives`` moves receives ``"early"`` or ``"late"`` for a model ``sends``, ``channel``, with
    ``receive_lookahead``; without it the program suits every model, (blocking, all) included.
    A program that has communication keeps it.

    >>> from pipeloom.ir.notation import parse_grid
    >>> print(lower(parse_grid("0F0 0B0\\n1F0 1B0", name="tiny")))
    # tiny · 2 ranks · 2 stages · 1 microbatches
    rank 0   0F0       0SEND_F0  0RECV_B0  0B0
    rank 1   1RECV_F0  1F0       1B0       1SEND_B0
    """
    for step in default_passes(schedule, shard=shard, receives=receives, **options):
        schedule = step.run(schedule)
    return schedule
