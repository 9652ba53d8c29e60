"""Where the tensors lie that recordings read and write."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

__all__ = ["Memory"]


@dataclass(slots=True)
class _Place:
    """One tensor of a module, by the table that has it."""

    holder: dict[str, Any]
    name: str
    tensor: Tensor
    address: int = field(init=False)

    def __post_init__(self) -> None:
        self.address = self.tensor.data_ptr()

    def is_as_before(self) -> bool:
        return self.holder.get(self.name) is self.tensor and self.tensor.data_ptr() == self.address


class Memory:
    """The parameters and buffers of a stage, and tables and masks that it keeps as attributes."""

    def __init__(self, module: nn.Module) -> None:
        parts = list(module.modules())
        self._attributes = [place for part in parts for place in _places(vars(part))]
        self._places = [
            place
            for part in parts
            for holder in (part._parameters, part._buffers)
            for place in _places(holder)
        ]
        self._places += self._attributes
        # Recordings read these, whatever the code puts in their place for its other runs.
        self._recorded = [place.tensor for place in self._attributes]

    def moved(self) -> list[str]:
        """What is no longer where it was."""
        return [place.name for place in self._places if not place.is_as_before()]

    @contextmanager
    def used_by_own_code(self) -> Iterator[None]:
        """While the module's own code runs, which may replace its attributes: a table for longer
        inputs, something to look at afterwards. What others replace is still found.
        """
        own = [place for place in self._attributes if place.is_as_before()]
        try:
            yield
        finally:
            for place in own:
                found = place.holder.get(place.name)
                if isinstance(found, Tensor) and found is not place.tensor:
                    place.tensor, place.address = found, found.data_ptr()


def _places(holder: dict[str, Any]) -> Iterator[_Place]:
    for name, tensor in holder.items():
        if isinstance(tensor, Tensor):
            yield _Place(holder, name, tensor)
