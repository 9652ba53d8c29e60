"""Saved tensors in boxes that can be emptied one by one.

Running a node again at W needs its graph kept through I, and with it torch keeps everything that
any node saved. With each saved tensor in a box of ours, I can empty the boxes that W has no use
for::

    node A  [x]──► emptied after I        node B (run again at W)  [y]──► kept until W
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

__all__ = ["Box", "Boxes", "others_keep_saved"]


class Box:
    """One saved tensor; remembers its version, since torch does not compare it behind hooks."""

    __slots__ = ("__weakref__", "tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor
        self.version = tensor._version

    def open(self) -> Tensor:
        if self.tensor is None:
            raise RuntimeError("a tensor was asked for that the backward of the inputs freed")
        if self.is_overwritten():
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: {tuple(self.tensor.shape)} is at version "
                f"{self.tensor._version}, expected version {self.version}"
            )
        return self.tensor

    def is_overwritten(self) -> bool:
        """Whether the tensor was changed since it was saved."""
        return self.tensor is not None and self.tensor._version != self.version


def others_keep_saved() -> bool:
    """Whether somebody's hooks are on, to whom boxes would leave nothing."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and hooks[1] is not Box.open


class Boxes(saved_tensors_hooks):
    """Around a forward: puts what the graph saves into boxes."""

    def __init__(self) -> None:
        # Weak, since what is saved holds on to ``pack``: the graph alone keeps boxes alive.
        contents: list[weakref.ref[Box]] = []

        def pack(tensor: Tensor) -> Box:
            # A node that saves its own result would hold itself, where no collector sees it.
            box = Box(tensor if tensor.grad_fn is None else tensor.detach())
            contents.append(weakref.ref(box))
            return box

        super().__init__(pack, Box.open)
        self.contents = contents

    def keep_only(self, nodes: Iterable[Any]) -> list[Box]:
        """Empty every box but those of ``nodes``; returns what stays."""
        kept = {id(box): box for node in nodes for box in _boxes_of(node)}
        for reference in self.contents:
            box = reference()
            if box is not None and id(box) not in kept:
                box.tensor = None
        return list(kept.values())


def _boxes_of(node: Any) -> Iterable[Box]:
    for name in dir(node):
        if name.startswith("_raw_saved_"):
            saved = getattr(node, name)
            for one in saved if isinstance(saved, (list, tuple)) else (saved,):
                if getattr(one, "unpack_hook", None) is Box.open:
                    yield one.data
