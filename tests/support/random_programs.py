"""Random schedules that can run: built by doing, at random, whatever can be done next."""

from __future__ import annotations

import random

from pipeloom.ir.action import Action, Kind, fuse
from pipeloom.ir.placement import Placement
from pipeloom.ir.schedule import Schedule
from pipeloom.ir.topology import Topology


def make_topology(rng: random.Random) -> Topology:
    if rng.random() < 0.25:
        return Topology.bidirectional(rng.randint(1, 3))
    num_stages = rng.randint(1, 6)
    topology = Topology.chain(num_stages)
    edges = [
        (a, b) for a in range(num_stages) for b in range(a + 2, num_stages) if rng.random() < 0.1
    ]
    return topology.with_edges(*edges)


def make_program(rng: random.Random, *, written: bool = False, sharded: bool = False) -> Schedule:
    """A schedule with random topology, placement, order and, if asked for, messages."""
    topology = make_topology(rng)
    num_stages = topology.num_stages
    num_ranks = rng.randint(1, 4)
    if topology.replicas:
        num_parts = num_stages // 2
        num_ranks = max(2, num_parts)
        placement = Placement(
            tuple(s % num_ranks for s in range(num_parts))
            + tuple((s + 1) % num_ranks for s in range(num_parts)),
            num_ranks,
        )
    else:
        placement = Placement(tuple(rng.randrange(num_ranks) for _ in range(num_stages)), num_ranks)
    num_microbatches = rng.randint(1, 4) * len(topology.chains)
    backward = rng.random() < 0.85
    split = rng.choice([0.0, 0.5, 1.0])
    fusing = rng.choice([0.0, 0.5])
    rank_of = placement.rank_of
    rows: list[list[Action]] = [[] for _ in range(num_ranks)]
    waiting: list[Action] = []
    for stage in range(num_stages):
        for mb in topology.microbatches_of(stage, num_microbatches):
            waiting.append(Action(Kind.F, stage, mb))
            if backward and rng.random() < split:
                waiting += [Action(Kind.I, stage, mb), Action(Kind.W, stage, mb)]
            elif backward:
                waiting.append(Action(Kind.B, stage, mb))
    made: set[tuple[str, int, int]] = set()
    here: set[tuple[str, int, int, int]] = set()
    to_send: list[tuple[str, int, int, int]] = []

    def is_ready(action: Action) -> bool:
        kind, stage, mb = action.kind.value, action.stage, action.microbatch
        assert stage is not None
        assert mb is not None
        if kind == "W":
            return ("I", stage, mb) in made
        if kind == "F":
            fact, near = "F", topology.predecessors(stage)
        else:
            if ("F", stage, mb) not in made:
                return False
            fact, near = "I", topology.successors(stage)
        for other in near:
            if (fact, other, mb) not in made:
                return False
            travels = written and rank_of(other) != rank_of(stage)
            if travels and (fact, other, mb, stage) not in here:
                return False
        return True

    def do(action: Action) -> None:
        kind, stage, mb = action.kind.value, action.stage, action.microbatch
        assert stage is not None
        assert mb is not None
        waiting.remove(action)
        if kind == "W":
            return
        fact = "F" if kind == "F" else "I"
        made.add((fact, stage, mb))
        near = topology.successors(stage) if fact == "F" else topology.predecessors(stage)
        to_send.extend(
            (fact, stage, mb, other) for other in near if rank_of(other) != rank_of(stage)
        )

    while waiting or (written and to_send):
        ready = [action for action in waiting if is_ready(action)]
        if written and to_send and (not ready or rng.random() < 0.5):
            fact, stage, mb, other = message = to_send.pop(rng.randrange(len(to_send)))
            here.add(message)
            near = topology.successors(stage) if fact == "F" else topology.predecessors(stage)
            far = topology.predecessors(other) if fact == "F" else topology.successors(other)
            send, receive = (
                (Kind.SEND_F, Kind.RECV_F) if fact == "F" else (Kind.SEND_B, Kind.RECV_B)
            )
            rows[rank_of(stage)].append(
                Action(send, stage, mb, (), other if len(near) > 1 else None)
            )
            rows[rank_of(other)].append(
                Action(receive, other, mb, (), stage if len(far) > 1 else None)
            )
            continue
        action = rng.choice(ready)
        stage = action.stage
        assert stage is not None
        do(action)
        partners = [
            other
            for other in ready
            if other != action
            and rank_of(other.stage or 0) == rank_of(stage)
            and (other.kind is Kind.F) != (action.kind is Kind.F)
            and action.kind is not Kind.W
            and other.kind is not Kind.W
        ]
        if partners and rng.random() < fusing:
            other = rng.choice(partners)
            do(other)
            pair = (action, other) if action.kind is Kind.F else (other, action)
            rows[rank_of(stage)].append(fuse(*pair))
        else:
            rows[rank_of(stage)].append(action)
    if sharded:
        for rank, row in enumerate(rows):
            for stage in placement.stages_on(rank):
                if rng.random() < 0.6:
                    rows[rank] = row = _gather(rng, row, stage)
        if backward:
            for group in topology.replicas or [(s,) for s in range(num_stages)]:
                for stage in group:
                    rows[rank_of(stage)].append(Action(Kind.REDUCE_GRAD, stage))
    return Schedule(
        placement=placement,
        topology=topology,
        num_microbatches=num_microbatches,
        actions=tuple(map(tuple, rows)),
        has_communication=written and any("SEND" in str(a) for row in rows for a in row),
        name="random",
    )


def _gather(rng: random.Random, row: list[Action], stage: int) -> list[Action]:
    """Gather a stage before it is used, here and there release and gather it again."""
    made: list[Action] = []
    gathered = False
    for action in row:
        uses = any(
            part.stage == stage and part.kind in (Kind.F, Kind.B, Kind.I, Kind.W)
            for part in action.parts or (action,)
        )
        if gathered and rng.random() < 0.2:
            made.append(Action(Kind.RESHARD, stage))
            gathered = False
        if not gathered and (uses or rng.random() < 0.3):
            made.append(Action(Kind.UNSHARD, stage))
            gathered = True
        made.append(action)
    if gathered:
        made.append(Action(Kind.RESHARD, stage))
    return made
