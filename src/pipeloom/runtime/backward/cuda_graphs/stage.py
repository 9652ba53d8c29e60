"""A stage whose F, I and W are replayed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from itertools import compress
from operator import not_
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pipeloom.errors import BackwardError, BackwardMethodError, ShapeError
from pipeloom.ir.occupancy import walk_occupancy
from pipeloom.ir.products import ACTIVATION, RETAINED
from pipeloom.ir.schedule import Schedule
from pipeloom.runtime.backward.choose import choose_method
from pipeloom.runtime.backward.cuda_graphs.memory import Memory
from pipeloom.runtime.backward.cuda_graphs.obstacles import obstacles_before, stale_parameters
from pipeloom.runtime.backward.cuda_graphs.recorder import CannotRecord, CudaRecorder, Recorder
from pipeloom.runtime.backward.cuda_graphs.settings import Settings
from pipeloom.runtime.backward.cuda_graphs.traces import Traces
from pipeloom.runtime.backward.method import BackwardMethod, Gradients, SavedMicrobatch
from pipeloom.runtime.backward.walk import read_graph
from pipeloom.runtime.boundary import Layout, assemble, find_differences, take_apart

__all__ = ["CapturedStage", "slots_needed"]

NUM_WARM_UP_RUNS = 3  # kernels choose their algorithms, libraries take their workspaces


def slots_needed(schedule: Schedule, stage: int) -> int:
    """How many microbatches a schedule has in flight on a stage, from F to the end of B or W.

    >>> import pipeloom
    >>> schedule = pipeloom.build_schedule("1f1b", ranks=4, microbatches=8)
    >>> [slots_needed(schedule, stage) for stage in range(4)]
    [4, 3, 2, 1]
    """
    rank = schedule.placement.ranks[stage]
    order = () if rank is None else schedule.actions[rank]

    def size(product: tuple[Any, ...]) -> float:
        return float(product[1] == stage and product[0] in (ACTIVATION, RETAINED))

    return round(walk_occupancy(schedule.dependencies, order, size).peak)


@dataclass(slots=True, eq=False)
class Slot:
    """One microbatch in flight: the tensors that its recordings read and write."""

    inputs: list[Tensor]
    outputs: list[Tensor]
    output_grads: list[Tensor]
    input_grads: Gradients
    forward: Callable[[], object]
    input: Callable[[], object]
    weight: Callable[[], object]


class Lease:
    """A slot in use; free again when nothing is left of the microbatch that has it."""

    __slots__ = ("_free", "slot")

    def __init__(self, free: list[Slot]) -> None:
        self.slot, self._free = free.pop(), free

    def __del__(self) -> None:
        self._free.append(self.slot)


class CapturedStage:
    """Replaces the forward of a module by one that replays it, and its backward.

    ``args`` and ``kwargs`` are a sample of what a microbatch calls the module with; tensors that
    will need a gradient must require it here. ``recorder`` is for tests; all else goes to
    :func:`pipeloom.runtime.backward.choose_method`, which decides how the backward is split.

    Calls without gradients, and in the other of training and evaluation mode, run the module's own
    forward. :meth:`release` gives it back for good.
    """

    def __init__(
        self,
        module: nn.Module,
        *args: Any,
        num_slots: int,
        kwargs: Mapping[str, Any] | None = None,
        stage: int | None = None,
        recorder: Recorder | None = None,
        **backward_options: Any,
    ) -> None:
        self.module = module
        self.stage = stage
        self.num_slots = num_slots
        sample, self._arguments = take_apart((args, dict(kwargs or {})))
        tensors = [*module.parameters(), *module.buffers(), *sample]
        device = recorder.device if recorder is not None else _cuda_device(tensors)
        if isinstance(getattr(module.forward, "__self__", None), CapturedStage):
            _refuse_if(["it is captured already; release() that first"], stage)
        _refuse_if(obstacles_before(module, sample, device), stage)
        self._recorder = recorder or CudaRecorder(device)
        self._own_forward = module.forward
        self._replaced = vars(module).get("forward")
        self._training = module.training
        self._left: list[Lease] = []  # by backwards whose W nobody has asked for yet
        self._result: Layout
        self._grads: list[tuple[str, Tensor, Tensor]] = []
        backward = choose_method(module, stage=stage, **backward_options)
        self._capture(backward, sample)
        self._memory = Memory(module)
        self._settings = Settings(module, self._recorder.device)
        self._anchor = torch.zeros((), device=self._recorder.device, requires_grad=True)
        module.forward = self._forward

    def release(self) -> None:
        """Give the module its own forward back."""
        if self._replaced is not None:
            self.module.forward = self._replaced
        else:
            vars(self.module).pop("forward", None)
        self._free.clear()  # with the memory of the slots

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{self._where()} cannot be copied or pickled, and so its module cannot: recordings "
            "belong to this process; use the module's state_dict(), or release() it first"
        )

    def weight_backward(self) -> Callable[[], object]:
        """What W of the microbatch does whose backward has just run; for ``weight_backward=``."""
        if not self._left:
            return _nothing
        lease = self._left.pop()

        def run() -> None:
            self._recorder.before_replay()
            self._attach_gradients()
            lease.slot.weight()

        return run

    # ── capturing ────────────────────────────────────────────────────────────────────────────────

    def _capture(self, backward: BackwardMethod, sample: Sequence[Tensor]) -> None:
        """Warm up and record; gradients, buffers and random numbers are as before."""
        parameters = [(n, p) for n, p in self.module.named_parameters() if p.requires_grad]
        before = [
            (p, p.grad, torch.clone(p.grad) if p.grad is not None else None) for _, p in parameters
        ]
        buffers = [(buffer, buffer.clone()) for buffer in self.module.buffers()]
        cuda = [self._recorder.device] if self._recorder.device.type == "cuda" else []
        try:
            with ExitStack() as during:
                during.enter_context(torch.random.fork_rng(cuda))
                during.enter_context(self._recorder.aside())
                _refuse_if(stale_parameters(parameters), self.stage)
                for run in range(NUM_WARM_UP_RUNS):
                    is_last = run == NUM_WARM_UP_RUNS - 1
                    with self._recorder.strictly() if is_last else nullcontext():
                        self._warm_up(backward, sample, is_first=run == 0)
                gc.collect()  # what is let go in the middle of a recording becomes part of it
                self._grads = [(n, p, p.grad) for n, p in parameters if p.grad is not None]
                self._refuse_sparse()
                self._free = [self._record(backward, sample) for _ in range(self.num_slots)]
                # A .grad that came to be in a recording would lie in memory that slots reuse.
                grads = {name: grad for name, _, grad in self._grads}
                assert all(p.grad is grads.get(name) for name, p in parameters)
        except CannotRecord as error:
            raise _refusal([str(error)], self.stage) from (error.__cause__ or error)
        finally:
            with torch.no_grad():
                for parameter, grad, values in before:
                    parameter.grad = grad
                    if grad is not None and values is not None:
                        grad.copy_(values)
                for buffer, values in buffers:
                    buffer.copy_(values)

    def _warm_up(
        self, backward: BackwardMethod, sample: Sequence[Tensor], *, is_first: bool
    ) -> None:
        traces = Traces(self.module, self._recorder.device)
        inputs = _leaves(sample)
        saved, outputs = self._run_forward(backward, inputs)
        graph = read_graph(saved.inputs, saved.outputs)
        _refuse_if(traces.obstacles(graph, is_first=is_first), self.stage)
        backward.input(saved, [torch.zeros_like(out) for out in self._differentiable(outputs)])
        backward.weight(saved)

    def _run_forward(
        self, backward: BackwardMethod, inputs: list[Tensor]
    ) -> tuple[SavedMicrobatch, list[Tensor]]:
        args, kwargs = assemble(self._arguments, inputs)
        with backward.forward():
            result = self._own_forward(*args, **kwargs)
        outputs, self._result = take_apart(result)
        differentiable = [output for output in outputs if output.requires_grad]
        saved = backward.save(microbatch=0, inputs=inputs, outputs=differentiable)
        return saved, [output.detach() for output in outputs]

    def _record(self, backward: BackwardMethod, sample: Sequence[Tensor]) -> Slot:
        record, pool = self._recorder.record, self._recorder.new_pool()
        inputs = _leaves(sample)
        (saved, outputs), forward = record(lambda: self._run_forward(backward, inputs), pool)
        grads = [torch.zeros_like(output) for output in self._differentiable(outputs)]
        input_grads, input_ = record(lambda: backward.input(saved, grads), pool)
        weight: Callable[[], object] = _nothing
        if saved.pending is not None:  # else I did it all, and there is nothing to record
            _, weight = record(lambda: backward.weight(saved), pool)
        static = [leaf.detach() for leaf in inputs]
        return Slot(static, outputs, grads, input_grads, forward, input_, weight)

    def _differentiable(self, values: Sequence[Any]) -> list[Any]:
        """Of what belongs to the outputs, that of those with a gradient."""
        return list(compress(values, self._result.needs_grad))

    def _refuse_sparse(self) -> None:
        _refuse_if(
            [
                f"parameter {name} gets sparse gradients, whose memory is new every time"
                for name, _, grad in self._grads
                if grad.layout is not torch.strided
            ],
            self.stage,
        )

    # ── replaying ────────────────────────────────────────────────────────────────────────────────

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module's forward is from now on."""
        if not torch.is_grad_enabled() or self.module.training != self._training:
            with self._memory.used_by_own_code():
                return self._own_forward(*args, **kwargs)
        given, layout = take_apart((args, kwargs))
        problems = find_differences(layout, self._arguments, root="arguments", said="captured")
        if problems:
            raise ShapeError(
                f"{self._where()} was captured for other arguments: {'; '.join(problems)}; "
                "capture it again, or let every microbatch have one shape"
            )
        if self._left:
            raise BackwardError(
                f"{self._where()} left the gradients of its weights in its last backward, and "
                "nobody asked for them; give the pipeline "
                "weight_backward={stage: captured.weight_backward}",
                stage=self.stage,
            )
        changed = self._settings.changed()
        if changed:
            raise BackwardError(
                f"{self._where()} was captured under other settings: {', '.join(changed)}; "
                "capture it again, or release() it",
                stage=self.stage,
            )
        outputs = _Replay.apply(self, self._anchor, *given)
        return assemble(self._result, outputs)

    def _lease(self) -> Lease:
        if not self._free:
            gc.collect()  # what an error left behind may hold slots in circles
        if not self._free:
            raise BackwardError(
                f"{self._where()} was captured with {self.num_slots} slots, and as many "
                "microbatches are in flight; capture it with "
                "num_slots=slots_needed(schedule, stage)",
                stage=self.stage,
            )
        return Lease(self._free)

    def _check_memory(self) -> None:
        moved = self._memory.moved()
        if moved:
            raise BackwardError(
                f"{self._where()} was captured with other memory for {', '.join(moved)}; change "
                "parameters, buffers and attributes in place (copy_, load_state_dict without "
                "assign), or capture the stage again",
                stage=self.stage,
                parameters=tuple(moved),
            )

    def _attach_gradients(self) -> None:
        """Recordings add to the memory that ``.grad`` had: that is ``.grad`` from here on."""
        fresh: list[Tensor] = []
        replaced: list[str] = []
        for name, parameter, grad in self._grads:
            if parameter.grad is None:
                parameter.grad = grad
                fresh.append(grad)
            elif parameter.grad is not grad:
                replaced.append(name)
        if replaced:
            raise BackwardError(
                f"{self._where()} adds to the .grad that its parameters had when it was captured, "
                "but another tensor is there now; use zero_grad(), or change .grad in place; "
                f"parameters: {', '.join(replaced)}",
                stage=self.stage,
                parameters=tuple(replaced),
            )
        if fresh:
            with torch.no_grad():
                torch._foreach_zero_(fresh)

    def _where(self) -> str:
        return "the captured stage" if self.stage is None else f"captured stage {self.stage}"


class _Replay(torch.autograd.Function):
    """F in its forward, I in its backward.

    Results are copies: the memory of a slot belongs to the next microbatch that gets it, while
    others may keep what they were given for longer.
    """

    @staticmethod
    def forward(ctx: Any, stage: CapturedStage, anchor: Tensor, *given: Tensor) -> Any:
        stage._check_memory()
        lease = stage._lease()
        stage._recorder.before_replay()
        for static, value in zip(lease.slot.inputs, given, strict=True):
            static.copy_(value)
        lease.slot.forward()
        outputs = tuple(output.clone() for output in lease.slot.outputs)
        ctx.stage, ctx.lease = stage, lease
        ctx.set_materialize_grads(False)
        needs_grad = stage._result.needs_grad
        ctx.mark_non_differentiable(*compress(outputs, map(not_, needs_grad)))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        stage: CapturedStage = ctx.stage
        lease, ctx.lease = ctx.lease, None  # outputs that somebody keeps must not keep the slot
        if lease is None:
            raise BackwardError(
                f"{stage._where()} was asked for the backward of a microbatch twice; its slot may "
                "be another microbatch's by now",
                stage=stage.stage,
            )
        slot: Slot = lease.slot
        stage._recorder.before_replay()
        stage._attach_gradients()
        for static, value in zip(slot.output_grads, stage._differentiable(grads), strict=True):
            static.zero_() if value is None else static.copy_(value)
        slot.input()
        given = [None if grad is None else grad.clone() for grad in slot.input_grads]
        stage._left.append(lease)
        return None, None, *given


def _nothing() -> None:
    pass


def _cuda_device(tensors: Sequence[Tensor]) -> torch.device:
    """Where a stage is, or would have to be."""
    on_cuda = [tensor.device for tensor in tensors if tensor.device.type == "cuda"]
    return on_cuda[0] if on_cuda else torch.device("cuda", 0)


def _leaves(sample: Sequence[Tensor]) -> list[Tensor]:
    return [x.detach().clone().requires_grad_(x.requires_grad) for x in sample]


def _refuse_if(problems: Sequence[str], stage: int | None) -> None:
    if problems:
        raise _refusal(problems, stage)


def _refusal(problems: Sequence[str], stage: int | None) -> BackwardMethodError:
    where = "the stage" if stage is None else f"stage {stage}"
    return BackwardMethodError(f"{where} cannot be captured as CUDA graphs: {'; '.join(problems)}")
