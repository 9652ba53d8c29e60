"""A stage of the program and its runner in the engine, brought together while a step runs.

::

    schedule ── handler ──► stage.forward_one_chunk(m) ──► StageLink ──► StageRunner (engine)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from pipeloom.runtime.boundary import map_leaves, take_apart
from pipeloom.runtime.data_parallel import DataParallelStage
from pipeloom.runtime.stage import Parcel, StageRunner
from pipeloom.torch_api._dtensors import pack, unpack

if TYPE_CHECKING:
    from pipeloom.torch_api.stage import _PipelineStageBase

__all__ = ["StageLink"]


class _Call:
    """What the runner calls as its module: the stage's module, with what surrounds it."""

    def __init__(self, stage: _PipelineStageBase, module: nn.Module) -> None:
        self._stage = stage
        self._module = module

    def parameters(self) -> Iterator[nn.Parameter]:
        """Those of the module."""
        return self._module.parameters()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stage = self._stage
        args = unpack(args, stage._meshes)
        stage._check_inputs(args)
        output = stage._call(self._module, args, kwargs)
        stage._check_outputs((args, kwargs), output)
        return output if stage.is_last else pack(output, stage._meshes)


class StageLink:
    """What a stage's methods do while a step runs."""

    def __init__(
        self,
        stage: _PipelineStageBase,
        runner: StageRunner,
        side: DataParallelStage | None,
    ) -> None:
        self.stage = stage
        self.runner = runner
        self.side = side
        self.call = _Call(stage, runner.module)
        runner.module = cast(Any, self.call)
        self.num_microbatches = 0
        self.scales_losses = False
        #: Microbatches whose I has run and whose W has not.
        self._pending: set[int] = set()
        #: What ran here, by kind and microbatch; anything else a handler computed by itself.
        self._ran: set[tuple[str, int]] = set()
        #: Of microbatches that a handler computes by itself: their arguments.
        self._taken: dict[int, tuple[Any, ...]] = {}

    def begin_step(self, num_microbatches: int, *, scales_losses: bool) -> None:
        self.num_microbatches = num_microbatches
        self.scales_losses = scales_losses
        self._pending.clear()
        self._ran.clear()
        self._taken.clear()

    def end_step(self) -> None:
        self.num_microbatches = 0
        self.stage.bwd_cache.clear()
        self.stage.fwd_cache.clear()

    def wait_unsharded(self) -> None:
        """Before a computation: gathered parameters must be there."""
        if self.side is not None:
            self.side.wait()

    def forward(self, microbatch: int, args: Any, kwargs: Mapping[str, Any] | None) -> Any:
        """F; what the caller passes replaces the step's own arguments."""
        self.wait_unsharded()
        self._ran.add(("F", microbatch))
        runner = self.runner
        inputs = runner._inputs
        own_args: Sequence[Any] = ()
        if not runner.predecessors:
            own_args = inputs.arguments[microbatch]
        own_kwargs = inputs.keywords[microbatch]
        arguments, keywords = runner.open_forward(microbatch)
        if not runner.predecessors and args is not None and args is not own_args:
            arguments = args
        if kwargs is not None and kwargs is not own_kwargs:
            keywords = kwargs
        if inputs.training and runner.backward is not None:
            with runner.backward.forward():
                return self._run(microbatch, arguments, keywords)
        return self._run(microbatch, arguments, keywords)

    def _run(self, microbatch: int, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        output = self.call(*arguments, **keywords)
        self.runner.close_forward(microbatch, output)
        return output

    def backward(self, microbatch: int, *, full: bool) -> None:
        """B, or I."""
        self.wait_unsharded()
        self._ran.add(("B", microbatch))
        if full:
            self.runner.full_backward(microbatch)
        else:
            self.runner.input_backward(microbatch)
            self._pending.add(microbatch)

    def weight_backward(self, microbatch: int) -> bool:
        """W; ``False`` if there was no I."""
        if microbatch not in self._pending:
            return False
        self._pending.remove(microbatch)
        self._ran.add(("W", microbatch))
        self.wait_unsharded()
        self.runner.weight_backward(microbatch)
        return True

    # ── what a handler moves by hand between stages of one rank ──────────────────────────────

    def input_gradients(self, microbatch: int) -> tuple[Tensor | None, ...]:
        """The gradients that B or I found, for the stage before."""
        for box, name in self.runner._gradient_boxes.values():
            gradients = box.get((name, microbatch))
            if gradients is not None:
                return tuple(gradients)
        return ()

    def has_input(self, microbatch: int) -> bool:
        """True if the output of the stage before is there."""
        return any((s, microbatch) in self.runner.received for s in self.runner.predecessors)

    def put_input(self, output: Any, microbatch: int) -> None:
        """Take the output of the stage before, which is on this rank."""
        if not self.has_input(microbatch):
            tensors, layout = take_apart(output)
            parcel = Parcel([tensor.detach() for tensor in tensors], layout)
            self.runner.received[self.runner.predecessors[0], microbatch] = parcel

    def put_gradients(self, gradients: Sequence[Tensor | None], microbatch: int) -> None:
        """Take the gradients that the next stage, which is on this rank, found."""
        for stage in self.runner.successors:
            self.runner.gradients_in.setdefault((stage, microbatch), list(gradients))

    # ── what a handler computes by itself ────────────────────────────────────────────────────

    def take_inputs(self, microbatch: int) -> tuple[Any, ...]:
        """The arguments of a microbatch."""
        if microbatch not in self._taken:
            arguments, _ = self.runner.open_forward(microbatch)
            self._taken[microbatch] = unpack(tuple(arguments), self.stage._meshes)
        return self._taken[microbatch]

    def take_gradients(self, microbatch: int) -> tuple[Tensor | None, ...]:
        """The gradients of the outputs that a handler made."""
        return tuple(self.runner.take_gradients(microbatch) or ())

    def settle(self, kind: str, microbatch: int) -> None:
        """Pass on what a handler left in the stage's caches, where it did not call the stage."""
        stage, runner = self.stage, self.runner
        if kind == "F" and ("F", microbatch) not in self._ran:
            if microbatch in stage.fwd_cache:
                self.take_inputs(microbatch)
                outputs, *_ = stage.fwd_cache[microbatch]
                runner.hand_over(microbatch, pack(_as_leaves(outputs), stage._meshes))
        elif kind in "BI" and ("B", microbatch) not in self._ran:
            found = stage.bwd_cache.pop(microbatch, None)
            for key in [(successor, microbatch) for successor in runner.successors]:
                runner.gradients_in.pop(key, None)
            if found is not None and microbatch in self._taken:
                pairs = zip(self._taken[microbatch], found, strict=False)
                own = [grad for x, grad in pairs if isinstance(x, Tensor) and x.requires_grad]
                runner.hand_back(microbatch, own, is_over=kind == "B")
        elif kind == "W" and ("W", microbatch) not in self._ran:
            runner.forget(microbatch)


def _as_leaves(outputs: Any) -> Any:
    """Outputs without their graph, whose gradients are wanted where they can have one."""

    def as_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        leaf = leaf.detach()
        return leaf.requires_grad_() if leaf.is_floating_point() else leaf

    return map_leaves(as_leaf, outputs)
