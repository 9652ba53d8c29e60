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
weight products by itself, and frees each node as it passes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pipeloom.runtime.backward.checkpointing import saves_recomputed
from pipeloom.runtime.backward.recipes import RECIPES, Recipe
from pipeloom.runtime.backward.regions import Entry, PlainTarget, Regions, Turn
from pipeloom.runtime.backward.walk import Edge, Graph

__all__ = ["Deferred", "InInput", "Plan", "Rerun", "make_plan"]

# Backward nodes that compute both halves in one kernel: running them twice costs both twice.
FUSED_TYPES = frozenset({"CudnnRnnBackward0", "MiopenRnnBackward0", "MkldnnRnnLayerBackward0"})


@dataclass(frozen=True, slots=True)
class Deferred:
    """One operand whose gradient a recipe computes at W."""

    node: int
    operand: int
    recipe: Recipe
    capture: int
    target: Edge
    leaf: int | None  # the parameter's node, where only a plain chain lies between
    transposed: bool
    chained: bool  # the chain is more than the parameter itself
    cast: bool  # its type or device changes on the way
    recomputed: bool  # the activation comes out of a checkpoint's recomputation


@dataclass(frozen=True, slots=True)
class Rerun:
    """One node that the engine runs again at W, for its weight operands alone."""

    node: int
    captures: tuple[tuple[int, int], ...]  # which output's gradient, in which capture
    targets: tuple[Edge, ...]


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
    reruns: tuple[Rerun, ...]
    in_input: tuple[InInput, ...]
    turns: tuple[Turn, ...]  # transpositions that the plan relies on
    group: dict[int, int]  # weight-only node → its connected group
    in_place: frozenset[int]  # parameters reached by plain chains alone
    weight_only: frozenset[int]
    passed_later: frozenset[int]  # those of them that W needs; the rest has gone by in I
    leaves: tuple[int, ...]  # every parameter's node
    leaf_set: frozenset[int]
    deferred_leaves: frozenset[int]


def make_plan(
    graph: Graph,
    *,
    use_recipes: bool,
    hooked: bool,
    rerun: Callable[[Any, str], bool],
    recomputed: Callable[[Any, Recipe], bool | None],
) -> Plan:
    """Decide, for one graph, what is deferred.

    ``hooked``: the forward registered hooks, perhaps on tensors made of parameters. A gradient that
    stops at such a tensor in I and enters there at W would pass its hooks twice; so what comes out
    of I then goes down to the parameters at once.
    ``rerun(node, type name)`` says whether a node without recipe may be run again at W.
    ``recomputed(node, recipe)`` says whether the activation is only there while a checkpoint
    recomputes (``None``: it is, and cannot be taken from there).
    """
    regions = Regions(graph)
    entries = regions.entries()
    group = regions.groups(entries)
    recipes: dict[Entry, tuple[Recipe, bool]] = {}
    if use_recipes:
        recipes = _find_recipes(regions, entries, recomputed)
    reruns = _find_reruns(regions, entries, recipes, rerun)
    in_input = {
        edge
        for edge, uses in entries.items()
        if not all(use in recipes or use in reruns for use in uses)
    }
    spoiled = _spoiled(regions, graph, entries, group, in_input, hooked)
    kept = {
        edge: uses
        for edge, uses in entries.items()
        if edge not in in_input and group[edge[0]] not in spoiled
    }
    wanted = [edge for edge in entries if edge in in_input and group[edge[0]] not in spoiled]
    wanted += [(leaf, 0) for leaf in regions.leaves if group.get(leaf) in spoiled]
    plain = {edge: regions.plain_target(edge[0]) for edge in kept}
    indirect = {
        group[edge[0]]
        for edge, uses in entries.items()
        if group[edge[0]] not in spoiled
        and edge[0] not in regions.leaf_set
        and not (plain.get(edge) and all(use in recipes for use in uses))
    }
    captures: dict[Edge, int] = {}

    def capture(edge: Edge) -> int:
        return captures.setdefault(edge, len(captures))

    deferred = tuple(
        _defer(node, operand, recipes[node, operand], capture((node, 0)), edge, plain[edge])
        for edge, uses in kept.items()
        for node, operand in uses
        if (node, operand) in recipes
    )
    targets: dict[int, dict[Edge, None]] = {}
    for edge, uses in kept.items():
        for use in uses:
            if use in reruns:
                targets.setdefault(use[0], {})[edge] = None
    produced: dict[int, set[int]] = {}
    for edges in (*regions.shape.children, regions.shape.roots):
        for child, output_nr in edges:
            produced.setdefault(child, set()).add(output_nr)
    later = tuple(
        Rerun(node, tuple((nr, capture((node, nr))) for nr in sorted(produced[node])), tuple(edges))
        for node, edges in targets.items()
    )
    now = tuple(InInput(capture(edge), edge) for edge in wanted)
    below_kept = regions.downward(edge[0] for edge in kept)
    return Plan(
        captures=tuple(captures),
        deferred=deferred,
        reruns=later,
        in_input=now,
        turns=tuple({turn for target in plain.values() if target for turn in target.turns}),
        group=group,
        in_place=frozenset(leaf for leaf in regions.leaves if group.get(leaf) not in indirect),
        weight_only=frozenset(group),
        passed_later=frozenset(
            node for node in group if group[node] not in spoiled or node in regions.leaf_set
        ),
        leaves=regions.leaves,
        leaf_set=regions.leaf_set,
        deferred_leaves=frozenset(below_kept & regions.leaf_set - {edge[0] for edge in wanted}),
    )


def _defer(
    node: int,
    operand: int,
    found: tuple[Recipe, bool],
    capture: int,
    edge: Edge,
    plain: PlainTarget | None,
) -> Deferred:
    return Deferred(
        node=node,
        operand=operand,
        recipe=found[0],
        capture=capture,
        target=edge,
        leaf=plain.leaf if plain else None,
        transposed=bool(plain and plain.transposed),
        chained=bool(plain and plain.chained),
        cast=bool(plain and plain.cast),
        recomputed=found[1],
    )


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


def _find_recipes(
    regions: Regions,
    entries: Mapping[Edge, list[Entry]],
    recomputed: Callable[[Any, Recipe], bool | None],
) -> dict[Entry, tuple[Recipe, bool]]:
    """Entry → its recipe, and whether its activation is recomputed by a checkpoint."""
    found: dict[Entry, tuple[Recipe, bool]] = {}
    riders: list[tuple[int, int, Recipe]] = []
    for edge, uses in entries.items():
        for node, operand in uses:
            recipe = RECIPES.get(regions.names[node], {}).get(operand) if node >= 0 else None
            if recipe is None:
                continue
            if recipe.rides_along:
                if edge[0] in regions.leaf_set:
                    riders.append((node, operand, recipe))
                continue
            from_checkpoint = recomputed(regions.nodes[node], recipe)
            if from_checkpoint is not None:
                found[node, operand] = recipe, from_checkpoint
    products = {node for node, _ in found}
    found.update(
        {(node, operand): (recipe, False) for node, operand, recipe in riders if node in products}
    )
    return found


def _find_reruns(
    regions: Regions,
    entries: Mapping[Edge, list[Entry]],
    recipes: Mapping[Entry, tuple[Recipe, bool]],
    rerun: Callable[[Any, str], bool],
) -> set[Entry]:
    """Entries whose node can be run again at W without touching anything else.

    The engine runs whatever lies between a node and the edges asked for. So no edge may be reached
    from the node in two ways: through another operand, or through another of its own targets.
    """
    targets: dict[int, dict[int, Edge]] = {}  # node → operand → edge
    by_recipe: dict[int, set[Edge]] = {}
    for edge, uses in entries.items():
        for node, operand in uses:
            if (node, operand) in recipes:
                by_recipe.setdefault(node, set()).add(edge)
            elif node >= 0:
                targets.setdefault(node, {})[operand] = edge
    targets = {
        node: own
        for node, own in targets.items()
        if rerun(regions.nodes[node], regions.names[node])
    }
    below, bit = regions.reaches(edge[0] for own in targets.values() for edge in own.values())
    found: set[Entry] = set()
    for node, own in targets.items():
        edges = set(own.values())
        alone = not edges & by_recipe.get(node, set()) and not any(
            below[child] & bit[edge[0]]
            for edge in edges
            for child, nr in regions.shape.children[node]
            if child >= 0 and (child, nr) != edge
        )
        if alone:
            found |= {(node, operand) for operand in own}
    return found
