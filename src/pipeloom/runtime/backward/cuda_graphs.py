"""F, I and W of a stage as captured CUDA graphs: for small stages, where the host is the limit.

Opt-in, for stages whose shapes never change. A capture per slot, a slot per microbatch in flight::

    slot 0   F ─────► I ─────► W        static inputs, outputs and gradients of this slot
    slot 1        F ─────► I ─────► W   its own memory: slots may interleave as they like

Within a slot the three are replayed in order, so they share one memory pool. What a capture fixes:

- shapes, types, and the addresses of ``.grad``: keep them (``zero_grad(set_to_none=False)``);
- the Python code of the stage: hooks, checks and data-dependent branches do not run at replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipeloom.errors import BackwardError, BackwardMethodError
from pipeloom.runtime.backward.choose import choose_method
from pipeloom.runtime.backward.method import BackwardMethod, Gradients, SavedMicrobatch

__all__ = ["CapturedStage"]

NUM_WARM_UP_RUNS = 3  # kernels choose their algorithms, libraries take their workspaces


@dataclass(slots=True)
class Slot:
    """One microbatch in flight: its graphs and the tensors they read and write."""

    inputs: list[Tensor]
    outputs: list[Tensor]
    output_grads: list[Tensor]
    input_grads: Gradients
    forward: torch.cuda.CUDAGraph
    input: torch.cuda.CUDAGraph
    weight: torch.cuda.CUDAGraph
    done: str = "W"


class CapturedStage:
    """A stage whose F, I and W are replayed.

    ``outputs = captured.forward(slot, inputs)``, ``captured.input(slot, output_grads)`` and
    ``captured.weight(slot)`` return the slot's own tensors: they are overwritten by the slot's next
    replay, so a slot is free again once its microbatch's outputs and gradients have been sent.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        sample_inputs: Sequence[Tensor],
        num_slots: int,
        method: str = "auto",
        stage: int | None = None,
    ) -> None:
        _check_can_capture(module, sample_inputs, stage)
        self.module = module
        self.stage = stage
        parameters = [p for p in module.parameters() if p.requires_grad]
        before = [p.grad.clone() if p.grad is not None else None for p in parameters]
        backward = choose_method(module, method=method, stage=stage)
        # Warmed up and captured on one stream: that is where the engine then runs as well.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(NUM_WARM_UP_RUNS):
                self._warm_up(backward, sample_inputs)
        self.slots = [self._capture(backward, sample_inputs, stream) for _ in range(num_slots)]
        torch.cuda.current_stream().wait_stream(stream)
        with torch.no_grad():
            for parameter, grad in zip(parameters, before, strict=True):
                if parameter.grad is not None:
                    parameter.grad.copy_(grad) if grad is not None else parameter.grad.zero_()
        self._grads = [(p, p.grad.data_ptr()) for p in parameters if p.grad is not None]

    def forward(self, slot: int, inputs: Sequence[Tensor]) -> list[Tensor]:
        """F of the microbatch in this slot."""
        captured = self._enter(slot, "F")
        with torch.no_grad():
            for static, given in zip(captured.inputs, inputs, strict=True):
                static.copy_(given)
        captured.forward.replay()
        return captured.outputs

    def input(self, slot: int, output_grads: Sequence[Tensor | None]) -> Gradients:
        """I of the microbatch in this slot."""
        captured = self._enter(slot, "I")
        with torch.no_grad():
            for static, given in zip(captured.output_grads, output_grads, strict=True):
                static.zero_() if given is None else static.copy_(given)
        captured.input.replay()
        return captured.input_grads

    def weight(self, slot: int) -> None:
        """W of the microbatch in this slot."""
        moved = [p for p, address in self._grads if p.grad is None or p.grad.data_ptr() != address]
        if moved:
            known = {id(p): name for name, p in self.module.named_parameters()}
            names = tuple(known[id(p)] for p in moved)
            raise BackwardError(
                "captured W adds to the memory that .grad had at capture, but .grad was replaced; "
                f"use zero_grad(set_to_none=False); parameters: {', '.join(names)}",
                stage=self.stage,
                microbatch=slot,
                parameters=names,
            )
        self._enter(slot, "W").weight.replay()

    def _enter(self, slot: int, phase: str) -> Slot:
        captured = self.slots[slot]
        needed = {"F": "W", "I": "F", "W": "I"}[phase]
        if captured.done != needed:
            raise BackwardError(
                f"slot {slot}: {phase} needs {needed} before it, but the last was {captured.done}",
                stage=self.stage,
                microbatch=slot,
            )
        captured.done = phase
        return captured

    # ── capturing ────────────────────────────────────────────────────────────────────────────────

    def _warm_up(self, backward: BackwardMethod, sample: Sequence[Tensor]) -> None:
        inputs = _leaves(sample)
        saved, outputs = self._run_forward(backward, inputs)
        backward.input(saved, [torch.zeros_like(output) for output in outputs])
        backward.weight(saved)

    def _run_forward(
        self, backward: BackwardMethod, inputs: list[Tensor]
    ) -> tuple[SavedMicrobatch, list[Tensor]]:
        with backward.forward():
            outputs = self.module(*inputs)
        flat = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        saved = backward.save(microbatch=0, inputs=inputs, outputs=flat)
        return saved, [output.detach() for output in flat]

    def _capture(
        self, backward: BackwardMethod, sample: Sequence[Tensor], stream: torch.cuda.Stream
    ) -> Slot:
        pool = torch.cuda.graph_pool_handle()
        inputs = _leaves(sample)
        forward, input_, weight = (torch.cuda.CUDAGraph() for _ in range(3))
        with torch.cuda.graph(forward, pool=pool, stream=stream):
            saved, outputs = self._run_forward(backward, inputs)
        output_grads = [torch.zeros_like(output) for output in outputs]
        with torch.cuda.graph(input_, pool=pool, stream=stream):
            input_grads = backward.input(saved, output_grads)
        with torch.cuda.graph(weight, pool=pool, stream=stream):
            backward.weight(saved)
        static = [leaf.detach() for leaf in inputs]
        return Slot(static, outputs, output_grads, input_grads, forward, input_, weight)


def _leaves(sample: Sequence[Tensor]) -> list[Tensor]:
    return [x.detach().clone().requires_grad_(x.requires_grad) for x in sample]


def _check_can_capture(module: nn.Module, sample: Sequence[Tensor], stage: int | None) -> None:
    """Everything that stands in the way, in one message."""
    problems: list[str] = []
    if not torch.cuda.is_available():
        problems.append("there is no CUDA device")
    problems += [
        f"{what} {name} is on {tensor.device}"
        for what, named in (
            ("parameter", module.named_parameters()),
            ("input", ((str(index), x) for index, x in enumerate(sample))),
        )
        for name, tensor in named
        if tensor.device.type != "cuda"
    ]
    problems += [
        f"parameter {name} has hooks, which a replay would not run"
        for name, parameter in module.named_parameters()
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
    ]
    if problems:
        where = "the stage" if stage is None else f"stage {stage}"
        raise BackwardMethodError(
            f"{where} cannot be captured as CUDA graphs: {'; '.join(problems)}; "
            "use choose_method(module) instead"
        )
