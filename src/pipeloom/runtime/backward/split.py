"""The backward of one stage in two halves: the methods ``deferred`` and ``graph``.

::

    F     runs untouched (graph method: saved tensors go into boxes)
    I     read the graph ─► its plan (made once per shape of graph) ─► take operands from nodes
          ─► one engine run ─► gradients of inputs; the rest waits in ``saved.pending``
    W     products into ``.grad``
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.errors import BackwardError, BackwardMethodError
from pipeloom.runtime.backward.accumulate import add_early, add_weight_gradients
from pipeloom.runtime.backward.boxes import Boxes, others_keep_saved
from pipeloom.runtime.backward.budget import (
    bytes_of,
    bytes_saved,
    units_computed_early,
    weight_storages,
)
from pipeloom.runtime.backward.compiled.halves import engine_is_compiled
from pipeloom.runtime.backward.decide import Decision, decide
from pipeloom.runtime.backward.hook_count import HookCount
from pipeloom.runtime.backward.input_half import run_input, weights_have_hooks
from pipeloom.runtime.backward.listeners import Listeners
from pipeloom.runtime.backward.method import (
    Choice,
    Gradients,
    SavedMicrobatch,
    SplitBackwardWarning,
    hold_roots,
    require_leaves,
)
from pipeloom.runtime.backward.numeric_check import run_reference
from pipeloom.runtime.backward.pending import Pending
from pipeloom.runtime.backward.phases import enter_phase, failed_unless_done, where
from pipeloom.runtime.backward.plan import Unit
from pipeloom.runtime.backward.walk import Edge, Graph, GraphShape, accumulation_below, read_graph
from pipeloom.runtime.backward.whole import output_roots, run_full

__all__ = ["SplitBackward"]

# A stage whose control flow depends on its data has a few shapes of graph; one that never repeats
# gains nothing from remembering.
MOST_PLANS = 64

Key = tuple[GraphShape, bool, bool, bool]  # boxed, hooked, engine compiled


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
        hooks: HookCount,
    ) -> None:
        self.module = module
        self.hold_at_most = hold_at_most
        self.method = method
        self.self_check = self_check
        self.strict = strict
        self.stage = stage
        self.choice: Choice | None = None
        self._decisions: dict[Key, list[Decision]] = {}  # that fit different saved tensors
        self._checked: set[Decision] = set()
        self._unused: set[str] = set()
        self._early: dict[Decision, frozenset[Unit]] = {}
        self._boxes: Boxes | None = None
        self._wants_boxes = method == "graph"
        self._hooks = hooks
        self._num_hooks, self._first_node = hooks.current(), 0
        # Whether weights have hooks, by the plan without them, and how many hooks there were then.
        self._weights_hooked: dict[Decision, tuple[int, bool]] = {}
        self._listeners = Listeners(hooks)

    # ── F ────────────────────────────────────────────────────────────────────────────────────────

    def forward(self) -> AbstractContextManager[object]:
        self._listeners.before_forward()
        self._num_hooks = self._hooks.current()
        self._first_node = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        boxed = self._wants_boxes and not others_keep_saved()
        self._boxes = Boxes() if boxed else None
        return nullcontext() if self._boxes is None else self._in_boxes(self._boxes)

    @contextmanager
    def _in_boxes(self, boxes: Boxes) -> Iterator[None]:
        try:
            with boxes:
                yield
        except RuntimeError as error:
            if "saved tensor hooks" not in str(error) or self.method == "graph":
                raise
            raise BackwardMethodError(
                f"{'the stage' if self.stage is None else f'stage {self.stage}'} runs code that "
                "allows no hooks on saved tensors (transforms of torch.func), and a product that "
                'can only be split with such hooks; use method="deferred", which leaves that '
                f"product whole: {error}"
            ) from error

    def save(
        self, *, microbatch: int, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> SavedMicrobatch:
        boxes, self._boxes = self._boxes, None
        require_leaves(inputs, where(self.stage, microbatch))
        saved = SavedMicrobatch(
            microbatch,
            list(inputs),
            hold_roots(outputs),
            pending=boxes,
            num_hooks=self._num_hooks,
            first_node=self._first_node,
        )
        self._listeners.begin(saved)
        if self.choice is None:
            graph = read_graph(saved.inputs, saved.outputs)
            self._decide(graph, saved, boxed=boxes is not None)
        return saved

    # ── B, I, W ──────────────────────────────────────────────────────────────────────────────────

    def full(
        self, saved: SavedMicrobatch, output_grads: Sequence[Tensor | None] | None
    ) -> Gradients:
        enter_phase(saved, "B", self.stage)
        self._listeners.end(saved)
        saved.pending = None
        with failed_unless_done(saved, self.stage):
            return run_full(saved, output_grads, stage=self.stage)

    def input(
        self, saved: SavedMicrobatch, output_grads: Sequence[Tensor | None] | None
    ) -> Gradients:
        enter_phase(saved, "I", self.stage)
        with failed_unless_done(saved, self.stage):
            gradients = self._run_input(saved, output_grads)
        if saved.pending is not None:
            saved.pending.seal()
        return gradients

    def _run_input(
        self, saved: SavedMicrobatch, output_grads: Sequence[Tensor | None] | None
    ) -> Gradients:
        boxes, saved.pending = saved.pending, None
        place = where(self.stage, saved.microbatch)
        positions, grads = output_roots(saved.outputs, output_grads, place=place)
        if not positions:
            gradients: Gradients = [None] * len(saved.inputs)
            saved.release_graph()
            return gradients
        graph = read_graph(saved.inputs, [saved.outputs[index] for index in positions])
        decision, hooked = self._decide(graph, saved, boxed=boxes is not None)
        if decision.suspects:
            return self._run_suspicious(decision, saved, output_grads)
        if decision.plan is None:
            return run_full(saved, output_grads, stage=self.stage)
        inputs = saved.inputs
        saved.release_graph()
        plan = decision.plan

        def run() -> tuple[Gradients, Pending]:
            gradients, pending = run_input(
                graph,
                plan,
                inputs=inputs,
                grads=grads,
                boxes=boxes,
                hooked=hooked,
                hooks=self._hooks,
            )
            if pending.overwritten:
                raise self._error_at(
                    saved.microbatch,
                    "I overwrote an activation or a gradient that W needs, by a Function or a hook "
                    'that works in place; use method="whole" for this stage',
                    pending,
                    pending.overwritten,
                )
            return gradients, pending

        trusted = decision.runs_once or decision in self._checked
        if self.self_check != "numeric" or trusted:
            limit = self._limit(graph, decision)
            gradients, pending = run()
            add_early(pending, self._choose_early(decision, pending, limit))
            if decision.plan.halved:
                pending.watch([*inputs, *grads])
            saved.pending = pending
            return gradients
        self._checked.add(decision)
        reference = run_reference(graph, decision.plan, self.module, inputs, grads)
        try:
            gradients, saved.pending = run()
        except BackwardError:
            raise
        except Exception as error:
            # Some backwards run only once (selective checkpoints). What came out of the one that
            # did is right; if this is something else, the next microbatch says so.
            warnings.warn(
                f"{where(self.stage, saved.microbatch)}: the split backward was not compared with "
                f"a full one, for it did not run after it: {error}",
                SplitBackwardWarning,
                stacklevel=2,
            )
            saved.pending = None
        if saved.pending is not None:
            wrong, inputs_differ = reference.differences(gradients, saved.pending)
            if not wrong and not inputs_differ:
                return gradients
            names = self._names(graph.nodes[leaf] for leaf in wrong) + ("inputs",) * inputs_differ
            self._stop_splitting(decision, names, saved.microbatch)
        saved.pending = reference.pending()
        return list(reference.of_inputs)

    def _run_suspicious(
        self,
        decision: Decision,
        saved: SavedMicrobatch,
        output_grads: Sequence[Tensor | None] | None,
    ) -> Gradients:
        """A full backward that shows whether parameters are hidden or just not used."""
        suspects = [self.module.get_parameter(name) for name in decision.suspects]
        before = [(p.grad, p.grad._version if p.grad is not None else 0) for p in suspects]
        gradients = run_full(saved, output_grads, stage=self.stage)
        if any(
            p.grad is not grad or (grad is not None and grad._version != version)
            for p, (grad, version) in zip(suspects, before, strict=True)
        ):
            known = replace(decision, suspects=(), uncovered=decision.suspects)
            self._report(known, saved.microbatch)
            self._decisions = {
                key: [known if one is decision else one for one in decisions]
                for key, decisions in self._decisions.items()
            }
        else:
            self._unused |= set(decision.suspects)
            for decisions in self._decisions.values():
                decisions[:] = [one for one in decisions if one is not decision]
        return gradients

    def weight(self, saved: SavedMicrobatch) -> None:
        enter_phase(saved, "W", self.stage)
        self._listeners.end(saved)
        pending, saved.pending = saved.pending, None
        if pending is None:
            return
        changed = pending.changed()
        if changed:
            raise self._error_at(
                saved.microbatch,
                "a tensor that W needs was overwritten; keep the stage's inputs, activations and "
                "gradients unchanged until W",
                pending,
                changed,
            )
        with failed_unless_done(saved, self.stage):
            add_weight_gradients(pending, self._listeners)

    def held_bytes(self, saved: SavedMicrobatch) -> int:
        if not isinstance(saved.pending, Pending):
            return 0
        return bytes_of(saved.pending.tensors(), excluded=weight_storages(self.module))

    def _limit(self, graph: Graph, decision: Decision) -> float | None:
        """Bytes to keep at most between I and W, asked for once per shape of graph."""
        if self.hold_at_most is None or decision in self._early:
            return None
        return self.hold_at_most * bytes_saved(graph, excluded=weight_storages(self.module))

    def _choose_early(
        self, decision: Decision, pending: Pending, limit: float | None
    ) -> frozenset[Unit]:
        if decision not in self._early:
            products = set(map(id, (t for p in pending.products for t in p.tensors())))
            others = [tensor for tensor in pending.tensors() if id(tensor) not in products]
            self._early[decision] = (
                units_computed_early(
                    pending.products, others, limit=limit, excluded=weight_storages(self.module)
                )
                if limit
                else frozenset()
            )
        return self._early[decision]

    # ── deciding ─────────────────────────────────────────────────────────────────────────────────

    def _decide(
        self, graph: Graph, saved: SavedMicrobatch, *, boxed: bool
    ) -> tuple[Decision, bool]:
        """What to do, and whether there may be hooks in the graph."""
        now = self._hooks.current()
        if now != saved.num_hooks:
            return self._decide_for(graph, saved, boxed=boxed, hooked=True), True
        decision = self._decide_for(graph, saved, boxed=boxed, hooked=False)
        if decision.plan is None:
            return decision, False
        then, hooked = self._weights_hooked.get(decision, (-1, False))
        if then != now:
            hooked = weights_have_hooks(graph, decision.plan, since=saved.first_node)
            self._weights_hooked[decision] = now, hooked
        if hooked:
            decision = self._decide_for(graph, saved, boxed=boxed, hooked=True)
        return decision, hooked

    def _decide_for(
        self, graph: Graph, saved: SavedMicrobatch, *, boxed: bool, hooked: bool
    ) -> Decision:
        key = (graph.shape, boxed, hooked, engine_is_compiled())
        for decision in self._decisions.get(key, ()):
            if decision.fits(graph):
                return decision
        decision = decide(
            graph,
            module=self.module,
            method=self.method,
            boxed=boxed,
            hooked=hooked,
            unused=frozenset(self._unused),
            check=self.self_check != "off",
        )
        if decision.suspects and self.strict:
            decision = replace(decision, suspects=(), uncovered=decision.suspects)
        if decision.uncovered:
            self._report(decision, saved.microbatch)
        if self.choice is None or len(decision.choice.deferred) > len(self.choice.deferred):
            self.choice = decision.choice
        self._wants_boxes = self._wants_boxes or decision.wants_boxes
        if sum(map(len, self._decisions.values())) >= MOST_PLANS:
            for known in (self._decisions, self._early, self._checked, self._weights_hooked):
                known.clear()
        self._decisions.setdefault(key, []).append(decision)
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

    def _stop_splitting(self, decision: Decision, names: tuple[str, ...], microbatch: int) -> None:
        refused = decision.refused("its gradients differ from those of a full backward", names)
        self._decisions = {key: [refused] for key in self._decisions}
        self.choice = refused.choice
        self._report(refused, microbatch)

    # ── naming ───────────────────────────────────────────────────────────────────────────────────

    def _names(self, nodes: Iterable[Any]) -> tuple[str, ...]:
        known = {id(p): name for name, p in self.module.named_parameters()}
        return tuple(
            known.get(id(node.variable), f"a parameter of shape {tuple(node.variable.shape)}")
            for node in nodes
        )

    def _error_at(
        self, microbatch: int, message: str, pending: Pending, edges: Sequence[Edge]
    ) -> BackwardError:
        """About the parameters that gradients come to from these edges."""
        ends = [end for at, _ in edges for end in accumulation_below(pending.nodes[at])]
        names = self._names(dict.fromkeys(ends))
        return BackwardError(
            f"{where(self.stage, microbatch)}: {message}; parameters: {', '.join(names)}",
            stage=self.stage,
            microbatch=microbatch,
            parameters=names,
        )
