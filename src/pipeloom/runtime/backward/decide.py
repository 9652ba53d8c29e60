"""Which method a stage's graph gets, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.autograd.function import BackwardCFunction

from pipeloom.runtime.backward.checkpointing import (
    allows_second_use,
    is_packed,
    keeps_elsewhere,
    runs_once,
    saves_for_one_use,
    saves_recomputed,
)
from pipeloom.runtime.backward.compiled.cut import Cut
from pipeloom.runtime.backward.compiled.halves import halves_of
from pipeloom.runtime.backward.method import Choice
from pipeloom.runtime.backward.plan import Plan, make_plan
from pipeloom.runtime.backward.recipes import Recipe
from pipeloom.runtime.backward.self_check import structural_faults
from pipeloom.runtime.backward.walk import Graph, is_accumulate
from pipeloom.runtime.backward.ways import FUSED_TYPES

__all__ = ["Decision", "decide"]

# Products without a recipe whose backward computes each half on its own: worth a later run.
RERUN_TYPES = frozenset({"CdistBackward0", "LinearBackward0", "TrilinearBackward0"})
REENTRANT_CHECKPOINT = "CheckpointFunctionBackward"
COMPILED = "CompiledFunctionBackward"


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """What is done for one shape of graph; no plan means a whole backward at I.

    ``uncovered`` names parameters because of which the backward is not split although it was asked
    for, ``suspects`` those that a custom Function may hide: if a full backward does not reach them
    either, they are not used at all.
    """

    choice: Choice
    plan: Plan | None
    uncovered: tuple[str, ...] = ()
    suspects: tuple[str, ...] = ()
    wants_boxes: bool = False
    runs_once: bool = False  # a part of the backward may not run twice

    def fits(self, graph: Graph) -> bool:
        """Whether what the plan was told by nodes, beyond the graph's shape, is still so."""
        if self.plan is None:
            return True
        nodes, plan = graph.nodes, self.plan
        return (
            all(
                (nodes[index]._saved_dim0, nodes[index]._saved_dim1) == (dim0, dim1)
                and nodes[leaf].variable.dim() == num_dims
                for index, dim0, dim1, leaf, num_dims in plan.turns
            )
            and all(
                is_packed(nodes[index], saved) == packed
                and (not packed or allows_second_use(nodes[index]))
                for index, saved, packed in plan.activations
            )
            and not (plan.reruns and any(map(keeps_elsewhere, nodes)))
            and not any(runs_once(nodes[again.node]) for again in plan.reruns)
            and not any(saves_recomputed(nodes[index]) for index in plan.saving)
        )

    def refused(self, reason: str, uncovered: tuple[str, ...]) -> Decision:
        """The same stage without a split."""
        return replace(self, choice=Choice("whole", reason), plan=None, uncovered=uncovered)


def decide(
    graph: Graph,
    *,
    module: nn.Module,
    method: str,
    boxed: bool,
    hooked: bool,
    unused: frozenset[str],
    check: bool,
) -> Decision:
    """Choose for one graph. ``boxed``: saved tensors are in boxes. ``hooked``: the forward
    registered hooks. ``unused``: parameters known not to be used. ``check``: prove the plan before
    it is used.
    """
    parameter_names = {id(p): name for name, p in module.named_parameters() if p.requires_grad}

    def name(leaf: int) -> str:
        variable = graph.nodes[leaf].variable
        return parameter_names.get(id(variable), f"a parameter of shape {tuple(variable.shape)}")

    missing = _missing_parameters(graph, parameter_names)
    if REENTRANT_CHECKPOINT in {kind.__name__ for kind in graph.shape.types}:
        reason = "a reentrant checkpoint runs its own backward; use_reentrant=False can be split"
        return Decision(Choice("whole", reason), None, uncovered=missing)
    hiding = _custom_functions(graph)
    if hiding and not unused.issuperset(missing):
        reason = f"parameters are not in the graph, and {hiding[0]} may hide them"
        return Decision(Choice("whole", reason), None, suspects=missing)

    def packed(node: Any, recipe: Recipe) -> bool | None:
        if not is_packed(node, recipe.saved):
            return False
        return True if allows_second_use(node) else None

    once = _why_once(graph, hooked=hooked)

    def may_run_again(node: Any, kind: str) -> bool:
        if (
            once is not None
            or not boxed
            or kind in FUSED_TYPES
            or isinstance(node, BackwardCFunction)
        ):
            return False
        if runs_once(node):
            return False
        return method == "graph" or kind in RERUN_TYPES

    def halve(node: Any, operands: frozenset[int]) -> Cut | None:
        halves = halves_of(node) if method != "graph" else None
        return halves.cut(operands) if halves is not None else None

    plan = make_plan(
        graph,
        use_recipes=method != "graph",
        hooked=hooked,
        rerun=may_run_again,
        packed=packed,
        halve=halve,
    )
    wrong = structural_faults(graph.shape, plan) if check else set()
    if wrong:
        names = tuple(name(leaf) for leaf in sorted(wrong))
        reason = "the plan does not account for every parameter exactly once"
        return Decision(Choice("whole", reason), None, uncovered=names)
    broken = _prepare_halves(graph, plan)
    if broken is not None:
        names = tuple(name(leaf) for leaf in plan.leaves)
        return Decision(Choice("whole", broken), None, uncovered=names)
    again = method == "graph" or (method == "auto" and _has_rerun_types(graph, plan))
    wants_boxes = again and once is None
    now = tuple(name(leaf) for leaf in plan.leaves if leaf not in plan.deferred_leaves)
    later = tuple(name(leaf) for leaf in plan.leaves if leaf in plan.deferred_leaves)
    if not later and not wants_boxes:
        reason = once if method == "graph" and once else _why_nothing(graph, plan)
        asked = method != "auto" and plan.leaves
        return Decision(Choice("whole", reason), None, uncovered=now if asked else ())
    label = "graph" if wants_boxes else "deferred"
    reason = (
        "nodes are run again for their weights at W"
        if label == "graph"
        else "weight products are computed at W"
    )
    return Decision(
        Choice(label, reason, later, now),
        plan,
        wants_boxes=wants_boxes,
        runs_once=_has_compiled(graph) or any(map(saves_for_one_use, graph.nodes)),
    )


def _prepare_halves(graph: Graph, plan: Plan) -> str | None:
    """Compile what I runs of compiled nodes; why that failed, if it did."""
    for half in plan.halved:
        halves = halves_of(graph.nodes[half.node])
        assert halves is not None
        try:
            halves.prepare(half.cut)
        except Exception as error:  # a compiler may raise anything
            first_line = str(error).strip().partition("\n")[0]
            return f"half of a compiled backward does not compile: {first_line}"
    return None


def _has_compiled(graph: Graph) -> bool:
    """Whether there is compiled code whose backward comes in one piece."""
    return any(
        kind.__name__ == COMPILED and halves_of(graph.nodes[index]) is None
        for index, kind in enumerate(graph.shape.types)
    )


def _why_once(graph: Graph, *, hooked: bool) -> str | None:
    """Why no node of this graph may be run a second time, if that is so."""
    if _has_compiled(graph):
        return (
            "it has compiled code, whose backward may reuse its saved memory at once, so no graph "
            'is kept through I; method="auto" defers what is outside the compiled code'
        )
    if any(map(keeps_elsewhere, graph.nodes)):
        return (
            "hooks keep its saved tensors elsewhere, all of which would stay until W if the graph "
            'were kept through I; method="auto" defers products that need no graph'
        )
    if hooked:
        return (
            "there may be hooks on its tensors, which nodes that run again at W would call twice; "
            'method="auto" can split it'
        )
    return None


def _missing_parameters(graph: Graph, names: Mapping[int, str]) -> tuple[str, ...]:
    """Parameters that the graph does not show."""
    shown = {id(node.variable) for node in graph.nodes if is_accumulate(node)}
    shown -= {id(graph.nodes[index].variable) for index in graph.shape.inputs if index >= 0}
    missing = tuple(name for key, name in names.items() if key not in shown)
    # Sharded parameters are replaced for the forward: the graph shows others in their place.
    return () if len(shown - names.keys()) >= len(missing) else missing


def _custom_functions(graph: Graph) -> list[str]:
    """The names of Functions written in Python, whose backward may do anything."""
    return sorted(
        kind.__name__
        for kind in set(graph.shape.types)
        if issubclass(kind, BackwardCFunction) and kind.__name__ != COMPILED
    )


def _has_rerun_types(graph: Graph, plan: Plan) -> bool:
    """Whether a node worth running again stands where a weight enters."""
    kinds = [kind.__name__ for kind in graph.shape.types]
    return any(
        kinds[node] in RERUN_TYPES and any(child in plan.weight_only for child, _ in edges)
        for node, edges in enumerate(graph.shape.children)
        if node not in plan.weight_only
    )


def _why_nothing(graph: Graph, plan: Plan) -> str:
    if not plan.leaves:
        return "no parameter needs a gradient"
    kinds = {kind.__name__ for kind in graph.shape.types}
    if any(map(saves_for_one_use, graph.nodes)):
        return "hooks on saved tensors may give each of them out only once"
    if _has_compiled(graph):
        return (
            "the weights are inside a compiled region, whose backward computes both halves at "
            'once; compile it with torch.compile(…, backend="pipeloom") to defer them, unless that '
            "is what did, and the backward is of a kind that cannot be cut"
        )
    if COMPILED in kinds:
        return (
            "the backward of its compiled code leaves nothing for W: it has no weight products of "
            "its own, or changes tensors in place, or serves a weight that is used elsewhere too"
        )
    if kinds & FUSED_TYPES:
        return f"{min(kinds & FUSED_TYPES)} computes both halves in one kernel"
    python = _custom_functions(graph)
    if python:
        return f"{python[0]} computes both halves at once"
    return "no parameter is used in a product worth deferring"
