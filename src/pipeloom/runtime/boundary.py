"""What crosses the edge between two stages: any pytree, taken apart and put together again.

::

    {"hidden": Tensor, "mask": Tensor, "layer": 3}
            │ take_apart                      ▲ assemble
            ▼                                 │
    [Tensor, Tensor]  +  Layout ──────────────┘
     travel with every   shapes, types, who needs a gradient, and the rest of the value;
     microbatch          travels once per edge and step

A plain tuple or list that a stage returns becomes positional arguments of the next; anything else
is one argument. With several predecessors the arguments follow each other: the one before in the
chain first, then the skip connections.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from pipeloom.errors import ShapeError
from pipeloom.runtime.transport.protocol import TensorSpec

__all__ = [
    "REGISTER",
    "Layout",
    "Routed",
    "assemble",
    "find_differences",
    "fits",
    "flatten",
    "hides_tensors",
    "is_arguments",
    "map_leaves",
    "name_leaves",
    "require_promise",
    "require_routes",
    "take_apart",
    "unflatten",
]

flatten = pytree.tree_flatten
unflatten = pytree.tree_unflatten
map_leaves = pytree.tree_map


class Routed(dict[int, Any]):
    """What a stage returns to send different values to different successors.

    ::

        return Routed({1: hidden, 3: skip})      # stage 1 gets hidden, stage 3 the skip connection

    Without it every successor gets the whole output, and their gradients are added up.
    """


class _TensorHere:
    """Marks the place of a tensor among the constants of a layout; one object per process."""

    def __reduce__(self) -> str:
        return "_TENSOR_HERE"

    def __repr__(self) -> str:
        return "tensor"


_TENSOR_HERE = _TensorHere()


@dataclass(frozen=True, slots=True)
class Layout:
    """Everything about a value but the numbers in its tensors. Can be pickled."""

    tensors: tuple[TensorSpec, ...]
    #: Per tensor: does the sender want its gradient?
    needs_grad: tuple[bool, ...]
    #: ``None`` when the value is a tensor and nothing else.
    tree: pytree.TreeSpec | None = None
    #: Per leaf of the tree: a Python value, or the mark of a tensor.
    constants: tuple[Any, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        # A tree of numbers stands for its form: how torch pickles the form itself may change.
        form = None
        if self.tree is not None:
            form = (unflatten(range(self.tree.num_leaves), self.tree),)
        return _rebuild_layout, (self.tensors, self.needs_grad, form, self.constants)


def _rebuild_layout(
    tensors: tuple[TensorSpec, ...],
    needs_grad: tuple[bool, ...],
    form: tuple[Any] | None,
    constants: tuple[Any, ...],
) -> Layout:
    tree = None if form is None else flatten(form[0])[1]
    return Layout(tensors, needs_grad, tree, constants)


def take_apart(value: Any) -> tuple[list[Tensor], Layout]:
    """Separate the tensors of a value from its layout.

    >>> import torch
    >>> tensors, layout = take_apart({"x": torch.zeros(2, 3), "step": 7})
    >>> layout.tensors
    (TensorSpec(shape=(2, 3), dtype=torch.float32),)
    >>> assemble(layout, tensors)["step"]
    7
    """
    if isinstance(value, Tensor):
        return [value], Layout(
            (TensorSpec(tuple(value.shape), value.dtype),), (value.requires_grad,)
        )
    leaves, tree = flatten(value)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    for leaf in leaves:
        if hides_tensors(leaf):
            raise ShapeError(
                f"a {type(leaf).__name__} crosses a stage boundary with tensors in it, which would "
                f"not be sent, nor get gradients; {REGISTER}, or return its tensors in a tuple or "
                "dict"
            )
    return tensors, Layout(
        tuple([TensorSpec(tuple(tensor.shape), tensor.dtype) for tensor in tensors]),
        tuple([tensor.requires_grad for tensor in tensors]),
        tree,
        tuple([_TENSOR_HERE if isinstance(leaf, Tensor) else leaf for leaf in leaves]),
    )


#: What to do about a value of a class that pytrees do not know.
REGISTER = (
    "register its class as a pytree (torch.utils._pytree.register_dataclass or "
    "register_pytree_node)"
)

#: Values that surely hold no tensors, so that nobody has to look.
_PLAIN = (Tensor, int, float, complex, str, bytes, type(None), type)


def hides_tensors(leaf: Any) -> bool:
    """True for what is one leaf to a pytree, because its class is not registered, but holds
    tensors.

    >>> import collections, torch
    >>> hides_tensors(collections.UserDict(x=torch.zeros(1))), hides_tensors("text")
    (True, False)
    """
    if isinstance(leaf, _PLAIN):
        return False
    parts = list(getattr(leaf, "__dict__", {}).values())
    if isinstance(leaf, Mapping):
        parts += leaf.values()
    elif isinstance(leaf, (list, tuple, set, frozenset)):
        parts += leaf
    parts += [getattr(leaf, slot, None) for slot in getattr(type(leaf), "__slots__", ())]
    return any(isinstance(part, Tensor) for part in flatten(parts)[0])


def assemble(layout: Layout, tensors: Sequence[Tensor]) -> Any:
    """Put a value together from its layout and its tensors."""
    tree = layout.tree
    if tree is None:
        return tensors[0]
    following = iter(tensors)
    return unflatten(
        [next(following) if leaf is _TENSOR_HERE else leaf for leaf in layout.constants], tree
    )


def is_arguments(value: Any) -> bool:
    """True if a value stands for several positional arguments: a plain tuple or list."""
    kind = type(value)
    return kind is tuple or kind is list


def name_leaves(value: Any, root: str, is_leaf: Callable[[Any], bool] | None = None) -> list[str]:
    """How each leaf is reached, in the order of ``flatten``.

    >>> name_leaves({"hidden": 1, "masks": [2, 3]}, "output")
    ["output['hidden']", "output['masks'][0]", "output['masks'][1]"]
    """
    pairs, _ = pytree.tree_flatten_with_path(value, is_leaf=is_leaf)
    return [root + pytree.keystr(path) for path, _ in pairs]


def require_promise(layout: Layout, promised: Layout, *, stage: int, microbatch: int) -> None:
    """Raise a :class:`ShapeError` if a microbatch's output is not what the header announced."""
    if layout is promised:
        return
    problems = find_differences(layout, promised, root="output", said="promised")
    if problems:
        raise ShapeError(
            f"the output of stage {stage} for microbatch {microbatch} is not what the first "
            f"microbatch on this edge promised: {'; '.join(problems)}. "
            "If outputs may differ between microbatches, say shapes='per_microbatch'; "
            "if they only change from step to step, shapes='per_step'."
        )


def find_differences(layout: Layout, expected: Layout, *, root: str, said: str) -> Sequence[str]:
    """Where a value is not what is expected of it; ``said`` tells how that came to be known.

    >>> import torch
    >>> two, three = (take_apart(torch.zeros(size))[1] for size in (2, 3))
    >>> find_differences(two, three, root="output", said="promised")
    ['output has shape [2], promised [3]']
    """
    if (
        layout.tensors == expected.tensors
        and layout.needs_grad == expected.needs_grad
        and layout.tree == expected.tree
        and all(map(_same_constant, layout.constants, expected.constants))
    ):
        return ()
    if layout.tree != expected.tree:
        return [f"its structure is {layout.tree or 'a tensor'}, not {expected.tree or 'a tensor'}"]
    names = [root]
    if layout.tree is not None:
        names = name_leaves(unflatten(list(layout.constants), layout.tree), root)
    constants = layout.constants or (_TENSOR_HERE,)
    others = expected.constants or (_TENSOR_HERE,)
    problems = []
    position = 0
    for name, constant, other in zip(names, constants, others, strict=True):
        if constant is _TENSOR_HERE and other is _TENSOR_HERE:
            problems += _compare_tensors(name, layout, expected, position, said)
            position += 1
        elif (constant is _TENSOR_HERE) != (other is _TENSOR_HERE):
            problems.append(f"{name} is {constant!r}, {said} was {other!r}")
            return problems
        elif not _same_constant(constant, other):
            problems.append(f"{name} is the value {constant!r}, {said} was {other!r}")
    return problems


def _compare_tensors(
    name: str, layout: Layout, expected: Layout, position: int, said: str
) -> list[str]:
    one, other = layout.tensors[position], expected.tensors[position]
    problems = []
    if one.shape != other.shape:
        problems.append(f"{name} has shape {list(one.shape)}, {said} {list(other.shape)}")
    if one.dtype != other.dtype:
        problems.append(f"{name} has type {one.dtype}, {said} {other.dtype}")
    if layout.needs_grad[position] != expected.needs_grad[position]:
        does = "requires" if layout.needs_grad[position] else "does not require"
        problems.append(f"{name} {does} grad, unlike {said}")
    return problems


def _same_constant(one: Any, other: Any) -> bool:
    if one is other:
        return True
    try:
        return bool(one == other) or (one != one and other != other)
    except Exception:
        return False


def fits(value: Any, layout: Layout | None) -> bool:
    """A quick check whether a bare tensor has the layout already; anything else is looked at."""
    if layout is None or layout.tree is not None or type(value) is not Tensor:
        return False
    spec = layout.tensors[0]
    return (
        value.shape == spec.shape
        and value.dtype is spec.dtype
        and value.requires_grad is layout.needs_grad[0]
    )


def require_routes(routed: Mapping[int, Any], successors: Sequence[int], stage: int) -> None:
    """Raise a :class:`ShapeError` unless a routed output names every successor and no other."""
    if set(routed) != set(successors):
        raise ShapeError(
            f"stage {stage} returned a Routed output for the stages {sorted(routed)}, but its "
            f"successors are {sorted(successors)}; name each of them once"
        )
