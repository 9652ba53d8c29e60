"""From computations to programs, in the order in which torch puts sends, receives and the rest.

::

    compute      0F0  1F0  …                         _add_unshard_reshard, _add_reduce_grad
    program      0UNSHARD  0F0  0SEND_F0  …          _add_send_recv, _defer_recv_ops

What an action waits for and what it sends is asked of :mod:`pipeloom.ir.dependencies`; only the
places are torch's, so that a dumped file is the file torch dumps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from pipeloom.ir.action import Action
from pipeloom.ir.dependencies import Dependencies, Role
from pipeloom.ir.placement import Placement
from pipeloom.ir.products import Product
from pipeloom.ir.questions import role_of, simple_actions, whole_of
from pipeloom.ir.topology import Topology
from pipeloom.torch_api._actions import (
    REDUCE_GRAD,
    RESHARD,
    UNSHARD,
    B,
    W,
    _Action,
    _ComputationType,
    from_ir,
    to_ir,
)


def make_table(
    stage_to_rank: Callable[[int], int], num_stages: int, num_ranks: int
) -> Dependencies:
    """The dependency table of a chain; no question asked here counts microbatches."""
    ranks = tuple(stage_to_rank(stage) for stage in range(num_stages))
    return Dependencies(
        Topology.chain(num_stages),
        Placement(ranks, max(num_ranks, *ranks, 0) + 1),
        num_microbatches=0,
        has_communication=True,
    )


def parts_of(action: _Action) -> tuple[_Action, ...]:
    """The parts of a fused action; an ordinary one is its own only part."""
    return (action,) if action.sub_actions is None else action.sub_actions


def _requires_reduce_grad(action_type: _ComputationType) -> bool:
    """True for what leaves gradients of weights behind."""
    return action_type in (W, B)


def _add_reduce_grad(
    actions: Sequence[_Action | None], n_microbatches: int
) -> list[_Action | None]:
    """Reduce a stage's gradients right after its last backward; idle cells go.

    >>> row = [_Action.from_str(text) for text in ("0F0", "", "0B0")]
    >>> _add_reduce_grad(row, 1)
    [0F0, 0B0, 0REDUCE_GRAD]
    """
    reduced: list[_Action | None] = []
    finished: dict[int, int] = {}
    for action in actions:
        if action is None:
            continue
        reduced.append(action)
        for part in parts_of(action):
            if _requires_reduce_grad(part.computation_type):
                stage = part.stage_index
                finished[stage] = finished.get(stage, 0) + 1
                if finished[stage] == n_microbatches:
                    reduced.append(_Action(stage, REDUCE_GRAD))
    return reduced


def _add_unshard_reshard(
    compute_actions: Sequence[_Action | None], max_active_stages: int = 3
) -> list[_Action]:
    """Gather the parameters of the next few stages ahead of time, release those not among them.

    >>> row = [_Action.from_str(text) for text in ("0F0", "1F0")]
    >>> _add_unshard_reshard(row, max_active_stages=1)
    [0UNSHARD, 0F0, 0RESHARD, 1UNSHARD, 1F0, 1RESHARD]
    """
    program: list[_Action] = []
    # A set, because torch releases stages in the order in which a set has them.
    gathered: set[int] = set()
    for position, action in enumerate(compute_actions):
        if action is None:
            continue
        upcoming = _find_next_stages(compute_actions, position, max_active_stages)
        for stage in [stage for stage in gathered if stage not in upcoming]:
            gathered.remove(stage)
            program.append(_Action(stage, RESHARD))
        for stage in upcoming:
            if stage not in gathered:
                gathered.add(stage)
                program.append(_Action(stage, UNSHARD))
        program.append(action)
    return program + [_Action(stage, RESHARD) for stage in gathered]


def _find_next_stages(
    actions: Sequence[_Action | None], position: int, count: int
) -> dict[int, None]:
    stages: dict[int, None] = {}
    for index in range(position, len(actions)):
        action = actions[index]
        if action is not None:
            stages.update(dict.fromkeys(part.stage_index for part in parts_of(action)))
            if len(stages) >= count:
                break
    return stages


def _merge_bw(compute_actions: Sequence[_Action | None]) -> list[_Action]:
    """Make one full backward of an I and the W that follows it.

    >>> row = [_Action.from_str(text) for text in ("0F0", "0I0", "", "0W0")]
    >>> _merge_bw(row)
    [0F0, 0B0]
    """
    merged: list[_Action] = []
    for action in compute_actions:
        if action is None:
            continue
        whole = whole_of(to_ir(merged[-1]), to_ir(action)) if merged else None
        if whole is None:
            merged.append(action)
        else:
            merged[-1] = from_ir(whole)
    return merged


def _add_send_recv(
    compute_actions: Mapping[int, Sequence[_Action | None]],
    stage_to_rank: Callable[[int], int],
    num_stages: int,
) -> dict[int, list[_Action]]:
    """Add a send and a receive for everything that one rank computes for another.

    The ranks take turns, one action each; what an action sends is put right behind it, and at the
    same moment the receive at the end of the other rank's program.

    >>> rows = {0: ["0F0", "0B0"], 1: ["1F0", "1B0"]}
    >>> order = {rank: [_Action.from_str(text) for text in row] for rank, row in rows.items()}
    >>> _add_send_recv(order, lambda stage: stage, 2)[1]
    [1RECV_F0, 1F0, 1B0, 1SEND_B0]
    """
    table = make_table(stage_to_rank, num_stages, max(compute_actions, default=0))
    program: dict[int, list[_Action]] = {rank: [] for rank in compute_actions}
    there: set[Product] = set()
    left = {rank: list(reversed(compute_actions[rank])) for rank in sorted(compute_actions)}
    for rank, row in left.items():
        if not row:
            raise AssertionError(f"Malformed compute schedule: rank {rank} has no actions")
    while left:
        progress = False
        for rank in list(left):
            action = left[rank][-1]
            if action is not None:
                parts = simple_actions(to_ir(action))
                if not all(there.issuperset(_awaited(table, part)) for part in parts):
                    continue
                program[rank].append(action)
                for part in parts:
                    there.update(table.produces(part))
                    for send, receive in _messages_of(table, part):
                        program[rank].append(from_ir(send))
                        there.update(table.produces(receive))
                        assert receive.stage is not None
                        program[stage_to_rank(receive.stage)].append(from_ir(receive))
            left[rank].pop()
            if not left[rank]:
                del left[rank]
            progress = True
        if not progress:
            waiting = "; ".join(f"rank {rank} cannot run {left[rank][-1]}" for rank in left)
            raise AssertionError(
                f"Malformed compute schedule, can't schedule sends/recvs: {waiting}"
            )
    return program


def _awaited(table: Dependencies, action: Action) -> tuple[Product, ...]:
    """What must be there before an action; a reduction stands where the order puts it."""
    return () if role_of(action) is Role.REDUCE else table.needs(action)


def _messages_of(table: Dependencies, action: Action) -> Iterator[tuple[Action, Action]]:
    for product in table.produces(action):
        for stage in table.remote_consumers(product):
            yield table.make_message(product, stage)


def _defer_recv_ops(
    actions: Mapping[int, Sequence[_Action]], stage_to_rank: Callable[[int], int]
) -> dict[int, list[_Action]]:
    """Receive as late as is safe: right before the computation that uses the data.

    Of two ranks that exchange messages the lower one still receives before it sends, so that one
    of them always has its receive posted.

    >>> texts = {0: ["0F0", "0SEND_F0"], 1: ["1RECV_F0", "1UNSHARD", "1F0"]}
    >>> program = {rank: [_Action.from_str(t) for t in row] for rank, row in texts.items()}
    >>> _defer_recv_ops(program, lambda stage: stage)[1]
    [1UNSHARD, 1RECV_F0, 1F0]
    """
    stages = [part.stage_index for row in actions.values() for a in row for part in parts_of(a)]
    table = make_table(stage_to_rank, max(stages, default=0) + 1, max(actions, default=0))
    return {rank: _defer_on_rank(rank, row, table) for rank, row in actions.items()}


def _defer_on_rank(rank: int, row: Sequence[_Action], table: Dependencies) -> list[_Action]:
    program: list[_Action] = []
    deferred: dict[Product, tuple[_Action, int]] = {}
    for action in row:
        simple = to_ir(action)
        role = role_of(simple)
        if role is Role.RECEIVE:
            sender, _ = table.ranks_of_message(table.message_of(simple))
            deferred[table.produces(simple)[0]] = action, sender
            continue
        if role is Role.SEND:
            _, receiver = table.ranks_of_message(table.message_of(simple))
            due = [product for product, (_, sender) in deferred.items() if sender == receiver]
            wanted = due if rank < receiver else []
        else:
            parts = simple_actions(simple)
            wanted = [product for part in parts for product in _awaited(table, part)]
        program += [deferred.pop(product)[0] for product in wanted if product in deferred]
        program.append(action)
    if deferred:
        left = [action for action, _ in deferred.values()]
        raise AssertionError(
            f"Malformed input schedule on rank {rank}: leftover RECV ops with no consumer found: "
            f"{left}. Every RECV must be consumed by a downstream compute op."
        )
    return program
