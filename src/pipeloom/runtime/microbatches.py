"""A batch and its microbatches: split, already split, merged.

::

    step(x, mask=m, target=y, split={"mask": REPLICATE})

    x  [10, 8]  ──► [3, 8] [3, 8] [2, 8] [2, 8]      sizes differ by one at most
    m  [5, 5]   ──► the same for every microbatch     declared, because 5 is not the batch
    y  [10]     ──► [3]    [3]    [2]    [2]

Dimension 0 of every tensor is the batch unless it is declared otherwise: a tensor of another size
is an error that names it, raised before anything runs. How to split is declared by the name of a
keyword, by the position of an argument, or as ``"target"``; the declaration is one of

- a dimension: ``split={"position_ids": 1}``
- :data:`REPLICATE`: every microbatch gets the whole value
- a function ``(value, num_microbatches) → list`` for anything else (packed offsets, say)
- a tree of these, less deep than the value if you like: ``split={0: {"x": 0, "f": REPLICATE}}``
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pipeloom.errors import ShapeError
from pipeloom.runtime.block_mask import is_block_mask, split_block_mask
from pipeloom.runtime.boundary import REGISTER, flatten, hides_tensors, name_leaves, unflatten

__all__ = [
    "PreSplit",
    "REPLICATE",
    "Batch",
    "batch_of_microbatches",
    "merge_outputs",
    "split_batch",
]


class _Replicate:
    """Every microbatch gets the whole value."""

    def __repr__(self) -> str:
        return "REPLICATE"


#: Declares that every microbatch gets the whole value.
REPLICATE = _Replicate()


class PreSplit(list[Any]):
    """An argument that is split already: one entry per microbatch, of any sizes.

    ``pipe.step(PreSplit([x0, x1]), target=PreSplit([y0, y1]))``
    """


class Batch:
    """The arguments of one step, as one list entry per microbatch.

    >>> batch = split_batch(2, arguments=(torch.arange(5),))
    >>> [arguments[0].tolist() for arguments in batch.arguments]
    [[0, 1, 2], [3, 4]]
    """

    __slots__ = ("arguments", "differentiable", "forms", "keywords", "size", "targets")

    def __init__(
        self,
        arguments: Sequence[tuple[Any, ...]],
        keywords: Sequence[dict[str, Any]],
        targets: Sequence[Any],
        size: int | None = None,
        forms: tuple[int, ...] | None = None,
        differentiable: frozenset[str] = frozenset(),
    ) -> None:
        self.arguments = arguments
        self.keywords = keywords
        self.targets = targets
        #: The size of the batch, where a tensor of this rank says it.
        self.size = size
        #: Per microbatch a number, equal where all its tensors have the same shapes and types;
        #: ``None`` if that holds for all of them.
        self.forms = forms
        #: Which of "args" and "kwargs" have tensors that want their gradient.
        self.differentiable = differentiable

    def needs_grad(self, *, is_first: bool) -> bool:
        """True if a tensor among the arguments of a stage wants its gradient."""
        return "kwargs" in self.differentiable or (is_first and "args" in self.differentiable)


def split_batch(
    num_microbatches: int,
    *,
    arguments: tuple[Any, ...] = (),
    keywords: Mapping[str, Any] | None = None,
    target: Any = None,
    rules: Mapping[str | int, Any] | None = None,
) -> Batch:
    """Split everything a step was called with; every problem is found before anything runs."""
    rules = dict(rules or {})
    keywords = keywords or {}
    named: list[tuple[str | int, str, Any]] = [
        *((index, f"args[{index}]", value) for index, value in enumerate(arguments)),
        ("target", "target", target),
        *((name, f"kwargs[{name!r}]", value) for name, value in keywords.items()),
    ]
    problems: list[str] = []
    leaves: list[_Leaf] = []
    trees = []
    for key, root, value in named:
        found, tree = _find_leaves(root, value, rules.get(key, 0), key in rules, num_microbatches)
        trees.append((len(found), tree))
        leaves += found
    size = next((leaf.size for leaf in leaves if leaf.tells_batch), None)
    for leaf in leaves:
        leaf.check(size, num_microbatches, problems)
    if problems:
        raise ShapeError(
            f"cannot split the batch into {num_microbatches} microbatches: " + "; ".join(problems)
        )
    pieces = [leaf.split(num_microbatches) for leaf in leaves]
    columns = _regroup(pieces, trees, num_microbatches)
    num_arguments = len(arguments)
    names = tuple(keywords)
    return Batch(
        [tuple(column[:num_arguments]) for column in columns],
        [dict(zip(names, column[num_arguments + 1 :], strict=True)) for column in columns],
        [column[num_arguments] for column in columns],
        size,
        _number_forms(leaves, pieces),
        frozenset(
            [
                leaf.name.partition("[")[0]
                for leaf, column in zip(leaves, pieces, strict=True)
                if _wants_grad(list(column) if leaf.is_cut_by_user else leaf.value)
            ]
        ),
    )


def batch_of_microbatches(
    arguments: Sequence[tuple[Any, ...]],
    keywords: Sequence[dict[str, Any]],
    targets: Sequence[Any],
) -> Batch:
    """A batch that somebody cut already: its arguments, one list entry per microbatch."""
    forms: dict[Any, int] = {}
    numbers = tuple(
        [
            forms.setdefault(_form_of(pair), len(forms))
            for pair in zip(arguments, keywords, strict=True)
        ]
    )
    differentiable = {"args": _wants_grad(arguments), "kwargs": _wants_grad(keywords)}
    return Batch(
        arguments,
        keywords,
        targets,
        None,
        numbers if len(forms) > 1 else None,
        frozenset([name for name, wants in differentiable.items() if wants]),
    )


def _wants_grad(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.requires_grad
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in flatten(value)[0])


def _number_forms(
    leaves: Sequence[_Leaf], pieces: Sequence[Sequence[Any]]
) -> tuple[int, ...] | None:
    """Which microbatches look alike. A cut batch tells by its sizes; whatever the user or a
    function of the user's cut is looked at."""
    cut = [
        [_form_of(piece) for piece in column]
        for leaf, column in zip(leaves, pieces, strict=True)
        if not leaf.name.startswith("target") and (leaf.is_split or leaf.is_cut_by_user)
    ]
    numbers: dict[tuple[Any, ...], int] = {}
    forms = tuple([numbers.setdefault(form, len(numbers)) for form in zip(*cut, strict=True)])
    return forms if len(numbers) > 1 else None


def _form_of(piece: Any) -> Any:
    if isinstance(piece, Tensor):
        return piece.shape, piece.dtype
    if isinstance(piece, PreSplit) or is_block_mask(piece):
        return None
    return tuple([_form_of(leaf) for leaf in flatten(piece)[0] if isinstance(leaf, Tensor)])


def _regroup(
    pieces: list[Sequence[Any]], trees: list[tuple[int, Any]], num_microbatches: int
) -> list[list[Any]]:
    """From one list of microbatches per leaf to one list of values per microbatch."""
    columns: list[list[Any]] = []
    for microbatch in range(num_microbatches):
        column = []
        position = 0
        for count, tree in trees:
            own = [piece[microbatch] for piece in pieces[position : position + count]]
            column.append(own[0] if tree is None else unflatten(own, tree))
            position += count
        columns.append(column)
    return columns


def _is_leaf(value: Any) -> bool:
    return isinstance(value, PreSplit) or is_block_mask(value)


def _find_leaves(
    root: str, value: Any, rule: Any, declared: bool, num_microbatches: int
) -> tuple[list[_Leaf], Any]:
    """The leaves of one argument, each with the rule that applies to it."""
    whole = callable(rule) or isinstance(rule, _Replicate)
    if isinstance(value, Tensor) or whole or _is_leaf(value):
        return [_Leaf(root, value, rule, declared)], None
    leaves, tree = flatten(value, is_leaf=_is_leaf)
    if not leaves:
        # An empty container (or None) has no leaves, but every microbatch still gets it.
        return [_Leaf(root, value, REPLICATE, True)], None
    names = name_leaves(value, root, is_leaf=_is_leaf)
    leaf_rules = _spread_rule(rule, value, root)
    return [
        _Leaf(name, leaf, leaf_rule, declared)
        for name, leaf, leaf_rule in zip(names, leaves, leaf_rules, strict=True)
    ], tree


def _spread_rule(rule: Any, value: Any, root: str) -> list[Any]:
    """Give every leaf of a value the rule that a tree of rules, maybe less deep, has for it."""
    if not isinstance(rule, (dict, list, tuple)):
        return [rule] * len(flatten(value, is_leaf=_is_leaf)[0])
    if isinstance(rule, dict) and isinstance(value, Mapping):
        unknown = [key for key in rule if key not in value]
        if not unknown:
            parts = [(rule.get(key, 0), value[key], f"{root}[{key!r}]") for key in value]
            return [one for part in parts for one in _spread_rule(*part)]
        raise ShapeError(f"the rule for {root} names {unknown}, which the value does not have")
    if isinstance(value, (list, tuple)) and len(rule) == len(value):
        items = enumerate(zip(rule, value, strict=True))
        return [
            one
            for index, (part, item) in items
            for one in _spread_rule(part, item, f"{root}[{index}]")
        ]
    raise ShapeError(f"the rule for {root} is {rule!r}, which does not have the value's form")


def _is_unknown(value: Any) -> bool:
    """True for arrays that are no tensors, and for what holds tensors that nobody would cut."""
    is_array = hasattr(value, "__array__") and bool(getattr(value, "shape", None))
    return not isinstance(value, Tensor) and (is_array or hides_tensors(value))


class _Leaf:
    """One leaf of the arguments and how it is split."""

    def __init__(self, name: str, value: Any, rule: Any, declared: bool) -> None:
        self.name = name
        self.value = value
        self.rule = rule
        self.declared = declared
        self.is_split = isinstance(rule, int) and isinstance(value, Tensor)
        self.is_cut_by_user = isinstance(value, PreSplit) or callable(rule)

    @property
    def tells_batch(self) -> bool:
        return self.is_split and -self.value.dim() <= self.rule < self.value.dim()

    @property
    def size(self) -> int:
        return int(self.value.shape[self.rule])

    def check(self, size: int | None, num_microbatches: int, problems: list[str]) -> None:
        """Say what is wrong with splitting this leaf."""
        name, value = self.name, self.value
        if isinstance(value, PreSplit):
            if len(value) != num_microbatches:
                problems.append(
                    f"{name} is already split into {len(value)} microbatches, not "
                    f"{num_microbatches}"
                )
        elif is_block_mask(value) and isinstance(self.rule, int):
            rows = value.kv_num_blocks.shape[0]
            if rows not in (1, size or rows):
                problems.append(f"{name} is a block mask for {rows} rows, the batch has {size}")
        elif isinstance(self.rule, int) and not self.is_split and _is_unknown(value):
            problems.append(
                f"{name} is a {type(value).__name__}, which is neither a tensor nor a container "
                f"that can be looked into; make it a tensor, {REGISTER}, or declare it: "
                f"{self._replication()} or a function"
            )
        elif self.is_split and not self.tells_batch:
            problems.append(
                f"{name} has shape {list(value.shape)} and no dimension {self.rule}; declare it: "
                + self._remedy()
            )
        elif self.is_split and self.size != size:
            problems.append(
                f"{name} has shape {list(value.shape)}: its dimension {self.rule} is not the batch "
                f"of {size}; declare it: {self._remedy()}"
            )
        elif self.is_split and not self.size:
            problems.append(f"{name} has no rows")
        elif self.is_split and self.size < num_microbatches:
            problems.append(
                f"{name} has {self.size} rows, fewer than microbatches; "
                f"use at most {self.size} microbatches or a larger batch"
            )
        elif not isinstance(self.rule, (int, _Replicate)) and not callable(self.rule):
            problems.append(
                f"the rule for {name} is {self.rule!r}; it must be a dimension, REPLICATE or a "
                "function (value, num_microbatches) → list"
            )

    def _remedy(self) -> str:
        return f"{self._replication()}, another dimension, or a function"

    def _replication(self) -> str:
        key = self.name.split("[", 1)[-1].split("]", 1)[0]
        key = '"target"' if self.name.startswith("target") else key.replace("'", '"')
        return f"split={{{key}: REPLICATE}}"

    def split(self, num_microbatches: int) -> Sequence[Any]:
        """One value per microbatch."""
        value, rule = self.value, self.rule
        if isinstance(value, PreSplit):
            return value
        if is_block_mask(value) and isinstance(rule, int):
            return split_block_mask(value, num_microbatches)
        if self.is_split:
            return torch.tensor_split(value, num_microbatches, dim=rule)
        if isinstance(rule, (int, _Replicate)):
            return [value] * num_microbatches
        pieces = list(rule(value, num_microbatches))
        if len(pieces) != num_microbatches:
            raise ShapeError(
                f"the split function for {self.name} returned {len(pieces)} pieces, "
                f"not {num_microbatches}"
            )
        return pieces


Merge = int | Callable[[list[Any]], Any]


def merge_outputs(outputs: Sequence[Any], rule: Merge = 0) -> Any:
    """Put the outputs of all microbatches together, leaf by leaf.

    Tensors are joined along dimension ``rule``, those without dimensions are stacked; other values
    are kept if all microbatches agree and listed if not. A function gets the list of outputs.

    >>> merge_outputs([{"y": torch.zeros(2, 3)}, {"y": torch.ones(1, 3)}])["y"].shape
    torch.Size([3, 3])
    """
    if not isinstance(rule, int):
        return rule(list(outputs))
    flat = [flatten(output) for output in outputs]
    tree = flat[0][1]
    if any(other != tree for _, other in flat):
        raise ShapeError(
            "the outputs of the microbatches differ in structure and cannot be merged; "
            "give merge=function, or ask for the list with merge=list"
        )
    columns = zip(*[leaves for leaves, _ in flat], strict=True)
    return unflatten([_merge_leaf(list(column), rule) for column in columns], tree)


def _merge_leaf(pieces: list[Any], dim: int) -> Any:
    if all(isinstance(piece, Tensor) for piece in pieces):
        return torch.cat(pieces, dim=dim) if pieces[0].dim() else torch.stack(pieces)
    return pieces[0] if all(piece == pieces[0] for piece in pieces[1:]) else pieces
