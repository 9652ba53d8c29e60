"""Backends of ``torch.compile`` whose backward can be run in halves.

``pipeloom`` compiles as torch does by default; ``pipeloom_eager`` runs the graphs as they are, to
look at what a compiled stage does without waiting for a compiler::

    torch.compile(block, backend="pipeloom")
        ├─ forward    ─► compiled as ever
        └─ backward   ─► kept as a graph ─► first I: cut, and I's part compiled
                                         ─► first B: compiled whole

Three settings of torch are changed while it compiles: the graph of the backward is made with the
forward's, so that it is known before the first backward; what the forward saved is not overwritten
by the backward, since W needs some of it; and nothing is taken from the cache of compiled pairs,
which has backwards in one piece.
"""

from __future__ import annotations

import contextvars
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from pipeloom.errors import BackwardMethodError
from pipeloom.runtime.backward.compiled.cut import made_of
from pipeloom.runtime.backward.compiled.halves import Halves, Signature

__all__ = [
    "compile_for_pipelines",
    "leaves_weights",
    "replays_cuda_graphs",
    "run_eagerly_for_pipelines",
]

Compiled = Callable[..., Any]


def compile_for_pipelines(
    module: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Compiled:
    """``torch.compile(…, backend="pipeloom")``, with torch's own ``mode`` and ``options``."""
    from torch._inductor import config, list_mode_options
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    patches = dict(list_mode_options(mode)) if mode else {}
    patches.update({name.replace("-", "_"): value for name, value in (options or {}).items()})
    if patches.get("triton.cudagraphs", config.triton.cudagraphs):
        raise BackwardMethodError(
            'backend="pipeloom" cannot replay CUDA graphs: they write each microbatch over the one '
            'before, of which several are in flight; use mode="max-autotune-no-cudagraphs", '
            "or leave out the mode and torch._inductor.config.triton.cudagraphs"
        )
    forward: list[Signature] = []
    given = _given(example_inputs)  # not the tensors themselves, which nothing here should keep
    # B on a device runs in a thread of the engine's, where torch's settings are not the user's.
    here = contextvars.copy_context()

    def compile_graph(graph: GraphModule, inputs: Sequence[Any], **known: Any) -> Any:
        if not known.get("is_backward"):
            forward[:] = _signature(graph, given)
        elif _can_be_cut(graph, forward):
            context = _keep_saved()
            static = frozenset(known.pop("static_input_idxs", ()))

            def compile_part(part: GraphModule, reads: Sequence[int]) -> Any:
                return here.copy().run(compile_now, part, reads)

            def compile_now(part: GraphModule, reads: Sequence[int]) -> Any:
                with ExitStack() as during:
                    during.enter_context(config.patch(patches))
                    during.enter_context(_in_a_cache_of_its_own())
                    during.enter_context(torch._guards.tracing(context))
                    during.enter_context(torch.random.fork_rng(_cuda_devices(inputs)))
                    during.enter_context(torch.no_grad())
                    ignored = _num_ignored_guards(context)
                    compiled = compile_fx_inner(
                        part,
                        [inputs[place] for place in reads],
                        static_input_idxs=[at for at, place in enumerate(reads) if place in static],
                        **known,
                    )
                    if _num_ignored_guards(context) > ignored:
                        raise BackwardMethodError(
                            "compiled now, it would be right for the sizes of this microbatch only"
                        )
                    return compiled

            halves = Halves(graph, forward[0], compile_part)
            if any(isinstance(one, torch.SymInt) for one in inputs):
                # Compiling finds what must hold of sizes; later nobody would ask whether it does.
                halves.prepare_whole()
            return halves
        return compile_fx_inner(graph, inputs, **known)

    with _backwards_at_hand():
        compiled: Any = compile_fx(module, example_inputs, compile_graph, config_patches=patches)
    return compiled


def run_eagerly_for_pipelines(
    module: GraphModule, example_inputs: Sequence[Any], **unused: Any
) -> Compiled:
    """``torch.compile(…, backend="pipeloom_eager")``: no compiler, the graphs as they are."""
    from functorch.compile import (  # type: ignore[import-untyped]
        make_boxed_func,
        min_cut_rematerialization_partition,
    )
    from torch._dynamo.backends.common import aot_autograd

    forward: list[Signature] = []
    given = _given(example_inputs)

    def run_forward(graph: GraphModule, inputs: Sequence[Any]) -> Any:
        forward[:] = _signature(graph, given)
        return make_boxed_func(graph.forward)

    def run_backward(graph: GraphModule, inputs: Sequence[Any]) -> Any:
        if not _can_be_cut(graph, forward):
            return make_boxed_func(graph.forward)
        _keep_saved()
        return Halves(graph, forward[0], lambda part, reads: make_boxed_func(part.forward))

    backend = aot_autograd(
        fw_compiler=run_forward,
        bw_compiler=run_backward,
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )
    with _backwards_at_hand():
        return backend(module, example_inputs)


def leaves_weights(module: nn.Module) -> bool:
    """Whether a compiled module was compiled by a backend of this file."""
    return _backend_of(module) in (compile_for_pipelines, run_eagerly_for_pipelines)


def replays_cuda_graphs(module: nn.Module) -> bool:
    """Whether a module was compiled into CUDA graphs, by torch's own compiler."""
    config: Any = getattr(_backend_of(module), "config", None)
    return isinstance(config, Mapping) and bool(config.get("triton.cudagraphs"))


def _backend_of(module: nn.Module) -> Any:
    """What compiled a module, if anything did.

    torch does not say which backend it will call, so this looks at what it keeps; where that has
    changed, the answer is ``None``.
    """
    callback: Any = getattr(getattr(module, "dynamo_ctx", None), "callback", None)
    for function in (getattr(module, "_compiled_call_impl", None), module.forward):
        if callback is None and inspect.isfunction(function):
            callback = inspect.getclosurevars(function).nonlocals.get("callback")
    while hasattr(callback, "_torchdynamo_orig_backend"):
        callback = callback._torchdynamo_orig_backend
    return getattr(callback, "compiler_fn", callback)


def _backwards_at_hand() -> AbstractContextManager[object]:
    return torch._functorch.config.patch(
        force_non_lazy_backward_lowering=True, enable_autograd_cache=False
    )


def _keep_saved() -> torch._guards.TracingContext | None:
    """Let the backward that is compiled now leave the memory alone that its forward saved."""
    context = torch._guards.TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []
    return context


def _in_a_cache_of_its_own() -> AbstractContextManager[object]:
    """torch's cache does not tell whether a backward may overwrite what the forward saved."""
    settings: Any = torch.compiler.config
    tag = f"{settings.cache_key_tag} pipeloom: keeps what was saved"
    patched: AbstractContextManager[object] = settings.patch(cache_key_tag=tag)
    return patched


def _num_ignored_guards(context: torch._guards.TracingContext | None) -> int:
    """How often compiling found that sizes must be so, and could no longer have it asked."""
    shapes = getattr(getattr(context, "fake_mode", None), "shape_env", None)
    return int(shapes.counter["ignored_backward_guard"]) if shapes is not None else 0


def _given(example_inputs: Sequence[Any]) -> list[bool] | None:
    """Which arguments are parameters; ``None`` if some consist of several tensors."""
    if any(is_traceable_wrapper_subclass(one) for one in example_inputs):
        return None
    return [isinstance(one, nn.Parameter) for one in example_inputs]


def _signature(graph: GraphModule, given: list[bool] | None) -> list[Signature]:
    """What the arguments of a forward are.

    Empty where they are not the ones that autograd sees: tensors that consist of others are taken
    apart on the way.
    """
    if given is None:
        return []
    arguments = graph.graph.find_nodes(op="placeholder")
    tensors = [at for at, one in enumerate(arguments) if isinstance(one.meta.get("val"), Tensor)]
    # Parameters that are not passed to the compiled code are its attributes, and come first.
    num_attributes = len(arguments) - len(given)
    parameters = frozenset(
        argument.name
        for at, argument in enumerate(arguments)
        if at < num_attributes or given[at - num_attributes]
    )
    weights = frozenset(node.name for node in made_of(graph.graph, parameters))
    return [Signature(len(arguments), dict(enumerate(tensors)), weights)]


def _can_be_cut(backward: GraphModule, forward: Sequence[Signature]) -> bool:
    """Whether the backward has one output for each argument of the forward."""
    outputs: Any = backward.graph.output_node().args[0]
    return bool(forward) and len(outputs) == forward[0].num_arguments


def _cuda_devices(tensors: Sequence[Any]) -> list[torch.device]:
    """Where compiling may draw random numbers, to try kernels."""
    devices = {one.device for one in tensors if isinstance(one, Tensor)}
    return [device for device in devices if device.type == "cuda"]
