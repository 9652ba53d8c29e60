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

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from pipeloom.runtime.backward.checkpointing import saves_recomputed
from pipeloom.runtime.backward.recipes import RECIPES, Recipe, signed
from pipeloom.runtime.backward.walk import Edge, Graph, GraphShape, is_accumulate

__all__ = ["Deferred", "InInput", "Plan", "Rerun", "make_plan"]

# Nodes with one operand whose gradient is a view or a cast of theirs: what lies between a
# parameter and the product that uses it.
CHAIN_TYPES = frozenset(
    {
        "AliasBackward0",
        "CloneBackward0",
        "ExpandBackward0",
        "PermuteBackward0",
        "ReshapeAliasBackward0",
        "SelectBackward0",
        "SliceBackward0",
        "SqueezeBackward0",
        "SqueezeBackward1",
        "TBackward0",
        "ToCopyBackward0",
        "TransposeBackward0",
        "UnsafeViewBackward0",
        "UnsqueezeBackward0",
        "ViewBackward0",
    }
)
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
    group: dict[int, int]  # weight-only node → its connected group
    in_place: frozenset[int]  # parameters reached by plain chains alone
    weight_only: frozenset[int]
    leaves: tuple[int, ...]  # every parameter's node
    leaf_set: frozenset[int]
    deferred_leaves: frozenset[int]


class _Planner:
    """Works on one graph; ``make_plan`` is the way in."""

    def __init__(self, graph: Graph) -> None:
        self.nodes = graph.nodes
        self.shape: GraphShape = graph.shape
        self.names = [kind.__name__ for kind in graph.shape.types]
        self.parents: list[list[int]] = [[] for _ in self.names]
        for parent, edges in enumerate(self.shape.children):
            for child, _ in edges:
                if child >= 0:
                    self.parents[child].append(parent)
        self.inputs = {index for index in self.shape.inputs if index >= 0}
        self.leaves = tuple(
            index
            for index, node in enumerate(self.nodes)
            if is_accumulate(node) and index not in self.inputs
        )
        self.leaf_set = frozenset(self.leaves)
        self.data = self.find_data()

    # ── which nodes are data ─────────────────────────────────────────────────────────────────────

    def find_data(self) -> set[int]:
        """Nodes on the way from the outputs to the inputs.

        Where an output reaches no input (the first stage, whose tokens need no gradient), what lies
        below it counts as data up to the plain chains that lead to parameters: there too, I passes
        through the activations and frees them.
        """
        data = self.upward(self.inputs)
        started = [root for root, _ in self.shape.roots if root not in data]
        below: set[int] = set()
        while started:
            node = started.pop()
            if node in below or self.chain(node) is not None:
                continue
            below.add(node)
            weights = self.weight_operands(node)
            started += [
                child
                for operand, (child, _) in enumerate(self.shape.children[node])
                if child >= 0 and operand not in weights
            ]
        return self.upward(data | below)

    def upward(self, start: Iterable[int]) -> set[int]:
        found = set(start)
        todo = list(found)
        while todo:
            for parent in self.parents[todo.pop()]:
                if parent not in found:
                    found.add(parent)
                    todo.append(parent)
        return found

    def downward(self, start: int) -> set[int]:
        found = {start}
        todo = [start]
        while todo:
            for child, _ in self.shape.children[todo.pop()]:
                if child >= 0 and child not in found:
                    found.add(child)
                    todo.append(child)
        return found

    def weight_operands(self, node: int) -> set[int]:
        """Operands that hold a weight because the product's other operand needs no gradient."""
        edges = self.shape.children[node]
        return {
            operand
            for operand, recipe in RECIPES.get(self.names[node], {}).items()
            if recipe.partner is not None
            and operand < len(edges)
            and edges[operand][0] >= 0
            and edges[recipe.partner][0] < 0
        }

    def chain(self, node: int) -> list[int] | None:
        """The nodes from here to a parameter if nothing but views and casts lies between."""
        passed: list[int] = []
        while node not in self.leaf_set:
            below = [child for child, _ in self.shape.children[node] if child >= 0]
            if self.names[node] not in CHAIN_TYPES or len(below) != 1:
                return None
            passed.append(node)
            node = below[0]
        return [*passed, node]

    # ── how a chain changes the gradient ─────────────────────────────────────────────────────────

    def plain_target(self, child: int) -> tuple[int, bool] | None:
        """The parameter below and whether it is seen transposed, for the chains we add through."""
        chain = self.chain(child)
        if chain is None:
            return None
        *passed, leaf = chain
        parameter = self.nodes[leaf].variable
        transposed = False
        for index in passed:
            if self.names[index] == "TBackward0":
                transposed = not transposed
            elif self.names[index] == "TransposeBackward0":
                node = self.nodes[index]
                dims = {signed(node._saved_dim0), signed(node._saved_dim1)}
                if {dim % parameter.dim() for dim in dims} != {
                    parameter.dim() - 1,
                    parameter.dim() - 2,
                }:
                    return None
                transposed = not transposed
            elif self.names[index] != "ToCopyBackward0":
                return None
        return leaf, transposed

    # ── the plan ─────────────────────────────────────────────────────────────────────────────────

    def entries(self) -> dict[Edge, list[tuple[int, int]]]:
        """Weight-only edge → the (data node, operand) pairs that enter it."""
        found: dict[Edge, list[tuple[int, int]]] = {}
        for node in sorted(self.data):
            for operand, edge in enumerate(self.shape.children[node]):
                if edge[0] >= 0 and edge[0] not in self.data:
                    found.setdefault(edge, []).append((node, operand))
        for edge in self.shape.roots:  # an output made of parameters alone
            if edge[0] not in self.data:
                found.setdefault(edge, []).append((-1, 0))
        return found

    def groups(self, entries: Iterable[Edge]) -> dict[int, int]:
        """Weight-only nodes that hang together, numbered."""
        members: dict[int, int] = {}
        for start, _ in entries:
            if start in members:
                continue
            todo, group = [start], len(members)
            while todo:
                node = todo.pop()
                if node in members:
                    continue
                members[node] = group
                todo += [c for c, _ in self.shape.children[node] if c >= 0]
                todo += [p for p in self.parents[node] if p not in self.data]
        return members


def make_plan(
    graph: Graph,
    *,
    use_recipes: bool,
    rerun: Callable[[Any, str], bool],
    recomputed: Callable[[Any, Recipe], bool | None],
) -> Plan:
    """Decide, for one graph, what is deferred.

    ``rerun(node, type name)`` says whether a node without recipe may be run again at W.
    ``recomputed(node, recipe)`` says whether the activation is only there while a checkpoint
    recomputes (``None``: it is, and cannot be taken from there).
    """
    planner = _Planner(graph)
    entries = planner.entries()
    group = planner.groups(entries)
    recipes: dict[tuple[int, int], tuple[Recipe, bool]] = {}
    if use_recipes:
        recipes = _find_recipes(planner, entries, recomputed)
    reruns = _find_reruns(planner, entries, recipes, rerun)

    def is_deferred(entry: tuple[int, int]) -> bool:
        return entry in recipes or entry in reruns

    in_input = {edge for edge, uses in entries.items() if not all(map(is_deferred, uses))}
    # Asking the engine for an edge makes it run everything above, the deferred edges that lead
    # there included. Where that happens, the whole group is computed in I, at its parameters.
    reached = {edge: planner.downward(edge[0]) for edge in entries}
    spoiled = {
        group[edge[0]]
        for edge in in_input
        for other in entries
        if other[0] != edge[0] and edge[0] in reached[other]
    }
    # What a checkpoint recomputes is there during I and gone at W.
    spoiled |= {group[node] for node in group if saves_recomputed(graph.nodes[node])}
    wanted: list[Edge] = []
    kept_entries: dict[Edge, list[tuple[int, int]]] = {}
    for edge, uses in entries.items():
        if group[edge[0]] in spoiled:
            continue
        if edge in in_input:
            wanted.append(edge)
        else:
            kept_entries[edge] = uses
    wanted += [(leaf, 0) for leaf in planner.leaves if group.get(leaf) in spoiled]

    captures: dict[Edge, int] = {}

    def capture(edge: Edge) -> int:
        return captures.setdefault(edge, len(captures))

    deferred: list[Deferred] = []
    rerun_targets: dict[int, list[Edge]] = {}
    for edge, uses in kept_entries.items():
        plain = planner.plain_target(edge[0])
        for node, operand in uses:
            if (node, operand) in recipes:
                recipe, from_checkpoint = recipes[node, operand]
                leaf, transposed = plain if plain is not None else (None, False)
                deferred.append(
                    Deferred(
                        node,
                        operand,
                        recipe,
                        capture((node, 0)),
                        edge,
                        leaf,
                        transposed,
                        from_checkpoint,
                    )
                )
            elif edge not in rerun_targets.setdefault(node, []):
                rerun_targets[node].append(edge)
    produced: dict[int, set[int]] = {}
    for edges in (*planner.shape.children, planner.shape.roots):
        for child, output_nr in edges:
            produced.setdefault(child, set()).add(output_nr)
    later = tuple(
        Rerun(node, tuple((nr, capture((node, nr))) for nr in sorted(produced[node])), tuple(edges))
        for node, edges in rerun_targets.items()
    )
    now = tuple(InInput(capture(edge), edge) for edge in wanted)
    indirect = {
        group[edge[0]]
        for edge, uses in entries.items()
        if group[edge[0]] not in spoiled
        and edge[0] not in planner.leaf_set
        and not (planner.plain_target(edge[0]) and all(use in recipes for use in uses))
    }
    spoiled_or_now = {edge[0] for edge in wanted}
    reachable_later = (
        set().union(*(reached[edge] for edge in kept_entries)) if kept_entries else set()
    )
    return Plan(
        captures=tuple(captures),
        deferred=tuple(deferred),
        reruns=later,
        in_input=now,
        group=group,
        in_place=frozenset(leaf for leaf in planner.leaves if group.get(leaf) not in indirect),
        weight_only=frozenset(group),
        leaves=planner.leaves,
        leaf_set=planner.leaf_set,
        deferred_leaves=frozenset(reachable_later & planner.leaf_set - spoiled_or_now),
    )


def _find_recipes(
    planner: _Planner,
    entries: dict[Edge, list[tuple[int, int]]],
    recomputed: Callable[[Any, Recipe], bool | None],
) -> dict[tuple[int, int], tuple[Recipe, bool]]:
    """(node, operand) → its recipe, and whether its activation is recomputed by a checkpoint."""
    found: dict[tuple[int, int], tuple[Recipe, bool]] = {}
    riders: list[tuple[int, int, Recipe]] = []
    for edge, uses in entries.items():
        for node, operand in uses:
            recipe = RECIPES.get(planner.names[node], {}).get(operand) if node >= 0 else None
            if recipe is None:
                continue
            if recipe.rides_along:
                if edge[0] in planner.leaf_set:
                    riders.append((node, operand, recipe))
                continue
            from_checkpoint = recomputed(planner.nodes[node], recipe)
            if from_checkpoint is not None:
                found[node, operand] = recipe, from_checkpoint
    products = {node for node, _ in found}
    found.update(
        {(node, operand): (recipe, False) for node, operand, recipe in riders if node in products}
    )
    return found


def _find_reruns(
    planner: _Planner,
    entries: dict[Edge, list[tuple[int, int]]],
    recipes: dict[tuple[int, int], tuple[Recipe, bool]],
    rerun: Callable[[Any, str], bool],
) -> set[tuple[int, int]]:
    """(node, operand) pairs whose node can be run again at W without touching anything else.

    The engine runs whatever lies between a node and the edges asked for. So no edge may be reached
    from the node in two ways: through another operand, or through another of its own targets.
    """
    operands: dict[int, list[tuple[int, Edge]]] = {}
    for edge, uses in entries.items():
        for node, operand in uses:
            if node >= 0 and (node, operand) not in recipes:
                operands.setdefault(node, []).append((operand, edge))
    found: set[tuple[int, int]] = set()
    for node, own in operands.items():
        if not rerun(planner.nodes[node], planner.names[node]):
            continue
        targets = {edge for _, edge in own}
        by_recipe = {
            planner.shape.children[node][operand] for other, operand in recipes if other == node
        }
        alone = not targets & by_recipe and all(
            edge[0] not in planner.downward(child)
            for edge in targets
            for child, nr in planner.shape.children[node]
            if child >= 0 and (child, nr) != edge
        )
        if alone:
            found |= {(node, operand) for operand, _ in own}
    return found
