"""What a recording was made under, and a replay would go on as if it still were so."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pipeloom.runtime.backward.cuda_graphs.obstacles import HOOKS

__all__ = ["Settings"]


class Settings:
    """Autocast, the mode and the hooks of a stage's parts, which parameters get gradients, and
    their hooks. It is looked at for every microbatch, so names are found only if it differs.

    What hangs on the stage itself runs as ever: only its ``forward`` is replaced.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._device = device.type
        self._parameters = list(module.named_parameters())
        self._parts = list(module.named_modules())[1:]
        self._tables: list[tuple[str, Any]] = [
            (name, getattr(part, hooks)) for name, part in self._parts for hooks in HOOKS
        ]
        self._before = self._now()

    def _now(self) -> tuple[object, list[bool], list[bool], list[bool], list[bool]]:
        autocast = torch.is_autocast_enabled(self._device)
        return (
            autocast and torch.get_autocast_dtype(self._device),
            [parameter.requires_grad for _, parameter in self._parameters],
            [
                bool(
                    parameter._backward_hooks
                    or getattr(parameter, "_post_accumulate_grad_hooks", None)
                )
                for _, parameter in self._parameters
            ],
            [part.training for _, part in self._parts],
            [bool(table) for _, table in self._tables],
        )

    def changed(self) -> list[str]:
        """What is no longer as it was."""
        now = self._now()
        if now == self._before:
            return []
        found = ["autocast"] if now[0] != self._before[0] else []
        for what, named, is_now, was in (
            ("whether {} needs a gradient", self._parameters, now[1], self._before[1]),
            ("hooks of {}", self._parameters, now[2], self._before[2]),
            ("the mode of {}", self._parts, now[3], self._before[3]),
            ("hooks of {}", self._tables, now[4], self._before[4]),
        ):
            found += [
                what.format(name)
                for (name, _), one, other in zip(named, is_now, was, strict=True)
                if one != other
            ]
        return list(dict.fromkeys(found))
