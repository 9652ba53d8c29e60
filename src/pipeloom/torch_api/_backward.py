"""The backward of one stage as functions, over :mod:`pipeloom.runtime.backward`.

::

    gradients = stage_backward(outputs, output_grads, inputs)                          B
    gradients, rest = stage_backward_input(outputs, output_grads, inputs, weights)     I
    stage_backward_weight(weights, rest)                                               W
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from pipeloom.runtime.backward import BackwardMethod, choose_method
from pipeloom.runtime.backward.whole import output_roots

__all__ = ["stage_backward", "stage_backward_input", "stage_backward_weight"]


def stage_backward(
    stage_output: Any,
    output_grads: Any,
    input_values: Sequence[Any],
    outputs_with_grads_idxs: list[int] | None = None,
) -> tuple[Tensor | None, ...]:
    """The gradients of the inputs; those of the weights are added to ``.grad``.

    >>> weight, x = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    >>> stage_backward((weight * x).sum(), None, [x])
    (tensor([1., 1.]),)
    """
    if outputs_with_grads_idxs is not None:
        stage_output = [stage_output[i] for i in outputs_with_grads_idxs]
        output_grads = [output_grads[i] for i in outputs_with_grads_idxs]
    pairs = list(_pair(stage_output, output_grads))
    method = choose_method(nn.Module(), method="whole")
    return _run(method, "full", pairs, input_values)


def stage_backward_input(
    stage_outputs_or_loss: Sequence[Tensor],
    output_grads: Sequence[Tensor | None] | None,
    input_values: Sequence[Any],
    weights: Iterator[Parameter],
) -> tuple[tuple[Tensor | None, ...], list[dict[str, Any]]]:
    """The gradients of the inputs, and what :func:`stage_backward_weight` needs.

    The second value is for that function alone. ``.grad`` of the inputs is left as it is.
    """
    outputs = list(stage_outputs_or_loss)
    grads: list[Any] = [None] * len(outputs) if output_grads is None else list(output_grads)
    pairs = [
        (output, torch.ones_like(output) if output_grads is None else grad)
        for output, grad in zip(outputs, grads, strict=True)
        if output.requires_grad
    ]
    module = nn.Module()
    for number, weight in enumerate(weights):
        module.register_parameter(f"weight_{number}", weight)
    method = choose_method(module, method="auto")
    saved: dict[str, Any] = {}
    gradients = _run(method, "input", pairs, input_values, keep=saved)
    return gradients, [saved] if saved else []


def stage_backward_weight(
    weights: Iterator[Parameter], param_groups: list[dict[str, Any]], retain_graph: bool = False
) -> tuple[Tensor | None, ...]:
    """Add the gradients of the weights to ``.grad``; what is there then, by weight."""
    for group in param_groups:
        group["method"].weight(group.pop("saved"))
    return tuple([weight.grad for weight in weights])


def _run(
    method: BackwardMethod,
    phase: str,
    pairs: Sequence[tuple[Tensor, Tensor | None]],
    input_values: Sequence[Any],
    keep: dict[str, Any] | None = None,
) -> tuple[Tensor | None, ...]:
    places = [i for i, x in enumerate(input_values) if isinstance(x, Tensor) and x.requires_grad]
    gradients: list[Tensor | None] = [None] * len(input_values)
    if not pairs:
        return tuple(gradients)
    outputs, grads = [output for output, _ in pairs], [grad for _, grad in pairs]
    if any(grad is None for grad in grads):
        # Without gradients the outputs are losses.
        grads = [torch.ones_like(o) if g is None and o.numel() == 1 else g for o, g in pairs]
    saved = method.save(
        microbatch=0, inputs=[input_values[place] for place in places], outputs=outputs
    )
    if phase == "full" or not output_roots(saved.outputs, grads)[0]:
        found = method.full(saved, grads)
    else:
        found = method.input(saved, grads)
        if keep is not None:
            keep.update(method=method, saved=saved)
    for place, gradient in zip(places, found, strict=True):
        gradients[place] = gradient
    return tuple(gradients)


def _pair(output: Any, grad: Any) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Every differentiable tensor of an output with its gradient, whatever holds them."""
    if isinstance(output, Tensor):
        if not isinstance(grad, (Tensor, type(None))):
            raise AssertionError(f"Expected Tensor or None gradient but got {type(grad)}")
        if output.requires_grad:
            yield output, grad
    elif grad is None:
        return
    elif isinstance(output, Mapping):
        if not isinstance(grad, Mapping) or set(grad) != set(output):
            raise AssertionError(f"Expected a gradient for each of {list(output)}, got {grad!r}")
        for key in output:
            yield from _pair(output[key], grad[key])
    elif isinstance(output, (list, tuple)):
        if not isinstance(grad, (list, tuple)) or len(grad) != len(output):
            raise AssertionError(f"Expected {len(output)} gradients, got {grad!r}")
        for one, other in zip(output, grad, strict=True):
            yield from _pair(one, other)
