"""Stages: a module, its place in the pipeline, and what programs ask of it.

::

    stage = PipelineStage(module, stage_index=rank, num_stages=4, device=device)
    schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=loss_fn)

What a stage keeps of its microbatches, and how it sends and receives, is the engine's
(:mod:`pipeloom.runtime.stage`); while a step runs, the methods here reach it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pipeloom.errors import StepError
from pipeloom.runtime.boundary import is_arguments
from pipeloom.torch_api._backward import (
    stage_backward,
    stage_backward_input,
    stage_backward_weight,
)
from pipeloom.torch_api._dtensors import MeshCache
from pipeloom.torch_api._metadata import Metas, StageMetadata, describe
from pipeloom.torch_api._utils import (
    GetMeshCallback,
    PipeInfo,
    PipeliningMetadataError,
    PipeliningShapeError,
)

if TYPE_CHECKING:
    from pipeloom.torch_api._link import StageLink

__all__ = [
    "PipelineStage",
    "PipeliningMetadataError",
    "PipeliningShapeError",
    "build_stage",
]

DeferredWeights = Callable[[], Callable[..., None]]


def _normalize_model_output_as_tuple(output: Any) -> tuple[Any, ...]:
    """Several values as a tuple, one value as a tuple of one.

    >>> _normalize_model_output_as_tuple([1, 2])
    (1, 2)
    """
    return tuple(output) if is_arguments(output) else (output,)


class _PipelineStageBase:
    """A stage of the pipeline.

    To construct, inspect and simulate schedules, a subclass that sets ``submod``, ``num_stages``,
    ``group_size``, ``group_rank``, ``group``, ``stage_index`` and ``device`` will do, without a
    process group.
    """

    # Where a stand-in does not call __init__.
    dw_builder: DeferredWeights | None = None
    _has_backward = False
    _link: StageLink | None = None
    _metadata: StageMetadata | None = None
    _meshes = MeshCache()

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        dw_builder: DeferredWeights | None = None,
    ) -> None:
        super().__init__()
        if not 0 <= stage_index < num_stages:
            raise ValueError(
                f"Stage index {stage_index} is out of range of {num_stages}: "
                f"the stages are 0..{num_stages - 1}"
            )
        self.submod = submodule
        self.stage_index = stage_index
        self.num_stages = num_stages
        self.device = device
        self.group = group
        self.dw_builder = dw_builder
        self.group_rank = dist.get_rank(group)
        self.group_size = dist.get_world_size(group)
        if self.group_size > num_stages:
            raise RuntimeError(
                f"Pipeline group size {self.group_size} cannot be larger than number of stages "
                f"{num_stages}; give every rank of the group at least one stage"
            )
        self.stage_index_to_group_rank = {
            stage: stage % self.group_size for stage in range(num_stages)
        }
        self.chunks: int | None = None
        #: The last step's outputs by microbatch, on the last stage, where they were asked for.
        self.output_chunks: list[Any] = []
        self.fwd_cache: dict[int, Any] = {}
        self.bwd_cache: dict[int, tuple[Tensor | None, ...]] = {}
        self.args_recv_info: dict[int, tuple[Any, ...]] = {}
        self.grad_recv_info: dict[int, tuple[Any, ...]] = {}
        self._has_backward = False
        self._meshes = MeshCache()

    # ── what a stage is ──────────────────────────────────────────────────────────────────────

    @property
    def has_backward(self) -> bool:
        """Whether the steps that run now compute gradients; set by the schedule."""
        return self._has_backward

    @has_backward.setter
    def has_backward(self, has_backward: bool) -> None:
        self._has_backward = has_backward

    @property
    def is_first(self) -> bool:
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        return self.stage_index == self.num_stages - 1

    # ── torch prepares here; the engine learns forms and makes room as messages come ─────────

    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> None:
        self.chunks = num_microbatches

    def _prepare_backward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> None:
        self.chunks = num_microbatches

    def _create_grad_recv_info(self, act_send_info: Any) -> tuple[Any, ...]:
        return ()

    # ── what runs when a microbatch passes ───────────────────────────────────────────────────

    def _call(self, module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call the module; where gradients are averaged, its own synchronisation is off already."""
        if module is not self.submod and isinstance(self.submod, DistributedDataParallel):
            return module(*args, **kwargs)
        return self.forward_maybe_with_nosync(*args, **kwargs)

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module without synchronising gradients."""
        if isinstance(self.submod, DistributedDataParallel):
            with self.submod.no_sync():
                return self.submod(*args, **kwargs)
        return self.submod(*args, **kwargs)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[Tensor | None, ...], list[dict[str, Any]] | None]:
        """One backward of values of your own, ``"full"``, ``"input"`` or ``"weight"``.

        The steps of a schedule do not come here: their backward, and when gradients are reduced,
        is the engine's.
        """
        if backward_type == "full":
            grads = stage_backward(
                bwd_kwargs["stage_output"], bwd_kwargs["output_grads"], bwd_kwargs["input_values"]
            )
            return grads, None
        if backward_type == "input":
            return stage_backward_input(
                bwd_kwargs["stage_output"],
                bwd_kwargs["output_grads"],
                bwd_kwargs["input_values"],
                self.submod.parameters(),
            )
        if backward_type == "weight":
            parameters = self.submod.parameters()
            return stage_backward_weight(parameters, bwd_kwargs["param_groups"]), None
        raise RuntimeError(f"Unknown backward type: {backward_type}; it is full, input or weight")

    def _check_inputs(self, args: tuple[Any, ...]) -> None:
        if self._metadata is not None:
            self._metadata.check_declared("forward inputs", args)

    def _check_outputs(self, inputs: Any, output: Any) -> None:
        if self._metadata is not None:
            self._metadata.check_declared("forward outputs", output)
            mode = (self.has_backward, id(self.submod))
            self._metadata.check_shown(mode, inputs, output)

    # ── for handlers, while a step runs ──────────────────────────────────────────────────────

    def _require_link(self, what: str) -> StageLink:
        if self._link is None or not self._link.num_microbatches:
            raise StepError(
                f"[Stage {self.stage_index}] {what} works while a schedule's step runs, in a "
                "function that register_custom_function registered. To run stages in an order of "
                "your own, set pipeline_order (or pipeline_order_with_comms) on a schedule class"
            )
        return self._link

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        """F of one microbatch: what the module returns. On the last stage the loss is computed."""
        return self._require_link("forward_one_chunk").forward(fwd_chunk_id, args, kwargs)

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """B of one microbatch, or I. The loss is the one that F computed."""
        if self.has_backward:
            link = self._require_link("backward_one_chunk")
            link.backward(bwd_chunk_id, full=full_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """W of one microbatch, after its I."""
        if self.has_backward and (
            self._link is None or not self._link.weight_backward(bwd_chunk_id)
        ):
            raise AssertionError(
                f"[Stage {self.stage_index}] Attempted to run backward_weight_one_chunk for chunk "
                f"{bwd_chunk_id} without first calling `backward_one_chunk(full_backward=False)`"
            )

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Take the output of the stage before, where it is on this rank. F did so already."""
        self._require_link("set_local_fwd_input").put_input(prev_stage_outputs, mb_index)

    def get_local_bwd_output(self, mb_index: int) -> tuple[Tensor | None, ...]:
        """The gradients of this stage's inputs, for a stage before it on this rank."""
        if self.is_first:
            raise AssertionError("can't get bwd output if this stage is first")
        return self._require_link("get_local_bwd_output").input_gradients(mb_index)

    def set_local_bwd_input(
        self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int
    ) -> None:
        """Take the gradients that the next stage on this rank found. B and I did so already."""
        if not isinstance(next_stage_bwd_outputs, tuple):
            raise AssertionError(f"Expected tuple, got {type(next_stage_bwd_outputs)}")
        if self.is_last:
            raise AssertionError("can't set bwd input if this stage is last")
        link = self._require_link("set_local_bwd_input")
        link.put_gradients(next_stage_bwd_outputs, mb_index)

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[Any, ...]:
        """The stage's arguments, for a handler that computes F by itself.

        It leaves ``fwd_cache[m] = (outputs, …)`` behind; what it wants back for B, in any form.
        """
        return self._require_link("_retrieve_recv_activations").take_inputs(fwd_chunk_id)

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[Tensor | None, ...]:
        """The gradients of those outputs, for B or I; it leaves ``bwd_cache[m]``, the gradients of
        the arguments, behind."""
        return self._require_link("_retrieve_recv_grads").take_gradients(bwd_chunk_id)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Nothing: what an action waits for is there when its handler runs."""
        return self._no_messages("get_fwd_recv_ops")

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Nothing: what a handler made is sent by the actions that follow."""
        return self._no_messages("get_fwd_send_ops")

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Nothing, as in :meth:`get_fwd_recv_ops`."""
        return self._no_messages("get_bwd_recv_ops")

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Nothing, as in :meth:`get_fwd_send_ops`."""
        return self._no_messages("get_bwd_send_ops")

    def _no_messages(self, what: str) -> list[dist.P2POp]:
        self._require_link(what)
        return []

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Reduce the step's gradients over the data-parallel ranks of the stage.

        They are scaled already: a step scales its loss, before the backward.
        """
        link = self._require_link("perform_reduce_grad")
        if link.side is not None:
            link.side.reduce()

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Divide ``.grad`` of the stage's parameters.

        Within a step that scales, this does nothing: there the loss was divided, which leaves
        gradients of earlier steps as they are.
        """
        link = self._link
        if grad_scale_factor == 1 or (link and link.num_microbatches and link.scales_losses):
            return
        for parameter in self.submod.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(grad_scale_factor)

    def clear_runtime_states(self) -> None:
        """Forget the outputs of the last step."""
        self.output_chunks.clear()
        self.fwd_cache.clear()
        self.bwd_cache.clear()


def _normalise(args: Any, *, allow_none: bool = False) -> tuple[Any, ...] | None:
    """Example tensors as a tuple."""
    if args is None:
        return None
    values = _normalize_model_output_as_tuple(args)
    wrong = [v for v in values if not isinstance(v, Tensor) and not (allow_none and v is None)]
    if wrong:
        raise PipeliningMetadataError(
            f"example tensors are a tensor or a tuple of tensors, but one is {type(wrong[0])}"
        )
    return values


class PipelineStage(_PipelineStageBase):
    """A stage with a module of yours.

    ``input_args`` and ``output_args`` are examples of one microbatch (real or on the meta device);
    with both, whatever differs from them is an error; without, forms are learned from the first
    messages of every step. ``output_grads`` and ``input_grads`` are accepted and not needed.
    ``dw_builder`` is for a module that defers its own weight gradients. ``get_mesh`` finds the mesh
    of DTensors that come from other stages.
    """

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        input_args: Tensor | tuple[Tensor, ...] | None = None,
        output_args: Tensor | tuple[Tensor, ...] | None = None,
        output_grads: Tensor | tuple[Tensor | None, ...] | None = None,
        input_grads: Tensor | tuple[Tensor | None, ...] | None = None,
        group: dist.ProcessGroup | None = None,
        dw_builder: DeferredWeights | None = None,
        get_mesh: GetMeshCallback | None = None,
    ) -> None:
        super().__init__(submodule, stage_index, num_stages, device, group, dw_builder)
        inputs, outputs = _normalise(input_args), _normalise(output_args)
        gradients = [_normalise(one, allow_none=True) for one in (output_grads, input_grads)]
        self._meshes = MeshCache(get_mesh)
        for values in (inputs, outputs, *gradients):
            self._meshes.note(values or ())
        self._metadata = StageMetadata(stage_index, _describe(inputs), _describe(outputs))


def _describe(values: tuple[Any, ...] | None) -> Metas | None:
    return None if values is None else describe(values)


class _PipelineStage(_PipelineStageBase):
    """A stage cut out of a :class:`~pipeloom.torch_api.Pipe`."""

    def __init__(
        self,
        stage_module: nn.Module,
        stage_index: int,
        pipe_info: PipeInfo,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(stage_module, stage_index, pipe_info.num_stages, device, group)
        self.pipe_info = pipe_info
        self._metadata = StageMetadata(stage_index, None, None)
        self.submod.to(device)


def build_stage(
    stage_module: nn.Module,
    stage_index: int,
    pipe_info: PipeInfo,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> _PipelineStage:
    """A stage of a module that was cut out of a Pipe; ``pipe_info`` is ``pipe.info()``."""
    return _PipelineStage(stage_module, stage_index, pipe_info, device, group)
