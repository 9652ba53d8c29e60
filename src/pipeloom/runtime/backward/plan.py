"""What I computes, what it keeps, and what W computes, for one shape of graph.

Nodes are of two kinds. *Data* nodes lie between the outputs and the stage's inputs; *weight-only*
nodes reach parameters and no input. An edge from the first kind to the second is where a weight
enters; the gradient that would flow through it is W's business::

      output                          data          weight-only
        │
    Addmm ───edge 2──► T ──► weight   Addmm         T, weight
        │╲──edge 0──────────► bias                  bias
        │
    LayerNorm ────────────► scale     LayerNorm     scale
        │
      input

Each such edge is *deferred* (a recipe or a later run of its node gives the gradient at W) or
*computed in I* (the engine returns its gradient, which is kept until W). I is one run of torch's
engine that returns the gradients of the inputs, of the results of deferred nodes (what a recipe
needs), and of the other edges. The engine computes nothing that was not asked for, so it skips the
weight products by itself, and frees each node as it passes. Compiled code is a single node; where
it can, it leaves its own weight products undone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction

from pipeloom.runtime.backward.checkpointing import saved_names, saves_recomputed
from pipeloom.runtime.backward.compiled.cut import Cut
from pipeloom.runtime.backward.compiled.finish import recipes_of
from pipeloom.runtime.backward.compiled.parts import Finish
from pipeloom.runtime.backward.compiled.windows import Window
from pipeloom.runtime.backward.recipes import Recipe
from pipeloom.runtime.backward.regions import Entry, Regions, Turn
from pipeloom.runtime.backward.views import follow
from pipeloom.runtime.backward.walk import Edge, Graph
from pipeloom.runtime.backward.ways import Halve, Ways, find_ways

__all__ = ["Deferred", "Halved", "InInput", "Plan", "Rerun", "Unit", "make_plan"]


Unit = tuple[int, int | None]  # a node; if it is compiled, which of its finishes


@dataclass(frozen=True, slots=True)
class Deferred:
    """One operand whose gradient a recipe computes at W."""

    node: int
    operand: int
    recipe: Recipe
    capture: int | None  # of the result's gradient; compiled code leaves what its recipe needs
    target: Edge
    leaf: int | None  # the parameter's node, where only a plain chain lies between
    transposed: bool
    chained: bool  # the chain is more than the parameter itself
    cast: bool  # its type or device changes on the way
    views: tuple[Edge, ...]  # what the chain is, if more than a transposition
    packed: bool  # the activation is not there before its node runs
    unit: Unit  # the same for what is computed at one time: the products of a node or of a finish
    work: int | None = None  # about how many multiplications, where the tensors do not tell
    window: Window | None = None  # of compiled code: the part of the gradient that this gives
    is_part: bool = False  # it is seen through views or a window

    def see(self, total: Tensor, nodes: Mapping[int, Any]) -> Tensor | None:
        """What is added to, of a tensor of the parameter's shape, if it can be seen so."""
        seen = follow(total, nodes, self.views)
        if seen is None or self.window is None:
            return seen
        try:
            return self.window.see(seen.mT if self.transposed else seen)
        except RuntimeError:  # strides that allow no such view
            return None


@dataclass(frozen=True, slots=True)
class Rerun:
    """One node that the engine runs again at W, for its weight operands alone."""

    node: int
    captures: tuple[tuple[int, int], ...]  # which output's gradient, in which capture
    targets: tuple[Edge, ...]


@dataclass(frozen=True, slots=True)
class Halved:
    """One compiled node that leaves the gradients of some operands undone in I."""

    node: int
    cut: Cut
    uses: tuple[tuple[Finish, tuple[Deferred, ...]], ...]


@dataclass(frozen=True, slots=True)
class InInput:
    """One edge whose gradient comes out of I."""

    capture: int
    target: Edge


@dataclass(frozen=True, slots=True)
class Plan:
    """How the backward of one shape of graph is split."""

    captures: tuple[Edge, ...]
    deferred: tuple[Deferred, ...]
    taken_by: Mapping[int, Sequence[int]]  # packed ones, by place → nodes whose run unpacks them
    reruns: tuple[Rerun, ...]
    halved: tuple[Halved, ...]
    in_input: tuple[InInput, ...]
    turns: tuple[Turn, ...]  # transpositions that the plan relies on
    activations: tuple[tuple[int, str, bool], ...]  # node, attribute, and whether it is packed
    group: dict[int, int]  # weight-only node → its connected group
    in_place: frozenset[int]  # parameters reached by plain chains alone
    weight_only: frozenset[int]
    passed_later: frozenset[int]  # those of them that W needs; the rest has gone by in I
    saving: tuple[int, ...]  # those of these that save tensors
    needs_roots: bool  # some of these live only as long as the graph above them
    cuts_off: bool  # operands are cut from the graph, as others may have left things with its nodes
    leaves: tuple[int, ...]  # every parameter's node
    leaf_set: frozenset[int]
    deferred_leaves: frozenset[int]


def make_plan(
    graph: Graph,
    *,
    use_recipes: bool,
    hooked: bool,
    rerun: Callable[[Any, str], bool],
    packed: Callable[[Any, Recipe], bool | None],
    halve: Halve,
) -> Plan:
    """Decide, for one graph, what is deferred.

    ``hooked``: the forward registered hooks, perhaps on tensors made of parameters. A gradient that
    stops at such a tensor in I and enters there at W would pass its hooks twice; so what comes out
    of I then goes down to the parameters at once.
    ``rerun(node, type name)`` says whether a node without recipe may be run again at W.
    ``packed(node, recipe)`` says whether the activation is not there before its node runs
    (``None``: nor can it be taken then).
    ``halve(node, operands)`` cuts a compiled node, so that it leaves what it can of the operands.
    """
    regions = Regions(graph)
    entries = regions.entries()
    group = regions.groups(entries)
    ways = find_ways(regions, entries, use_recipes=use_recipes, rerun=rerun, packed=packed)
    kept: dict[Edge, list[Entry]] = {}
    while True:
        ways.find_cuts(halve)
        in_input = {edge for edge, uses in entries.items() if not all(use in ways for use in uses)}
        spoiled = _spoiled(regions, graph, entries, group, in_input, hooked)
        kept = {
            edge: uses
            for edge, uses in entries.items()
            if edge not in in_input and group[edge[0]] not in spoiled
        }
        # A node can only be cut where all that it leaves is kept for W.
        if ways.narrow({use for uses in kept.values() for use in uses}):
            break
    wanted = [edge for edge in entries if edge in in_input and group[edge[0]] not in spoiled]
    wanted += [(leaf, 0) for leaf in regions.leaves if group.get(leaf) in spoiled]
    return _Assembly(regions, ways, kept, hooked=hooked).plan(wanted, group, spoiled)


def _spoiled(
    regions: Regions,
    graph: Graph,
    entries: Mapping[Edge, list[Entry]],
    group: Mapping[int, int],
    in_input: set[Edge],
    hooked: bool,
) -> set[int]:
    """Groups that are computed in I as a whole, at their parameters."""
    # Asking the engine for an edge makes it run everything above, the deferred edges that lead
    # there included.
    below, bit = regions.reaches(edge[0] for edge in in_input)
    spoiled = {group[node] for node, _ in entries if below[node] & ~bit.get(node, 0)}
    # What a checkpoint recomputes is there during I and gone at W.
    spoiled |= {group[node] for node in group if saves_recomputed(graph.nodes[node])}
    if hooked:
        spoiled |= {group[node] for node, _ in in_input if node not in regions.leaf_set}
    return spoiled


class _Assembly:
    """Puts a plan together from what was decided for each edge."""

    def __init__(
        self, regions: Regions, ways: Ways, kept: Mapping[Edge, list[Entry]], *, hooked: bool
    ) -> None:
        self.regions, self.ways, self.kept, self.hooked = regions, ways, kept, hooked
        self.captures: dict[Edge, int] = {}
        self._asked_below: list[int] | None = None  # known once all captures are
        self.plain = {edge: regions.plain_target(edge) for edge in kept}

    def plan(self, wanted: list[Edge], group: dict[int, int], spoiled: set[int]) -> Plan:
        regions, plain = self.regions, self.plain
        deferred = tuple(
            self._defer(use, edge, *self.ways.recipes[use], capture=self._capture((use[0], 0)))
            for edge, uses in self.kept.items()
            for use in uses
            if use in self.ways.recipes
        )
        reruns = self._reruns()
        halved = tuple(self._halve(node, cut) for node, cut in self.ways.cuts.items())
        in_input = tuple(InInput(self._capture(edge), edge) for edge in wanted)
        indirect = {
            group[edge[0]]
            for edge, uses in self.ways.entries.items()
            if group[edge[0]] not in spoiled
            and edge[0] not in regions.leaf_set
            and not (plain.get(edge) and not any(use in self.ways.reruns for use in uses))
        }
        below_kept = regions.downward(edge[0] for edge in self.kept)
        passed_later = frozenset(
            node for node in group if group[node] not in spoiled or node in regions.leaf_set
        )
        return Plan(
            captures=tuple(self.captures),
            deferred=deferred,
            taken_by=self._taken_by(deferred),
            reruns=reruns,
            halved=halved,
            in_input=in_input,
            activations=tuple(
                {(use.node, use.recipe.saved, use.packed) for use in deferred if use.recipe.saved}
            ),
            turns=tuple({turn for target in plain.values() if target for turn in target.turns}),
            group=group,
            in_place=frozenset(leaf for leaf in regions.leaves if group.get(leaf) not in indirect),
            weight_only=frozenset(group),
            passed_later=passed_later,
            saving=tuple(node for node in passed_later if saved_names(regions.shape.types[node])),
            needs_roots=any(
                issubclass(regions.shape.types[node], BackwardCFunction) for node in passed_later
            ),
            cuts_off=self.hooked
            or any(issubclass(kind, BackwardCFunction) for kind in regions.shape.types)
            or any(self._is_left(use.node) for use in deferred),
            leaves=regions.leaves,
            leaf_set=regions.leaf_set,
            deferred_leaves=frozenset(below_kept & regions.leaf_set - {edge[0] for edge in wanted}),
        )

    def _capture(self, edge: Edge) -> int:
        return self.captures.setdefault(edge, len(self.captures))

    def _defer(
        self,
        use: Entry,
        edge: Edge,
        recipe: Recipe,
        packed: bool,
        *,
        capture: int | None,
        finish: Finish | None = None,
        at: int | None = None,
    ) -> Deferred:
        plain = self.plain[edge]
        views = plain.views if plain else ()
        window = finish.window if finish else None
        return Deferred(
            node=use[0],
            operand=use[1],
            recipe=recipe,
            capture=capture,
            target=edge,
            leaf=plain.leaf if plain else None,
            transposed=bool(plain and plain.transposed),
            chained=bool(plain and plain.chained),
            cast=bool(plain and plain.cast),
            views=views,
            packed=packed,
            unit=(use[0], at),
            work=finish.work // len(finish.operands) if finish else None,
            window=window,
            is_part=bool(views) or window is not None,
        )

    def _reruns(self) -> tuple[Rerun, ...]:
        targets: dict[int, dict[Edge, None]] = {}
        for edge, uses in self.kept.items():
            for use in uses:
                if use in self.ways.reruns:
                    targets.setdefault(use[0], {})[edge] = None
        produced: dict[int, set[int]] = {}
        for edges in (*self.regions.shape.children, self.regions.shape.roots):
            for child, output_nr in edges:
                produced.setdefault(child, set()).add(output_nr)
        return tuple(
            Rerun(
                node,
                tuple((nr, self._capture((node, nr))) for nr in sorted(produced[node])),
                tuple(edges),
            )
            for node, edges in targets.items()
        )

    def _taken_by(self, deferred: Sequence[Deferred]) -> dict[int, Sequence[int]]:
        """Where packed activations are taken: as the engine comes to their node, or, if it only
        brings a gradient there, as it comes to those before.
        """
        packed = {place: use.node for place, use in enumerate(deferred) if use.packed}
        return {
            place: list(dict.fromkeys(self.regions.parents[node]))
            if self._is_left(node)
            else [node]
            for place, node in packed.items()
        }

    def _is_left(self, node: int) -> bool:
        """Whether the engine only brings a gradient to a node, and so does not free it."""
        if self._asked_below is None:
            asked = {node for node, _ in self.captures} | self.regions.inputs
            self._asked_below, _ = self.regions.reaches(asked)
        below = self._asked_below
        children = self.regions.shape.children[node]
        return not any(child >= 0 and below[child] for child, _ in children)

    def _halve(self, node: int, cut: Cut) -> Halved:
        asked = self.ways.asked.get(node)
        if asked is not None:
            self._capture(asked)
        recipes, children = recipes_of(cut), self.regions.shape.children[node]
        return Halved(
            node,
            cut,
            tuple(
                (
                    finish,
                    tuple(
                        self._defer(
                            (node, operand),
                            children[operand],
                            recipes[operand],
                            False,
                            capture=None,
                            finish=finish,
                            at=place,
                        )
                        for operand in finish.operands
                    ),
                )
                for place, finish in enumerate(cut.finishes)
            ),
        )
