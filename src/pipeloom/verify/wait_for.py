"""Why a program is stuck: who waits for whom, told as a story.

::

    rank 0 waits at 0F1 (for 0RECV_B0, queued behind 0SEND_F1)
        for rank 1, which waits at 1SEND_B0 for rank 0

The nodes of the graph are the ranks, each standing before its next action, and the operations that
were posted and have not completed. Every stuck node waits for another stuck node or for something
that never comes; a circle of nodes is a deadlock.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, NamedTuple

from pipeloom.verify.program import NOWHERE
from pipeloom.verify.report import Place, Violation

if TYPE_CHECKING:
    from pipeloom.verify.deadlock import Machine


class Node(NamedTuple):
    """A rank before its next action, or (``is_rank`` false) a posted operation of it."""

    rank: int
    #: The location of the action; the end of the row for a rank that has come to its end.
    location: int
    is_rank: bool


class Wait(NamedTuple):
    """What a node waits for; ``target`` is ``None`` for what never comes."""

    target: Node | None
    #: What is waited for, where that is not plain from the two nodes.
    what: str = ""


def explain_deadlock(machine: Machine) -> Iterator[Violation]:
    """Every circle of waits, none sharing a node with another; or one wait that has no end."""
    graph = _Graph(machine)
    told: set[Node] = set()
    for approach, cycle in graph.find_cycles():
        if told.isdisjoint(cycle):
            told.update(cycle)
            yield graph.tell_cycle(approach, cycle)
    if not told:
        yield graph.tell_endless(graph.find_endless())


def is_circular(violation: Violation) -> bool:
    """True for a wait in a circle over several ranks. Any other deadlock is the consequence of
    something that is missing or misplaced, which is a violation of its own."""
    return len({violation.rank, *(place.rank for place in violation.related)}) > 1 and (
        violation.hint != _HINT_ENDLESS
    )


_HINT_ENDLESS = "add what is missing, or move it before what waits for it"


class _Graph:
    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.program = machine.program

    # ── the edges ────────────────────────────────────────────────────────────────────────────

    def rank_node(self, rank: int) -> Node:
        return Node(rank, self.machine.at[rank], True)

    def operation(self, location: int) -> Node:
        return Node(self.program.rank_at(location), location, False)

    def stuck_ranks(self) -> Iterator[Node]:
        for rank in range(len(self.machine.at)):
            node = self.rank_node(rank)
            if next(self.waits_of(node), None) is not None:
                yield node

    def waits_of(self, node: Node) -> Iterator[Wait]:
        if not node.is_rank:
            yield self.wait_of_operation(node)
        elif node.location == self.program.starts[node.rank + 1]:
            yield from self.waits_at_end(node)
        else:
            yield from self.waits_of_rank(node)

    def waits_at_end(self, node: Node) -> Iterator[Wait]:
        start, end = self.program.starts[node.rank], node.location
        for head in sorted(self.machine.heads):
            if start <= head < end:
                yield Wait(self.operation(head), f"for {self.name(head)}")

    def waits_of_rank(self, node: Node) -> Iterator[Wait]:
        machine, program, location = self.machine, self.program, node.location
        unmet = [
            need
            for need in program.waits.get(location, ())
            if need == NOWHERE or not machine.done[need]
        ]
        for need in unmet:
            if need == NOWHERE:
                yield Wait(None, "what it needs is made nowhere")
            elif program.rank_at(need) != node.rank:
                yield Wait(self.rank_node(program.rank_at(need)), f"for {self.name(need)}")
            elif need >= location:
                yield Wait(node, f"for {self.name(need)}, which comes only later in its own row")
            else:
                yield Wait(self.operation(need), f"for {self.name(need)}")
        if unmet:
            return
        if machine.queue_of[location] != NOWHERE:
            yield self.wait_for_match(machine.matches[location], blocking=True)
            return
        for partner in program.collectives.get(location, ()):
            if partner == NOWHERE:
                yield Wait(None, "a copy of the stage never takes part")
            elif not machine.posted[partner]:
                yield Wait(
                    self.rank_node(program.rank_at(partner)), f"to reach {self.name(partner)}"
                )

    def wait_of_operation(self, node: Node) -> Wait:
        machine = self.machine
        head = machine.heads[machine.queue_of[node.location]]
        if head != node.location:
            return Wait(self.operation(head), f"queued behind {self.name(head)}")
        return self.wait_for_match(machine.matches[node.location], blocking=False)

    def wait_for_match(self, match: int, *, blocking: bool) -> Wait:
        machine = self.machine
        if match == NOWHERE:
            return Wait(None, "nobody ever meets it")
        if not machine.posted[match]:
            # A blocking rank waits at the very action that meets another; it needs no words.
            what = "" if blocking else f"to reach {self.name(match)}"
            return Wait(self.rank_node(self.program.rank_at(match)), what)
        return Wait(self.operation(machine.heads[machine.queue_of[match]]))

    def name(self, location: int) -> str:
        return str(self.program.action_at(location))

    # ── circles ──────────────────────────────────────────────────────────────────────────────

    def find_cycles(self) -> Iterator[tuple[list[Node], list[Node]]]:
        """A circle, and the way to it, for every edge that leads back into the path of a
        depth-first walk."""
        finished: set[Node] = set()
        for start in self.stuck_ranks():
            if start in finished:
                continue
            path = {start: self.waits_of(start)}  # in order: a dict keeps it
            while path:
                node = next(reversed(path))
                wait = next(path[node], None)
                if wait is None:
                    del path[node]
                    finished.add(node)
                elif wait.target in path:
                    nodes = list(path)
                    entry = nodes.index(wait.target)
                    yield nodes[:entry], nodes[entry:]
                elif wait.target is not None and wait.target not in finished:
                    path[wait.target] = self.waits_of(wait.target)

    def find_endless(self) -> list[Node]:
        """A path from a stuck rank to a wait for what never comes. There is no circle."""
        node: Node | None = next(self.stuck_ranks())
        path = []
        while node is not None:
            path.append(node)
            node = next(self.waits_of(node)).target
        return path

    # ── the story ────────────────────────────────────────────────────────────────────────────

    def tell_cycle(self, approach: list[Node], cycle: list[Node]) -> Violation:
        turns = [i for i, node in enumerate(cycle) if cycle[i - 1].rank != node.rank]
        if not turns:
            node = cycle[0]
            wait = next(wait for wait in self.waits_of(node) if wait.target in cycle)
            why = f"rank {node.rank} waits at {self.name(node.location)} {wait.what}"
            return self.violation(why, cycle, _HINT_ENDLESS)
        at_ranks = [i for i in turns if cycle[i].is_rank]
        if at_ranks:
            cycle = cycle[at_ranks[0] :] + cycle[: at_ranks[0]]
            approach = []
        else:
            # A circle of messages alone: begin with the rank that waits for one of them, if its
            # own messages are what it waits for.
            own = [node for node in approach if node.rank == cycle[0].rank]
            approach = own if approach[-len(own) :] == own else []
        return self.violation(
            f"{self.tell([*approach, *cycle, cycle[0]])}: a circle",
            [*approach, *cycle],
            "exchange two of these actions on one of the ranks, so that both ends come to a "
            "message in one common order",
        )

    def tell_endless(self, path: list[Node]) -> Violation:
        last = next(self.waits_of(path[-1]))
        why = f"{self.tell(path)}; {last.what} ({self.name(path[-1].location)})"
        return self.violation(why, path, _HINT_ENDLESS)

    def tell(self, nodes: list[Node]) -> str:
        """ "rank 2 waits at … for rank 1, which waits at … for rank 0"; the last node, where it is
        the only one of its rank, is only named."""
        waits = [
            next(wait.what for wait in self.waits_of(node) if wait.target == after)
            for node, after in pairwise(nodes)
        ]
        waits.append("")
        groups = [
            list(group) for _, group in groupby(range(len(nodes)), key=lambda i: nodes[i].rank)
        ]
        text = ""
        for number, group in enumerate(groups):
            first = nodes[group[0]]
            text += f" for rank {first.rank}" if number else f"rank {first.rank}"
            is_last = number == len(groups) - 1
            if is_last and len(group) == 1 and number:
                break
            text += ", which " if number else " "
            if not first.is_rank:
                text += f"waits with {self.name(first.location)}"
            elif first.location == self.program.starts[first.rank + 1]:
                text += "waits at its end"
            else:
                text += f"waits at {self.name(first.location)}"
            details = [waits[i] for i in group if waits[i]]
            if details:
                text += f" ({', '.join(details)})"
        return text

    def violation(self, why: str, nodes: list[Node], hint: str) -> Violation:
        places: dict[Place, None] = {}
        for node in nodes:
            if node.location < self.program.starts[node.rank + 1]:
                places[self.program.place_of(node.location)] = None
        first, *others = places
        return Violation("DEADLOCK", why, hint, *first, related=tuple(others))
