"""What a stage declared, or showed once, about the tensors at its ends; and checking it.

::

    PipelineStage(…, input_args=x, output_args=y)      declared: a difference is an error
    first step: float32 [2, 8] → float32 [2, 4]        shown: equal inputs, other outputs is one too
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeloom.runtime.boundary import flatten
from pipeloom.torch_api._utils import PipeliningMetadataError

__all__ = ["StageMetadata", "TensorMeta", "describe"]

logger = logging.getLogger("pipeloom.torch_api")


class TensorMeta(NamedTuple):
    """The form of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


Metas = tuple["TensorMeta | None", ...]


def describe(values: Any) -> Metas:
    """The form of every tensor among the leaves of a value; ``None`` for what is none.

    >>> describe((torch.zeros(2, 3), None))
    (TensorMeta(shape=(2, 3), dtype=torch.float32), None)
    """
    leaves = [values] if isinstance(values, Tensor) else _flatten_with_none(values)
    return tuple(
        [TensorMeta(tuple(x.shape), x.dtype) if isinstance(x, Tensor) else None for x in leaves]
    )


def _flatten_with_none(values: Any) -> list[Any]:
    return flatten(values, is_leaf=lambda leaf: leaf is None)[0]


def _find_differences(expected: Metas, actual: Metas) -> list[str]:
    if len(expected) != len(actual):
        return [f"{len(actual)} values instead of {len(expected)}"]
    problems = []
    for number, (one, other) in enumerate(zip(expected, actual, strict=True)):
        if one is None or other is None:
            if one is not other:
                problems.append(f"[{number}] is {other}, expected {one}")
            continue
        if one.shape != other.shape:
            problems.append(
                f"[{number}] shape mismatch: expected {list(one.shape)}, got {list(other.shape)}"
            )
        if one.dtype != other.dtype:
            problems.append(f"[{number}] dtype mismatch: expected {one.dtype}, got {other.dtype}")
    return problems


class StageMetadata:
    """Checks one stage's inputs and outputs."""

    def __init__(self, stage_index: int, inputs: Metas | None, outputs: Metas | None) -> None:
        self._stage_index = stage_index
        self._declared = {"forward inputs": inputs, "forward outputs": outputs}
        self._is_strict = inputs is not None and outputs is not None
        self._warned: set[str] = set()
        self._shown: dict[tuple[Any, ...], Metas] = {}

    def check_declared(self, what: str, values: Any) -> None:
        """Compare with what the stage was constructed with: an error if that told both ends,
        otherwise a warning, as torch then goes by what it sees."""
        declared = self._declared[what]
        if declared is None:
            return
        problems = _find_differences(declared, describe(values))
        if not problems:
            return
        message = (
            f"Stage {self._stage_index} {what} are not what the stage was constructed with: "
            + "; ".join(problems)
        )
        if self._is_strict:
            raise PipeliningMetadataError(
                f"{message}. Give PipelineStage the input_args and output_args of one microbatch, "
                "or neither: then they are learned"
            )
        if what not in self._warned:
            self._warned.add(what)
            logger.warning("%s", message)

    def check_shown(self, mode: object, inputs: Any, output: Any) -> None:
        """Equal inputs must give outputs of equal form, however often."""
        key = (mode, describe(inputs))
        outputs = describe(output)
        shown = self._shown.setdefault(key, outputs)
        if shown is outputs or shown == outputs:
            return
        raise PipeliningMetadataError(
            f"Stage {self._stage_index} forward outputs changed although its inputs have the same "
            f"form as before: {'; '.join(_find_differences(shown, outputs))}. Was a hook added or "
            "the module changed after the first step? Then construct stage and schedule anew"
        )
