"""The table in docs/torch_api.md: every name of torch's package and of the contract, compared.

``python -m tests.torch_api.name_table`` writes it anew.
"""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "torch_api.md"
BEGIN, END = "<!-- begin of the table -->", "<!-- end of the table -->"

#: Per module: names that its ``__all__`` does not have, but that programs import, and methods.
NAMES: dict[str, list[str]] = {
    "": [],
    "schedules": [
        "_Action", "_ComputationType", "_CustomFunctionProtocol", "_PipelineContext",
        "_PipelineSchedule", "_PipelineScheduleRuntime", "_ScheduleForwardOnly",
        "_add_reduce_grad", "_add_send_recv", "_add_unshard_reshard", "_batch_p2p",
        "_check_torch_compile_compatibility", "_defer_recv_ops", "_dump_chrometrace",
        "_format_pipeline_order", "_get_1f1b_rank_ops", "_get_profiler_function_name",
        "_get_warmup_ops", "_merge_bw", "_requires_reduce_grad", "_simulate_comms_compute",
        "_sorted_batch_p2p", "_validate_schedule", "_wait_batch_p2p",
        "FORWARD", "FULL_BACKWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT", "OVERLAP_F_B", "RECV_B",
        "RECV_F", "REDUCE_GRAD", "RESHARD", "SEND_B", "SEND_F", "UNSHARD", "B", "F", "I", "W",
        "_Action.from_str", "_Action.is_compute_op", "_ComputationType.from_str",
        *(f"_PipelineSchedule.{name}" for name in (
            "step", "eval", "_step_microbatches", "_check_inputs", "_compute_loss",
            "_maybe_compute_loss", "_maybe_get_loss", "_update_losses", "_split_inputs",
            "_merge_outputs")),
        *(f"PipelineScheduleSingle.{name}" for name in (
            "step", "_step_microbatches", "_get_pipeline_order", "_initialize_stage")),
        *(f"PipelineScheduleMulti.{name}" for name in (
            "step", "_step_microbatches", "_initialize_stages", "_load_csv", "_dump_csv",
            "_validate_and_set_stage_mapping")),
        *(f"_PipelineScheduleRuntime.{name}" for name in (
            "register_custom_function", "_prepare_schedule_with_comms", "_load_csv", "_dump_csv",
            "_simulate", "_assert_unsharded", "_step_microbatches")),
        "ScheduleInterleaved1F1B._calculate_single_rank_operations",
    ],
    "stage": [
        "_PipelineStageBase", "_PipelineStage", "_normalize_model_output_as_tuple",
        *(f"_PipelineStageBase.{name}" for name in (
            "has_backward", "is_first", "is_last", "forward_one_chunk", "backward_one_chunk",
            "backward_weight_one_chunk", "forward_maybe_with_nosync",
            "backward_maybe_with_nosync", "set_local_fwd_input", "get_local_bwd_output",
            "set_local_bwd_input", "get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops",
            "get_bwd_send_ops", "scale_grads", "perform_reduce_grad", "clear_runtime_states",
            "_prepare_forward_infra", "_prepare_backward_infra", "_create_grad_recv_info",
            "_retrieve_recv_activations", "_retrieve_recv_grads")),
    ],
    "microbatch": [
        "_Replicate", "_CustomReducer", "_LossReducer", "sum_reducer", "_split_tensor",
        "_split_block_mask", "_shard_dict_of_args", "TensorChunkSpec.from_tuple",
        "TensorChunkSpec.from_dict", "DEFAULT_CHUNK_DIM", "_debug_mask_minibatches",
    ],
    "_backward": ["stage_backward", "stage_backward_input", "stage_backward_weight"],
    "_utils": [
        "GetMeshCallback", "PipeInfo", "PipeliningMetadataError", "PipeliningShapeError",
        "flatten_args", "flatten_args_detach", "generate_rank_to_stage_mapping",
        "generate_stage_to_rank_mapping", "InferenceMode", "validate_tensors_metadata",
        "extract_tensor_metas",
    ],
    "_schedule_visualizer": [
        "OpKey", "action_type_to_color_mapping", "add_schedule_op_spacing", "get_schedule_ops",
        "visualize_schedule",
    ],
    "_IR": [
        "Pipe", "PipeSequential", "PipeSplitWrapper", "SplitPoint", "annotate_split_points",
        "pipe_split", "pipeline", "get_submod_name", "Pipe.build_stage", "Pipe.from_tracing",
        "Pipe.get_stage_module", "Pipe.info", "LossWrapper", "TrivialLossWrapper",
    ],
    "_debug": ["friendly_debug_info", "map_debug_info"],
    "_unflatten": ["_outline_submodules"],
}  # fmt: skip

#: What is different, by name.
NOTES = {
    "Pipe": "made of stages; has no `split_gm`",
    "pipeline": "models that are chains where they are cut, without tracing; no `split_policy`",
    "_PipelineSchedule.step": "also takes `arg_mbs`, `kwarg_mbs`, `target_mbs` (torch 2.14)",
    "PipelineScheduleSingle.step": "also takes `arg_mbs`, `kwarg_mbs`, `target_mbs` (torch 2.14)",
    "PipelineScheduleMulti.step": "also takes `arg_mbs`, `kwarg_mbs`, `target_mbs` (torch 2.14)",
    "_PipelineSchedule.eval": "gradients are off; the target may be left out",
    "_PipelineSchedule._maybe_compute_loss": "does nothing: F of the last stage computes the loss",
    "PipelineScheduleSingle._step_microbatches": "one for all: runs the order on the engine",
    "PipelineScheduleSingle._get_pipeline_order": "what is returned is what runs",
    "_Action.from_str": "strict: `2F0x` is an error",
    "_add_send_recv": "leaves its argument as it is",
    "_merge_bw": "leaves its argument as it is",
    "_validate_schedule": "tells all that is wrong, not the first thing only",
    "_simulate_comms_compute": "also takes fused actions, UNSHARD, RESHARD and REDUCE_GRAD",
    "_PipelineScheduleRuntime._simulate": "works for every program that runs",
    "_dump_chrometrace": "I counts as computation",
    "_check_torch_compile_compatibility": "refuses stages compiled as a whole, not their blocks",
    "_PipelineScheduleRuntime.register_custom_function": "what the action waits for has arrived",
    "_PipelineStageBase.forward_one_chunk": "within a step; on the last stage with the loss",
    "_PipelineStageBase.backward_one_chunk": "within a step; `loss` is the one that F computed",
    "_PipelineStageBase.backward_weight_one_chunk": "within a step, after I",
    "_PipelineStageBase.backward_maybe_with_nosync": "for values of your own; steps do not call it",
    "_PipelineStageBase._retrieve_recv_activations": "within a handler",
    "_PipelineStageBase._retrieve_recv_grads": "within a handler",
    **{
        f"_PipelineStageBase.get_{way}_ops": "empty within a handler: messages are the engine's"
        for way in ("fwd_recv", "fwd_send", "bwd_recv", "bwd_send")
    },
    "_PipelineStageBase.scale_grads": "nothing within a step: the loss was scaled already",
    "_PipelineStageBase.perform_reduce_grad": "reduces; does not scale",
    "_PipelineStageBase._prepare_forward_infra": "prepares nothing: forms are learned",
    "_PipelineStageBase._prepare_backward_infra": "prepares nothing: forms are learned",
    "_PipelineStageBase._create_grad_recv_info": "empty: the engine makes room for gradients",
    "PipelineStage": "`output_grads` and `input_grads` are not needed",
    "_split_tensor": "no chunk retains its gradient; that of the whole argument is kept",
    "merge_chunks": "outputs without dimensions are stacked",
    "stage_backward_input": "the second value is for `stage_backward_weight` alone",
    "PipeliningShapeError": "the name of older releases, the same class",
    "get_schedule_ops": "right for every schedule",
    "add_schedule_op_spacing": "computations only; idle cells end with the last computation",
    "visualize_schedule": "`.png`, `.svg`, `.html` by suffix",
    "PipeInfo": "`graph` is None",
    "_PipelineScheduleRuntime": "`defer_pp_recv` is a parameter of its own",
}
MISSING = {
    "_debug_mask_minibatches": "a switch of torch's own tests",
    "InferenceMode": "forms are always learned, from messages",
    "validate_tensors_metadata": "internal to torch's stages",
    "extract_tensor_metas": "internal to torch's stages",
    "LossWrapper": "give the schedule a `loss_fn`",
    "TrivialLossWrapper": "give the schedule a `loss_fn`",
    "_outline_submodules": "part of torch's tracing",
}


def find(package: str, module: str, name: str) -> Any:
    """The object of a name, ``None`` where there is none."""
    value: Any = importlib.import_module(f"{package}.{module}" if module else package)
    for part in name.split("."):
        value = getattr(value, part, None)
        if value is None:
            return None
    return value


def parameters_of(value: Any) -> list[str] | None:
    """Names and defaults of what can be called."""
    if not callable(value) or (inspect.isclass(value) and issubclass(value, Exception)):
        return None
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return None
    return [
        parameter.name if parameter.default is parameter.empty
        else f"{parameter.name}={_text(parameter.default)}"
        for parameter in signature.parameters.values()
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    ]  # fmt: skip


def _text(default: Any) -> str:
    return default.__name__ if callable(default) else repr(default)


def compare(module: str, name: str) -> tuple[str, str]:
    """Whether a name is there, and what is different."""
    theirs = find("torch.distributed.pipelining", module, name)
    ours = find("pipeloom.torch_api", module, name)
    note = NOTES.get(name) or MISSING.get(name) or ""
    if ours is None:
        return "no", note
    if theirs is None:
        return "yes", f"not in torch; {note}".rstrip("; ")
    mine, its = parameters_of(ours), parameters_of(theirs)
    if mine == its:
        return "yes", note
    more = [p for p in mine or [] if p not in (its or [])]
    less = [p for p in its or [] if p not in (mine or [])]
    if name in NOTES and not less:
        return "yes", note
    changed = "; ".join(
        part
        for part in (
            f"without `{'`, `'.join(less)}`" if less else "",
            f"with `{'`, `'.join(more)}`" if more else "",
        )
        if part
    )
    return "yes", "; ".join(filter(None, [note, changed]))


def names_of(module: str) -> list[str]:
    """What a module of torch exports, and what is imported from it by name."""
    path = f"torch.distributed.pipelining.{module}" if module else "torch.distributed.pipelining"
    exported = list(getattr(importlib.import_module(path), "__all__", []))
    return list(dict.fromkeys([*exported, *NAMES[module]]))


def make_table() -> str:
    """The table in Markdown."""
    lines = ["| name | here | differences |", "|---|---|---|"]
    for module in NAMES:
        for name in names_of(module):
            there, note = compare(module, name)
            shown = f"{module}.{name}" if module else name
            lines.append(f"| `{shown}` | {there} | {note} |")
    return "\n".join(lines)


def main() -> None:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{make_table()}\n{END}{after}")


if __name__ == "__main__":
    main()
