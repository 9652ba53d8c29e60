"""Walks one rank's program: bound once to closures, then only called.

::

    program            bound                              run
    1RECV_F0           post a receive                     ticket
    1F0                wait for the slot; stage.forward   …
    1SEND_F0           take from outgoing; post a send
    1B0                stage.full_backward

The executor knows no schedule by name and interprets nothing while it runs. It is a generator: on
a transport that cannot block it yields where it would have to wait, so that one thread can drive
all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from pipeloom.ir.action import Action, Kind
from pipeloom.ir.dependencies import RULES, Role
from pipeloom.ir.products import Product
from pipeloom.ir.schedule import Schedule
from pipeloom.runtime.data_parallel import DataParallelStage
from pipeloom.runtime.gradients import CopyExchange
from pipeloom.runtime.messages import (
    GradientSlot,
    OutputSlot,
    Promises,
    Slot,
    bind_gradient_send,
    bind_output_send,
)
from pipeloom.runtime.observer import Observer
from pipeloom.runtime.stage import StageRunner
from pipeloom.runtime.transport.protocol import Edge, Endpoint

__all__ = ["ActionContext", "Executor", "Handler", "RankParts"]

Call = Callable[[], None]
Handler = Callable[["ActionContext"], None]


class RankParts(NamedTuple):
    """What lives on one rank."""

    runners: Mapping[int, StageRunner]
    #: For stages whose module is data-parallel.
    data_parallel: Mapping[int, DataParallelStage]
    #: For stages with copies elsewhere; copies on one rank share the exchange.
    exchanges: Mapping[int, CopyExchange]


class _Entry(NamedTuple):
    """One thing to do: wait for the slots, then call."""

    position: int
    slots: tuple[Slot, ...]
    call: Call


class ActionContext:
    """What a handler that replaces a kind of action works with.

    ``run(part)`` does what would have been done without the handler. A handler that calls modules
    itself uses the stages: ``open_forward`` gives the module's arguments, ``close_forward`` takes
    its output, ``full_backward``, ``input_backward`` and ``weight_backward`` run a backward.
    """

    def __init__(
        self, action: Action, stages: Mapping[int, StageRunner], calls: Mapping[Action, Call]
    ) -> None:
        self.action = action
        #: What is fused, or the action itself.
        self.parts = action.parts or (action,)
        self.stages = stages
        self._calls = calls

    def run(self, part: Action) -> None:
        """Do what a part means without the handler."""
        self._calls[part]()


class Executor:
    """One rank's program, ready to run again and again."""

    def __init__(
        self,
        rank: int,
        schedule: Schedule,
        endpoint: Endpoint,
        parts: RankParts,
        *,
        handlers: Mapping[Kind, Handler],
        promises: Promises,
        observer: Observer | None = None,
    ) -> None:
        self.rank = rank
        self.schedule = schedule
        self.endpoint = endpoint
        self.actions = schedule.actions[rank]
        self._table = schedule.dependencies
        self._parts = parts
        self._handlers = handlers
        self._promises = promises
        self._observer = observer
        self._slots: dict[Product, Slot] = {}
        #: The microbatches that each edge carries, in their order.
        self._orders: dict[Edge, list[int]] = {}
        self._reduced: set[int] = set()
        self._calls_made: dict[int, int] = {}
        self._entries = [
            entry
            for position, action in enumerate(self.actions)
            for entry in self._bind(position, action)
        ]
        if self._slots:
            # A message nobody computes with still has to arrive before the step ends.
            self._entries.append(_Entry(len(self.actions), tuple(self._slots.values()), _nothing))

    def run(self) -> Iterator[None]:
        """Run the program; yields where it has to wait and the transport cannot."""
        endpoint = self.endpoint
        wait = endpoint.wait
        progress = endpoint.progress
        progress.actions = self.actions
        progress.waits_for = None
        for position, slots, call in self._entries:
            progress.position = position
            for slot in slots:
                progress.waits_for = slot.waits_for
                message = wait(slot.ticket)
                while message is None:
                    yield
                    message = wait(slot.ticket)
                progress.waits_for = None
                slot.ticket = None
                slot.deliver(message)
            call()
        progress.position = len(self.actions)
        while not endpoint.flush():
            yield
        self._reduce_the_rest()

    def _reduce_the_rest(self) -> None:
        """A program need not say when data-parallel stages reduce; then it is here."""
        if self.schedule.has_backward:
            # The parts are those of the process, which may have other ranks, still at work.
            for stage in self.schedule.placement.stages_on(self.rank):
                side = self._parts.data_parallel.get(stage)
                if side is not None and stage not in self._reduced:
                    side.reduce()

    # ── binding ──────────────────────────────────────────────────────────────────────────────

    def _bind(self, position: int, action: Action) -> Iterator[_Entry]:
        role = RULES[action.kind].role
        if role is Role.RECEIVE:
            yield _Entry(position, (), self._observed(action, self._bind_receive(action)))
            return
        slots = tuple(
            [
                self._slots.pop(product)
                for product in self._table.needs(action)
                if product in self._slots
            ]
        )
        if role is Role.REDUCE:
            yield from self._bind_reduction(position, action)
        else:
            yield _Entry(position, slots, self._observed(action, self._find_call(action)))

    def _find_call(self, action: Action) -> Call:
        handler = self._handlers.get(action.kind)
        if handler is not None:
            return self._bind_handler(action, handler)
        return self._find_default(action)

    def _find_default(self, action: Action) -> Call:
        return _BINDERS[action.kind](self, action)

    def _bind_handler(self, action: Action, handler: Handler) -> Call:
        parts = action.parts or (action,)
        calls = {part: self._observed_part(action, part) for part in parts}
        stages = {
            part.stage: self._parts.runners[part.stage] for part in parts if part.stage is not None
        }
        context = ActionContext(action, stages, calls)

        def call() -> None:
            handler(context)

        return call

    def _observed_part(self, action: Action, part: Action) -> Call:
        call = self._find_default(part)
        return call if part is action else self._observed(part, call, is_part=True)

    def _observed(self, action: Action, call: Call, *, is_part: bool = False) -> Call:
        if self._observer is None:
            return call
        runner = None if action.stage is None else self._parts.runners.get(action.stage)
        module = None if runner is None else runner.module
        return self._observer.wrap(self.rank, action, call, module, is_part=is_part)

    def _edge_of(self, action: Action) -> tuple[Edge, list[int]]:
        """The edge a message takes, and the microbatches on it in order, this one so far last."""
        message = self._table.message_of(action)
        _, source, _, target = message
        assert target is not None
        edge = Edge(source, target, *self._table.ranks_of_message(message))
        order = self._orders.setdefault(edge, [])
        assert action.microbatch is not None
        order.append(action.microbatch)
        return edge, order

    def _bind_receive(self, action: Action) -> Call:
        assert action.stage is not None
        assert action.microbatch is not None
        edge, order = self._edge_of(action)
        microbatch = action.microbatch
        is_first = microbatch == order[0]
        runner = self._parts.runners[action.stage]
        kind = OutputSlot if RULES[action.kind].moves_forward else GradientSlot
        slot = kind(edge, microbatch, runner, self._promises)
        if self._observer is not None:
            slot = self._observer.wrap_slot(self.rank, action, slot)
        self._slots[self._table.produces(action)[0]] = slot
        promises = self._promises
        post_receive = self.endpoint.post_receive

        def receive() -> None:
            new_header = promises.every or (is_first and promises.first)
            slot.ticket = post_receive(edge, microbatch, new_header=new_header)

        return receive

    def _bind_send(self, action: Action) -> Call:
        assert action.stage is not None
        assert action.microbatch is not None
        edge, order = self._edge_of(action)
        runner = self._parts.runners[action.stage]
        bind = bind_output_send if RULES[action.kind].moves_forward else bind_gradient_send
        return bind(edge, action.microbatch, runner, self.endpoint, self._promises, order=order)

    def _bind_reduction(self, position: int, action: Action) -> Iterator[_Entry]:
        """Reduce over data-parallel ranks, then over the copies of the stage."""
        stage = action.stage
        assert stage is not None
        self._reduced.add(stage)
        exchange = self._parts.exchanges.get(stage)
        copies = self._table.topology.copies_of(stage)
        placement = self._table.placement
        here = [copy for copy in copies if placement.rank_of(copy) == self.rank]
        ranks = sorted({placement.rank_of(copy) for copy in copies})
        come = self._calls_made[copies[0]] = self._calls_made.get(copies[0], 0) + 1
        own = self._find_call(action)
        if exchange is None or come < len(here):
            yield _Entry(position, (), self._observed(action, own))
            return
        slot = _SumSlot(stage)
        post_sum = self.endpoint.post_sum

        def begin() -> None:
            own()
            tensors = exchange.contribution()
            slot.ticket = post_sum(min(copies), ranks, tensors)

        yield _Entry(position, (), self._observed(action, begin))
        yield _Entry(position, (slot,), exchange.finish)


class _SumSlot:
    """Waits for the sum over the copies of a stage."""

    __slots__ = ("ticket", "waits_for")

    def __init__(self, stage: int) -> None:
        self.waits_for: Edge | int = stage
        self.ticket: Any = None

    def deliver(self, message: object) -> None:
        """The tensors were summed in place."""


# ── what each kind does ──────────────────────────────────────────────────────────────────────────


def _nothing() -> None:
    """A call without effect."""


def _bind_compute(name: str) -> Callable[[Executor, Action], Call]:
    def bind(executor: Executor, action: Action) -> Call:
        stage, microbatch = action.stage, action.microbatch
        assert stage is not None
        assert microbatch is not None
        method = getattr(executor._parts.runners[stage], name)
        side = executor._parts.data_parallel.get(stage)
        if side is None or not side.is_sharded:
            return partial(method, microbatch)
        wait = side.wait

        def call() -> None:
            wait()
            method(microbatch)

        return call

    return bind


def _bind_fused(executor: Executor, action: Action) -> Call:
    """Without a handler of one's own, the parts run one after the other."""
    calls = [executor._observed_part(action, part) for part in action.parts]

    def call() -> None:
        for part in calls:
            part()

    return call


def _bind_data_parallel(name: str) -> Callable[[Executor, Action], Call]:
    def bind(executor: Executor, action: Action) -> Call:
        assert action.stage is not None
        side = executor._parts.data_parallel.get(action.stage)
        return _nothing if side is None else getattr(side, name)

    return bind


_BINDERS: Mapping[Kind, Callable[[Executor, Action], Call]] = {
    Kind.F: _bind_compute("forward"),
    Kind.B: _bind_compute("full_backward"),
    Kind.I: _bind_compute("input_backward"),
    Kind.W: _bind_compute("weight_backward"),
    Kind.SEND_F: Executor._bind_send,
    Kind.SEND_B: Executor._bind_send,
    Kind.UNSHARD: _bind_data_parallel("unshard"),
    Kind.RESHARD: _bind_data_parallel("reshard"),
    Kind.REDUCE_GRAD: _bind_data_parallel("reduce"),
    Kind.OVERLAP_F_B: _bind_fused,
}
