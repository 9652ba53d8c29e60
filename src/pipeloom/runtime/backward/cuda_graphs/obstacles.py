"""What stands in the way of capturing a stage; everything at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from pipeloom.runtime.backward.compiled.backend import replays_cuda_graphs
from pipeloom.runtime.data_parallel import recognise

__all__ = ["HOOKS", "obstacles_before", "stale_parameters"]

MARK = "pipeloom: was there before the capture"
HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)


def obstacles_before(
    module: nn.Module, sample: Sequence[Tensor], device: torch.device
) -> list[str]:
    """What can be seen of a stage before it has run."""
    found = []
    if device.type == "cuda" and not torch.cuda.is_available():
        found.append("there is no CUDA device")
    found += _wrong_devices(module, sample, device)
    found += _wrong_modes(sample)
    if recognise(module) is not None:
        found.append("it is data-parallel, and its gradients would be reduced by hooks")
    found += [
        f"parameter {name} is a {type(parameter).__name__}, whose parts have memory of their own"
        for name, parameter in module.named_parameters()
        if type(parameter) not in (nn.Parameter, Tensor)
    ]
    found += [
        f"parameter {name} has hooks, which a replay would not run"
        for name, parameter in module.named_parameters()
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
    ]
    found += [
        f"{f'its part {name!r}' if name else 'the module'} has hooks, which a replay would not run"
        for name, part in module.named_modules()
        if any(getattr(part, hooks, None) for hooks in HOOKS)
    ]
    found += [
        f"{f'its part {name!r}' if name else 'the module'} is compiled into CUDA graphs by torch, "
        'whose memory slots would share; leave out mode="reduce-overhead"'
        for name, part in module.named_modules()
        if replays_cuda_graphs(part)
    ]
    return found


def _wrong_devices(
    module: nn.Module, sample: Sequence[Tensor], device: torch.device
) -> Iterator[str]:
    named: list[tuple[str, Tensor]] = [(f"parameter {n}", p) for n, p in module.named_parameters()]
    named += [(f"buffer {name}", buffer) for name, buffer in module.named_buffers()]
    named += [(f"input {place}", tensor) for place, tensor in enumerate(sample)]
    for name, tensor in named:
        if tensor.device != device:
            yield f"{name} is on {tensor.device}, not on {device}"


def _wrong_modes(sample: Sequence[Tensor]) -> Iterator[str]:
    if not torch.is_grad_enabled():
        yield "gradients are switched off (no_grad)"
    if torch.is_anomaly_enabled():
        yield "anomaly detection reads values on the host, which a capture cannot"
    kinds = {tensor.device.type for tensor in sample}
    if torch.is_autocast_cache_enabled() and any(map(torch.is_autocast_enabled, kinds)):
        yield (
            "autocast would keep casts of the weights from the capture; "
            "use torch.autocast(…, cache_enabled=False) around it"
        )


def stale_parameters(parameters: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Parameters whose place in the graph somebody holds: an older graph, or a gradient reducer.

    Such a place belongs to the stream on which it was made, which a capture must not touch.
    """
    trainable = [(name, p) for name, p in parameters if p.requires_grad]
    for _, parameter in trainable:
        _place(parameter).metadata[MARK] = True  # goes at once if nobody holds it
    return [
        f"parameter {name} is part of a graph that somebody holds (a loss, an output, a wrapper)"
        for name, parameter in trainable
        if _place(parameter).metadata.pop(MARK, False)
    ]


def _place(parameter: Tensor) -> Any:
    return get_gradient_edge(parameter).node
