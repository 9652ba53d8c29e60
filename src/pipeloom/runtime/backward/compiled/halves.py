"""A compiled backward that runs whole, or leaves a part for W.

The engine runs a compiled backward as one node of the graph. I asks that node to leave what was cut
off::

    I:  "leave W's part" ─► engine runs the node ─► gradients; values for W in the answer
    B:  nobody asks      ─► engine runs the node ─► all gradients
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from pipeloom.errors import BackwardError
from pipeloom.runtime.backward.compiled.cut import Cut, cut_backward
from pipeloom.runtime.backward.versions import versions

__all__ = ["Answer", "Halves", "Signature", "engine_is_compiled", "halves_of"]

Run = Callable[[list[Any]], Sequence[Any]]  # takes its arguments in a list, and empties it


@dataclass(frozen=True, slots=True)
class Signature:
    """What the arguments of a compiled forward are.

    ``places`` maps the operands of its node in the autograd graph to arguments, and so to outputs
    of the backward; ``weights`` names what of the forward is made of parameters alone.
    """

    num_arguments: int
    places: Mapping[int, int]
    weights: frozenset[str]


@dataclass(slots=True, eq=False)
class Answer:
    """What the next run of a node leaves for W; no values if it was not run."""

    cut: Cut
    values: list[Any] | None = None
    versions: list[int] = field(default_factory=list)
    was_run: bool = False

    def is_overwritten(self) -> bool:
        """Whether what was left has changed since."""
        return self.versions != _versions_of(self.values)


class Halves:
    """The backward of one compiled graph; what torch calls with saved tensors and gradients.

    ``compile_part(part, reads)`` compiles a part that is given only those of the arguments.
    """

    def __init__(
        self,
        module: GraphModule,
        forward: Signature,
        compile_part: Callable[[GraphModule, Sequence[int]], Run],
    ) -> None:
        self.module = module
        self._forward = forward
        self._compile = compile_part
        self._whole: Run | None = None
        self._cuts: dict[frozenset[int], Cut | None] = {}
        self._halves: dict[Cut, Run] = {}
        self._asked: dict[Any, Answer] = {}
        self._boxed_call = True  # torch looks for this: the arguments come in a list

    def cut(self, operands: frozenset[int]) -> Cut | None:
        """I's half, where W computes as many of the operands' gradients as are worth it."""
        if operands not in self._cuts:
            places = {at: self._forward.places[at] for at in sorted(operands)}
            self._cuts[operands] = cut_backward(self.module, places, self._forward.weights)
        return self._cuts[operands]

    def prepare(self, cut: Cut) -> None:
        """Compile I's half."""
        if cut in self._halves:
            return
        with compile_lock():
            if cut not in self._halves:
                self._halves[cut] = self._compile(cut.graph, cut.reads)

    @contextmanager
    def asked(self, node: Any, cut: Cut) -> Iterator[Answer]:
        """Have the node's next run leave W's part."""
        answer = self._asked[node] = Answer(cut)

        def note(grads: object) -> None:
            answer.was_run = True

        handle = node.register_prehook(note)
        try:
            yield answer
        finally:
            handle.remove()
            self._asked.pop(node, None)
        if answer.was_run and answer.values is None:
            raise BackwardError(
                "a compiled backward was run by something that does not know that it comes in "
                'halves, and the gradients of its weights are lost; use method="whole"'
            )

    def __call__(self, arguments: list[Any]) -> list[Any]:
        answer = self._asked.pop(torch._C._current_autograd_node(), None) if self._asked else None
        if answer is None:
            return list(self.prepare_whole()(arguments))
        cut = answer.cut
        given = [arguments[place] for place in cut.reads]
        values = [arguments[at] if as_given else None for as_given, at in cut.values]
        arguments.clear()  # so that what I alone reads goes as soon as it is read
        results = self._halves[cut](given)
        for place, (as_given, at) in enumerate(cut.values):
            if not as_given:
                values[place] = results[at]
        # Without the graph above them, which they would keep until W.
        values = [one.detach() if isinstance(one, Tensor) else one for one in values]
        answer.values, answer.versions = values, _versions_of(values)
        outputs: list[Any] = [None] * cut.num_outputs
        gradients = results[: len(cut.gives)]
        for place, gradient in zip(cut.gives, _counted_with(values, gradients), strict=True):
            outputs[place] = gradient
        return outputs

    def prepare_whole(self) -> Run:
        """Compile it in one piece."""
        if self._whole is not None:
            return self._whole
        with compile_lock():
            if self._whole is None:
                with torch._subclasses.fake_tensor.unset_fake_temporarily():
                    module = copy.deepcopy(self.module)  # compiling changes it
                num_arguments = len(self.module.graph.find_nodes(op="placeholder"))
                self._whole = self._compile(module, range(num_arguments))
            return self._whole


def compile_lock() -> AbstractContextManager[object]:
    """What torch holds while it compiles: its compiler is not for several threads at once."""
    from torch._dynamo.convert_frame import compile_lock as lock

    held: AbstractContextManager[object] = lock
    return held


def _counted_with(values: Sequence[Any], results: Sequence[Any]) -> Iterator[Any]:
    """The results, so that changes of those that share memory with a value are seen at the value.

    Compiled code makes views of one buffer that count their changes apart.
    """
    plain = (one for one in values if type(one) is Tensor and one.layout is torch.strided)
    by_memory = {one.untyped_storage()._cdata: one for one in plain}
    for result in results:
        is_plain = type(result) is Tensor and result.layout is torch.strided
        value = by_memory.get(result.untyped_storage()._cdata) if is_plain else None
        if value is None or not _are_plain_views(value, result):
            yield result
        else:
            seen = value.as_strided(result.shape, result.stride(), result.storage_offset())
            yield seen.detach()  # no view: whoever gets it may do with it as with any gradient


def _are_plain_views(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors with the same memory differ in nothing but sizes and strides."""
    return one.dtype == other.dtype and not any(
        tensor.is_conj() or tensor.is_neg() for tensor in (one, other)
    )


def _versions_of(values: list[Any] | None) -> list[int]:
    return versions([one for one in values or () if isinstance(one, Tensor)])


def engine_is_compiled() -> bool:
    """Whether torch compiles whole runs of the engine at present ("compiled autograd")."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(module, "compiled_autograd_enabled", False))


def halves_of(node: Any) -> Halves | None:
    """The backward that a node of an autograd graph runs, if it can leave a part for later."""
    if engine_is_compiled():
        return None  # what then runs is the graph that the backward was made from
    backward = getattr(getattr(type(node), "_forward_cls", None), "compiled_bw", None)
    while backward is not None and not isinstance(backward, Halves):
        backward = getattr(backward, "_torchdynamo_orig_callable", None)
    return backward
