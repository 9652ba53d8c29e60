"""The backward of one stage in two halves: the methods ``deferred`` and ``graph``.

::

    F     runs untouched (graph method: saved tensors go into boxes)
    I     read the graph ─► its plan (made once per shape of graph) ─► take operands from nodes
          ─► one engine run ─► gradients of inputs; the rest waits in ``saved.pending``
    W     products into ``.grad``
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.errors import BackwardError, BackwardMethodError
from pipeloom.runtime.backward.accumulate import (
    Gradient,
    Pending,
    Product,
    add_early,
    add_weight_gradients,
    versions_of,
    weight_gradients,
)
from pipeloom.runtime.backward.boxes import Boxes
from pipeloom.runtime.backward.budget import bytes_of, bytes_saved, nodes_computed_early, storages
from pipeloom.runtime.backward.checkpointing import linear_owners, noted_inputs
from pipeloom.runtime.backward.decide import (
    Decision,
    decide,
    learnable_layers,
)
from pipeloom.runtime.backward.method import (
    Choice,
    Gradients,
    SavedMicrobatch,
    SplitBackwardWarning,
    hold_roots,
)
from pipeloom.runtime.backward.phases import enter_phase, where
from pipeloom.runtime.backward.plan import Plan
from pipeloom.runtime.backward.self_check import differing, muted_hooks
from pipeloom.runtime.backward.walk import Graph, GraphShape, accumulation_below, read_graph
from pipeloom.runtime.backward.whole import output_roots, run_full

__all__ = ["SplitBackward"]

# A stage whose control flow depends on its data has a few shapes of graph; one that never repeats
# gains nothing from remembering.
MOST_PLANS = 64


class SplitBackward:
    """I and W of one stage; plans per shape of graph, remembered across microbatches."""

    def __init__(
        self,
        module: nn.Module,
        *,
        method: str,
        self_check: str,
        strict: bool,
        hold_at_most: float | None,
        stage: int | None,
    ) -> None:
        self.module = module
        self.hold_at_most = hold_at_most
        self.method = method
        self.self_check = self_check
        self.strict = strict
        self.stage = stage
        self.choice: Choice | None = None
        self._decisions: dict[tuple[GraphShape, bool], Decision] = {}
        self._linears: dict[GraphShape, frozenset[int]] = {}
        self._checked: set[Decision] = set()
        self._early: dict[Decision, frozenset[int]] = {}
        self._boxes: Boxes | None = None
        self._wants_boxes = method == "graph"

    # ── F ────────────────────────────────────────────────────────────────────────────────────────

    def forward(self) -> AbstractContextManager[object]:
        self._boxes = Boxes() if self._wants_boxes else None
        return self._boxes or nullcontext()

    def save(
        self, *, microbatch: int, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> SavedMicrobatch:
        boxes, self._boxes = self._boxes, None
        saved = SavedMicrobatch(microbatch, list(inputs), hold_roots(outputs), pending=boxes)
        if self.choice is None:
            graph = read_graph(saved.inputs, saved.outputs)
            self._decide(graph, boxed=boxes is not None, microbatch=microbatch)
        return saved

    # ── B, I, W ──────────────────────────────────────────────────────────────────────────────────

    def full(
        self, saved: SavedMicrobatch, output_grads: Sequence[Tensor | None] | None
    ) -> Gradients:
        enter_phase(saved, "B", self.stage)
        saved.pending = None
        return run_full(saved, output_grads)

    def input(
        self, saved: SavedMicrobatch, output_grads: Sequence[Tensor | None] | None
    ) -> Gradients:
        enter_phase(saved, "I", self.stage)
        boxes, saved.pending = saved.pending, None
        positions, grads = output_roots(saved.outputs, output_grads)
        if not positions:
            gradients: Gradients = [None] * len(saved.inputs)
            saved.release_graph()
            return gradients
        graph = read_graph(saved.inputs, [saved.outputs[index] for index in positions])
        decision = self._decide(graph, boxed=boxes is not None, microbatch=saved.microbatch)
        if decision.plan is None:
            return run_full(saved, output_grads)
        inputs = saved.inputs
        saved.release_graph()
        trusted = decision.runs_once or decision in self._checked
        if self.self_check != "numeric" or trusted:
            limit = self._limit(graph, decision)
            gradients, pending = self._run(graph, decision, inputs, grads, boxes, saved.microbatch)
            add_early(pending, self._choose_early(decision, pending, limit))
            saved.pending = pending
            return gradients
        self._checked.add(decision)
        reference = self._reference(graph, decision.plan, inputs, grads)
        gradients, pending = self._run(graph, decision, inputs, grads, boxes, saved.microbatch)
        saved.pending = self._compare(
            graph, decision, reference, gradients, pending, saved.microbatch
        )
        return gradients if saved.pending is pending else list(reference[0])

    def weight(self, saved: SavedMicrobatch) -> None:
        enter_phase(saved, "W", self.stage)
        pending, saved.pending = saved.pending, None
        if pending is None:
            return
        changed = [product.use.target for product in pending.products if product.changed()]
        changed += [kept.target for kept in pending.gradients if kept.changed()]
        if changed:
            ends = [end for at, _ in changed for end in accumulation_below(pending.nodes[at])]
            raise self._error(
                "a tensor that W needs was overwritten; keep the stage's inputs, activations and "
                "gradients unchanged until W",
                saved.microbatch,
                self._names(dict.fromkeys(ends)),
            )
        add_weight_gradients(pending)

    def held_bytes(self, saved: SavedMicrobatch) -> int:
        if not isinstance(saved.pending, Pending):
            return 0
        return bytes_of(saved.pending.tensors(), excluded=self._weight_storages())

    def _weight_storages(self) -> set[int]:
        return {
            storage.data_ptr()
            for tensor in (*self.module.parameters(), *self.module.buffers())
            for storage in storages(tensor)
        }

    def _limit(self, graph: Graph, decision: Decision) -> float | None:
        """Bytes to keep at most between I and W, asked for once per shape of graph."""
        if self.hold_at_most is None or decision in self._early:
            return None
        return self.hold_at_most * bytes_saved(graph, excluded=self._weight_storages())

    def _choose_early(
        self, decision: Decision, pending: Pending, limit: float | None
    ) -> frozenset[int]:
        if decision not in self._early:
            products = set(map(id, (t for p in pending.products for t in p.tensors())))
            others = [tensor for tensor in pending.tensors() if id(tensor) not in products]
            self._early[decision] = (
                nodes_computed_early(
                    pending.products, others, limit=limit, excluded=self._weight_storages()
                )
                if limit
                else frozenset()
            )
        return self._early[decision]

    # ── deciding ─────────────────────────────────────────────────────────────────────────────────

    def _decide(self, graph: Graph, *, boxed: bool, microbatch: int) -> Decision:
        key = (graph.shape, boxed)
        decision = self._decisions.get(key)
        if decision is not None:
            return decision
        decision = decide(
            graph,
            module=self.module,
            method=self.method,
            boxed=boxed,
            linears=self._linears.get(graph.shape),
            check=self.self_check != "off",
        )
        if decision.uncovered:
            self._report(decision, microbatch)
        if self.choice is None or len(decision.choice.deferred) > len(self.choice.deferred):
            self.choice = decision.choice
        self._wants_boxes = self._wants_boxes or decision.wants_boxes
        if len(self._decisions) >= MOST_PLANS:
            self._decisions.clear()
            self._early.clear()
            self._checked.clear()
        self._decisions[key] = decision
        return decision

    def _report(self, decision: Decision, microbatch: int) -> None:
        names = ", ".join(decision.uncovered)
        message = (
            f"{where(self.stage, microbatch)}: the backward is not split: "
            f"{decision.choice.reason}; parameters: {names}"
        )
        if self.strict:
            raise BackwardMethodError(message)
        warnings.warn(message, SplitBackwardWarning, stacklevel=4)

    # ── running ──────────────────────────────────────────────────────────────────────────────────

    def _run(
        self,
        graph: Graph,
        decision: Decision,
        inputs: Sequence[Tensor],
        grads: Sequence[Tensor],
        boxes: Boxes | None,
        microbatch: int,
    ) -> tuple[Gradients, Pending]:
        """I: one engine run, between taking what W needs and keeping it."""
        plan = decision.plan
        assert plan is not None
        nodes = graph.nodes
        taken = [
            () if use.recomputed else use.recipe.take(nodes[use.node]) for use in plan.deferred
        ]
        notes: dict[int, list[Tensor]] = {}
        with ExitStack() as during:
            if decision.watches:
                layers = learnable_layers(graph, decision, linear_owners(self.module))
                notes = during.enter_context(noted_inputs(layers))
            found = self._engine_run(graph, plan, inputs, grads, keep_graph=bool(plan.reruns))
        wanted = sum(leaf.requires_grad for leaf in inputs)
        mine = iter(found[:wanted])
        gradients = [next(mine) if leaf.requires_grad else None for leaf in inputs]
        captured = found[wanted:]
        pending = Pending(plan, {index: nodes[index] for index in plan.weight_only})
        for use, operands in zip(plan.deferred, taken, strict=True):
            grad = captured[use.capture]
            if grad is None:
                continue
            if use.recomputed:
                operands = self._noted(graph, use.leaf, notes, grad, microbatch)
            pending.products.append(Product(use, grad, operands, versions_of((grad, *operands))))
        pending.gradients = [
            Gradient(kept.target, grad, versions_of((grad,)))
            for kept in plan.in_input
            if (grad := captured[kept.capture]) is not None
        ]
        for again in plan.reruns:
            at = [(graph.edge((again.node, nr)), captured[place]) for nr, place in again.captures]
            edges = [edge for edge, grad in at if grad is not None]
            if edges:
                kept_grads = [grad for _, grad in at if grad is not None]
                pending.reruns.append((edges, list(again.targets), kept_grads))
        if boxes is not None:
            needed = {*plan.weight_only, *(again.node for again in plan.reruns)}
            pending.boxed = boxes.keep_only(nodes[index] for index in needed)
        if decision.unlearned:
            seen = frozenset(
                leaf
                for leaf in decision.unlearned
                if len(notes.get(id(nodes[leaf].variable), ())) == 1
            )
            self._linears[graph.shape] = seen
            del self._decisions[graph.shape, boxes is not None]
        return gradients, pending

    def _engine_run(
        self,
        graph: Graph,
        plan: Plan,
        inputs: Sequence[Tensor],
        grads: Sequence[Tensor],
        *,
        keep_graph: bool,
    ) -> tuple[Tensor | None, ...]:
        asked: list[Any] = [leaf for leaf in inputs if leaf.requires_grad]
        edges = [graph.edge(edge) for edge in plan.captures]
        if not asked and not edges:
            return ()
        with muted_hooks([graph.nodes[leaf].variable for leaf in plan.leaves]):
            return torch.autograd.grad(
                [graph.edge(root) for root in graph.shape.roots],
                [*asked, *edges],
                grads,
                retain_graph=keep_graph,
                allow_unused=True,
            )

    def _noted(
        self,
        graph: Graph,
        leaf: int | None,
        notes: dict[int, list[Tensor]],
        grad: Tensor,
        microbatch: int,
    ) -> tuple[Tensor, int]:
        """The operand that a checkpoint's recomputation passed by."""
        assert leaf is not None  # only plain chains are looked for inside checkpoints
        parameter = graph.nodes[leaf].variable
        seen = notes.get(id(parameter), [])
        if len(seen) != 1 or seen[0].numel() != grad.shape[0] * seen[0].shape[-1]:
            raise self._error(
                "a checkpointed linear layer was recomputed in another way than before, so its "
                'input was not seen; use method="whole" for a stage whose checkpointed code '
                "changes from step to step",
                microbatch,
                self._names([graph.nodes[leaf]]),
            )
        rows = seen[0].reshape(-1, seen[0].shape[-1])
        return rows.to(grad.dtype), 1

    # ── the numeric self-check ───────────────────────────────────────────────────────────────────

    def _reference(
        self, graph: Graph, plan: Plan, inputs: Sequence[Tensor], grads: Sequence[Tensor]
    ) -> tuple[Gradients, dict[int, Tensor | None]]:
        """Gradients of a full backward, with nothing added or freed."""
        asked: list[Any] = [leaf for leaf in inputs if leaf.requires_grad]
        leaves = [graph.edge((leaf, 0)) for leaf in plan.leaves]
        if not asked and not leaves:
            return [None] * len(inputs), {}
        parameters = [graph.nodes[leaf].variable for leaf in plan.leaves]
        devices = {p.device for p in parameters if p.device.type == "cuda"}
        with torch.random.fork_rng(devices=list(devices)), muted_hooks(parameters):
            found = torch.autograd.grad(
                [graph.edge(root) for root in graph.shape.roots],
                [*asked, *leaves],
                grads,
                retain_graph=True,
                allow_unused=True,
            )
        mine = iter(found[: len(asked)])
        gradients = [next(mine) if leaf.requires_grad else None for leaf in inputs]
        return gradients, dict(zip(plan.leaves, found[len(asked) :], strict=True))

    def _compare(
        self,
        graph: Graph,
        decision: Decision,
        reference: tuple[Gradients, dict[int, Tensor | None]],
        gradients: Gradients,
        pending: Pending,
        microbatch: int,
    ) -> Pending:
        """``pending`` if it is right; else what the full backward said, and no split from here."""
        plan = decision.plan
        assert plan is not None
        with muted_hooks([graph.nodes[leaf].variable for leaf in plan.leaves]):
            found = weight_gradients(pending)
        wrong = [leaf for leaf in plan.leaves if differing(reference[1][leaf], found.get(leaf))]
        inputs_differ = any(map(differing, reference[0], gradients))
        if not wrong and not inputs_differ:
            return pending
        names = self._names(graph.nodes[leaf] for leaf in wrong) + ("inputs",) * inputs_differ
        reason = "its gradients differ from those of a full backward"
        refused = decision.refused(reason, names)
        self._decisions = dict.fromkeys(self._decisions, refused)
        self.choice = refused.choice
        self._report(refused, microbatch)
        right = Pending(plan, pending.nodes)
        right.gradients = [
            Gradient((leaf, 0), grad, versions_of((grad,)))
            for leaf, grad in reference[1].items()
            if grad is not None
        ]
        return right

    # ── naming ───────────────────────────────────────────────────────────────────────────────────

    def _names(self, nodes: object) -> tuple[str, ...]:
        known = {id(p): name for name, p in self.module.named_parameters()}
        return tuple(
            known.get(id(node.variable), f"a parameter of shape {tuple(node.variable.shape)}")
            for node in nodes  # type: ignore[attr-defined]
        )

    def _error(self, message: str, microbatch: int, names: tuple[str, ...]) -> BackwardError:
        return BackwardError(
            f"{where(self.stage, microbatch)}: {message}; parameters: {', '.join(names)}",
            stage=self.stage,
            microbatch=microbatch,
            parameters=names,
        )
