"""One stage of the model: its module, and what is kept of every microbatch.

::

    received ──► F ──► outgoing           one entry per neighbour and microbatch,
                 │ kept: _InFlight        gone as soon as it has been used
    gradients_out ◄── B ◄── gradients_in

Where the neighbour lives on the same rank, its box is written directly; otherwise a SEND takes
what lies in ``outgoing`` or ``gradients_out``, and a RECV puts into ``received`` or
``gradients_in``. The stage knows no transport.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeloom.errors import BackwardError
from pipeloom.runtime.backward import BackwardMethod, SavedMicrobatch
from pipeloom.runtime.boundary import (
    Layout,
    Routed,
    assemble,
    fits,
    flatten,
    is_arguments,
    map_leaves,
    require_routes,
    take_apart,
    unflatten,
)
from pipeloom.runtime.gradients import add_gradients
from pipeloom.runtime.loss import StepLoss

__all__ = ["Parcel", "StageRunner", "StepInputs"]

Gradients = list[Tensor | None]
Key = tuple[int, int]


class Parcel(NamedTuple):
    """A value on its way: tensors without graph, and how they make up the value."""

    tensors: list[Tensor]
    layout: Layout


class StepInputs(NamedTuple):
    """What one stage is given for one step, by microbatch."""

    #: Positional arguments; used by a first stage only.
    arguments: Sequence[tuple[Any, ...]]
    keywords: Sequence[Mapping[str, Any]]
    #: True if any tensor among them requires grad.
    need_grad: bool
    #: For a last stage with targets.
    loss: StepLoss | None
    keep_outputs: bool
    training: bool


class _InFlight:
    """What is kept of one microbatch from F to the end of its backward."""

    __slots__ = ("num_inputs", "num_outputs", "origins", "routes", "saved", "user_inputs")

    def __init__(self) -> None:
        self.saved: SavedMicrobatch | None = None
        #: Which of the stage's differentiable inputs came from which predecessor: slices.
        self.origins: list[tuple[int, int, int]] = []
        #: Which of its differentiable outputs went to which successor: slices.
        self.routes: list[tuple[int, int, int]] = []
        self.num_inputs = 0
        self.num_outputs = 0
        #: Tensors of the step's own arguments that require grad; they come last among the inputs.
        self.user_inputs: Sequence[Tensor] = ()


class StageRunner:
    """Runs F, B, I and W of one stage."""

    def __init__(
        self,
        index: int,
        module: nn.Module,
        *,
        predecessors: Sequence[int],
        successors: Sequence[int],
        backward: BackwardMethod | None,
    ) -> None:
        self.index = index
        self.module = module
        self.predecessors = tuple(predecessors)
        self.successors = tuple(successors)
        self.backward = backward
        #: What came from predecessors and successors: (stage, microbatch) → what.
        self.received: dict[Key, Parcel] = {}
        self.gradients_in: dict[Key, Gradients] = {}
        #: What waits to be sent: (to stage, microbatch) → what.
        self.outgoing: dict[Key, Parcel] = {}
        self.gradients_out: dict[Key, Gradients] = {}
        #: Where to put what goes to a neighbour: its box, and the stage to write on it.
        self._output_boxes = {stage: (self.outgoing, stage) for stage in successors}
        self._gradient_boxes = {stage: (self.gradients_out, stage) for stage in predecessors}
        self._layouts: dict[int, Layout] = {}
        self._open: dict[int, tuple[_InFlight, list[Tensor]]] = {}
        self._in_flight: dict[int, _InFlight] = {}
        self._inputs = StepInputs((), (), False, None, False, False)
        self._context: AbstractContextManager[object] | None = nullcontext()
        self.outputs: dict[int, Any] = {}
        #: Tensors of the step's arguments, cut to microbatches, and their gradients.
        self.argument_gradients: list[tuple[Tensor, Tensor]] = []

    def connect(self, other: StageRunner) -> None:
        """Hand this stage's outputs to a successor on the same rank without sending."""
        self._output_boxes[other.index] = (other.received, self.index)
        other._gradient_boxes[self.index] = (self.gradients_in, other.index)

    def begin_step(self, inputs: StepInputs) -> None:
        """Get ready for the microbatches of a step."""
        self._inputs = inputs

    def end_step(self) -> None:
        """Let go of everything that belongs to the step."""
        self._inputs = StepInputs((), (), False, None, False, False)
        boxes: tuple[dict[Any, Any], ...] = (
            self.received,
            self.gradients_in,
            self.outgoing,
            self.gradients_out,
            self._open,
            self._in_flight,
        )
        for box in boxes:
            box.clear()
        self.outputs = {}
        self.argument_gradients = []

    # ── forward ──────────────────────────────────────────────────────────────────────────────

    def forward(self, microbatch: int) -> None:
        """F: the module's call between :meth:`open_forward` and :meth:`close_forward`."""
        arguments, keywords = self.open_forward(microbatch)
        if self._inputs.training and self.backward is not None:
            with self.backward.forward():
                output = self.module(*arguments, **keywords)
                self._keep(microbatch, self._result(microbatch, output))
        else:
            self.close_forward(microbatch, self.module(*arguments, **keywords))

    def open_forward(self, microbatch: int) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """The arguments of the module for a microbatch; its tensors are leaves."""
        flight = _InFlight()
        leaves: list[Tensor] = []
        inputs = self._inputs
        keywords = inputs.keywords[microbatch]
        arguments: Sequence[Any]
        if self.predecessors:
            arguments = []
            for stage in self.predecessors:
                start = len(leaves)
                value = _unpack(self.received.pop((stage, microbatch)), leaves)
                flight.origins.append((stage, start, len(leaves)))
                if is_arguments(value):
                    arguments.extend(value)
                else:
                    arguments.append(value)
        else:
            arguments = inputs.arguments[microbatch]
        if inputs.need_grad:
            own: list[Tensor] = []
            value = ((), keywords) if self.predecessors else (arguments, keywords)
            detached, keywords = _detach_inputs(value, own, leaves)
            arguments = arguments if self.predecessors else detached
            flight.user_inputs = own
        flight.num_inputs = len(leaves)
        self._open[microbatch] = (flight, leaves)
        return arguments, keywords

    def close_forward(self, microbatch: int, output: Any) -> None:
        """Take the module's output: pass it on, or compute the loss; keep what B needs.

        A handler that calls the module itself calls this inside ``backward.forward()``.
        """
        self._keep(microbatch, self._result(microbatch, output))

    def hand_over(self, microbatch: int, output: Any) -> None:
        """Take the output of a microbatch whose graph is somebody else's: pass it on, or keep it.

        A gradient comes back for every tensor of it that requires grad; see :meth:`hand_back`.
        """
        flight, _ = self._open[microbatch]
        if self.successors:
            differentiable = self._pass_on(microbatch, flight, output)
        else:
            differentiable = []
            if self._inputs.keep_outputs:
                self.outputs[microbatch] = map_leaves(_detach, output)
        del self._open[microbatch]
        if self._inputs.training:
            flight.num_outputs = len(differentiable)
            self._in_flight[microbatch] = flight

    def hand_back(self, microbatch: int, gradients: Gradients, *, is_over: bool) -> None:
        """Take the gradients of the microbatch's differentiable inputs, for those before; with
        ``is_over`` nothing of the microbatch is needed any more."""
        flight = self._in_flight[microbatch]
        if is_over:
            del self._in_flight[microbatch]
        self._distribute(microbatch, flight, gradients)

    def _result(self, microbatch: int, output: Any) -> list[Tensor]:
        """The tensors that the microbatch's backward will start from."""
        flight, _ = self._open[microbatch]
        if self.successors:
            return self._pass_on(microbatch, flight, output)
        inputs = self._inputs
        if inputs.keep_outputs:
            self.outputs[microbatch] = map_leaves(_detach, output)
        if inputs.loss is None:
            return []
        share = inputs.loss.compute(output, microbatch)
        if share.requires_grad:
            return [share]
        if inputs.training:
            self._require_nothing_to_train(microbatch)
        return []

    def _require_nothing_to_train(self, microbatch: int) -> None:
        """A loss without a gradient is right only where nothing before it wants one."""
        _, leaves = self._open[microbatch]
        if leaves or any(parameter.requires_grad for parameter in self.module.parameters()):
            raise BackwardError(
                f"the loss of microbatch {microbatch} does not require grad, although inputs or "
                f"parameters of stage {self.index} do: something in the stage or in loss_fn cut "
                "the graph (detach, item, no_grad, a constant); call eval for a forward pass "
                "alone, or return (output * 0).sum() for a microbatch without a loss"
            )

    def _pass_on(self, microbatch: int, flight: _InFlight, output: Any) -> list[Tensor]:
        differentiable: list[Tensor] = []
        if type(output) is Routed:
            require_routes(output, self.successors, self.index)
        tensors: list[Tensor] = []
        layout: Layout | None = None
        start = 0
        for stage in self.successors:
            if type(output) is Routed or layout is None:
                value = output[stage] if type(output) is Routed else output
                layout = self._layouts.get(stage)
                if fits(value, layout):
                    tensors = [value]
                else:
                    tensors, layout = take_apart(value)
                    self._layouts[stage] = layout
                start = len(differentiable)
                differentiable.extend([tensor for tensor in tensors if tensor.requires_grad])
            assert layout is not None
            flight.routes.append((stage, start, len(differentiable)))
            box, name = self._output_boxes[stage]
            box[name, microbatch] = Parcel([tensor.detach() for tensor in tensors], layout)
        return differentiable

    def _keep(self, microbatch: int, outputs: list[Tensor]) -> None:
        flight, leaves = self._open.pop(microbatch)
        if not self._inputs.training:
            return
        flight.num_outputs = len(outputs)
        self._in_flight[microbatch] = flight
        if outputs:
            assert self.backward is not None
            flight.saved = self.backward.save(microbatch=microbatch, inputs=leaves, outputs=outputs)

    # ── backward ─────────────────────────────────────────────────────────────────────────────

    def full_backward(self, microbatch: int) -> None:
        """B: gradients of inputs and weights."""
        flight = self._in_flight.pop(microbatch)
        gradients = self.output_gradients(microbatch, flight)
        saved = flight.saved
        if saved is not None and (gradients is None or _any_there(gradients)):
            assert self.backward is not None
            self._distribute(microbatch, flight, self.backward.full(saved, gradients))
        else:
            self._distribute(microbatch, flight, [None] * flight.num_inputs)

    def input_backward(self, microbatch: int) -> None:
        """I: gradients of inputs."""
        flight = self._in_flight[microbatch]
        gradients = self.output_gradients(microbatch, flight)
        saved = flight.saved
        if saved is not None and (gradients is None or _any_there(gradients)):
            assert self.backward is not None
            self._distribute(microbatch, flight, self.backward.input(saved, gradients))
        else:
            flight.saved = None
            self._distribute(microbatch, flight, [None] * flight.num_inputs)

    def weight_backward(self, microbatch: int) -> None:
        """W: gradients of weights."""
        saved = self._in_flight.pop(microbatch).saved
        if saved is not None:
            assert self.backward is not None
            self.backward.weight(saved)

    def take_gradients(self, microbatch: int) -> Gradients | None:
        """The gradients of an output that was handed over, once."""
        return self.output_gradients(microbatch, self._in_flight[microbatch])

    def forget(self, microbatch: int) -> None:
        """Nothing of the microbatch is needed any more."""
        self._in_flight.pop(microbatch, None)

    def output_gradients(self, microbatch: int, flight: _InFlight) -> Gradients | None:
        """The gradients of the differentiable outputs, summed over the successors that used them;
        ``None`` for the loss, where the gradient is one."""
        routes = flight.routes
        if not routes:
            return None
        if len(routes) == 1:
            return self.gradients_in.pop((routes[0][0], microbatch))
        total: Gradients = [None] * flight.num_outputs
        for stage, start, _ in routes:
            parts = self.gradients_in.pop((stage, microbatch))
            for position, part in enumerate(parts, start):
                total[position] = add_gradients(total[position], part)
        return total

    def _distribute(self, microbatch: int, flight: _InFlight, gradients: Gradients) -> None:
        for stage, start, stop in flight.origins:
            box, name = self._gradient_boxes[stage]
            box[name, microbatch] = gradients[start:stop]
        if flight.user_inputs:
            own = gradients[len(gradients) - len(flight.user_inputs) :]
            self.argument_gradients += [
                (tensor, gradient)
                for tensor, gradient in zip(flight.user_inputs, own, strict=True)
                if gradient is not None
            ]


def _unpack(parcel: Parcel, leaves: list[Tensor]) -> Any:
    tensors, layout = parcel
    for tensor, needs_grad in zip(tensors, layout.needs_grad, strict=True):
        if needs_grad:
            leaves.append(tensor.requires_grad_())
    return tensors[0] if layout.tree is None else assemble(layout, tensors)


def _detach_inputs(value: Any, own: list[Tensor], leaves: list[Tensor]) -> Any:
    """The step's own arguments as leaves, so that their graph is walked once, after the step."""
    flat, tree = flatten(value)
    for position, leaf in enumerate(flat):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            own.append(leaf)
            flat[position] = leaf.detach().requires_grad_()
            leaves.append(flat[position])
    return unflatten(flat, tree)


def _any_there(gradients: Gradients) -> bool:
    return any(gradient is not None for gradient in gradients)


def _detach(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf
