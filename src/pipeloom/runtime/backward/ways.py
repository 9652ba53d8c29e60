"""Which ways there are to compute, at W, the gradient of an operand through which a weight enters.

::

    AddmmBackward, operand 2                 a recipe: operands are taken, a product is done at W
    BilinearBackward, operand 2              a rerun: the engine runs the node again at W
    CompiledFunctionBackward, operands 3, 7  a cut: the node leaves them undone, and W does them
    LayerNormBackward, operand 1             none: it comes out of I
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pipeloom.runtime.backward.compiled.cut import Cut
from pipeloom.runtime.backward.recipes import RECIPES, Recipe
from pipeloom.runtime.backward.regions import Entry, Regions
from pipeloom.runtime.backward.walk import Edge

__all__ = ["FUSED_TYPES", "Halve", "Ways", "find_ways"]

# Backward nodes that compute both halves in one kernel: running them twice costs both twice.
FUSED_TYPES = frozenset({"CudnnRnnBackward0", "MiopenRnnBackward0", "MkldnnRnnLayerBackward0"})

Entries = Mapping[Edge, list[Entry]]
Halve = Callable[[Any, frozenset[int]], Cut | None]


class Ways:
    """For each entry the way that was found, if any."""

    def __init__(
        self,
        regions: Regions,
        entries: Entries,
        recipes: dict[Entry, tuple[Recipe, bool]],
        reruns: set[Entry],
    ) -> None:
        self.regions, self.entries = regions, entries
        self.recipes = recipes  # and whether the activation is packed
        self.reruns = reruns
        self.cuts: dict[int, Cut] = {}
        self.asked: dict[int, Edge] = {}  # an edge that makes the engine run a node
        self._cut_entries: set[Entry] = set()
        self._open: dict[int, frozenset[int]] = {}  # node → operands that it might leave
        for uses in entries.values():
            for node, operand in uses:
                if node >= 0 and (node, operand) not in self:
                    self._open[node] = self._open.get(node, frozenset()) | {operand}

    def __contains__(self, entry: Entry) -> bool:
        return entry in self.recipes or entry in self.reruns or entry in self._cut_entries

    def find_cuts(self, halve: Halve) -> None:
        """Cut what can be cut."""
        self.cuts, self.asked = {}, {}
        for node, operands in self._open.items():
            cut = halve(self.regions.nodes[node], operands) if operands else None
            if cut is None:
                continue
            below = self.regions.shape.children[node]
            if not any(
                child in self.regions.data or (child >= 0 and at not in cut.later)
                for at, (child, _) in enumerate(below)
            ):
                # Nothing below makes the engine run the node, no input and nothing that it computes
                # in I, so it is asked for what it will not give. Whatever else leads to that edge
                # would be run as well: nothing else may.
                alone = self._edge_of_its_own(node, cut)
                if alone is None:
                    continue
                self.asked[node] = alone
            self.cuts[node] = cut
        self._cut_entries = {(node, at) for node, cut in self.cuts.items() for at in cut.later}

    def narrow(self, kept: set[Entry]) -> bool:
        """Leave out of the next cuts what is not kept for W; whether that changes nothing."""
        found = {
            node: frozenset(at for at in cut.later if (node, at) in kept)
            for node, cut in self.cuts.items()
        }
        self._open = found
        return all(found[node] == cut.later for node, cut in self.cuts.items())

    def _edge_of_its_own(self, node: int, cut: Cut) -> Edge | None:
        for operand in sorted(cut.later):
            edge = self.regions.shape.children[node][operand]
            others = {other for other, _ in self.entries if other != edge[0]}
            alone = self.entries[edge] == [(node, operand)]
            if alone and edge[0] not in self.regions.downward(others):
                return edge
        return None


def find_ways(
    regions: Regions,
    entries: Entries,
    *,
    use_recipes: bool,
    rerun: Callable[[Any, str], bool],
    packed: Callable[[Any, Recipe], bool | None],
) -> Ways:
    """Recipes and reruns; cuts come later, since they depend on what all edges get."""
    recipes = _find_recipes(regions, entries, packed) if use_recipes else {}
    return Ways(regions, entries, recipes, _find_reruns(regions, entries, recipes, rerun))


def _find_recipes(
    regions: Regions,
    entries: Entries,
    packed: Callable[[Any, Recipe], bool | None],
) -> dict[Entry, tuple[Recipe, bool]]:
    """Entry → its recipe, and whether its activation is packed."""
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
            is_packed = packed(regions.nodes[node], recipe)
            if is_packed is not None:
                found[node, operand] = recipe, is_packed
    products = {node for node, _ in found}
    found.update(
        {(node, operand): (recipe, False) for node, operand, recipe in riders if node in products}
    )
    return found


def _find_reruns(
    regions: Regions,
    entries: Entries,
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
