"""What a pass changed: which actions came, went and moved, on which rank.

::

    insert_communication: +1 SEND_F, +1 RECV_F, +1 SEND_B, +1 RECV_B
      rank 0   0F0  +0SEND_F0  +0RECV_B0  0B0
      rank 1   +1RECV_F0  1F0  1B0  +1SEND_B0

``+`` came, ``-`` went, ``~`` stands elsewhere than before in relation to the others.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from pipeloom.ir.action import Action
from pipeloom.ir.schedule import Schedule

Mark = Literal[" ", "+", "-", "~"]
_SIGNS: dict[Mark, str] = {" ": "", "+": "+", "-": "-", "~": "~"}


class Cell(NamedTuple):
    """An action of the program after the pass, or one that is gone, at its place."""

    mark: Mark
    action: Action

    def __str__(self) -> str:
        return f"{_SIGNS[self.mark]}{self.action}"


@dataclass(frozen=True)
class Difference:
    """The difference between two programs, rank by rank."""

    name: str
    before: Schedule
    after: Schedule

    @cached_property
    def rows(self) -> tuple[tuple[Cell, ...], ...]:
        """Every rank's program after the pass, with what is gone at its old place."""
        return tuple(
            tuple(_compare(old, new))
            for old, new in zip(self.before.actions, self.after.actions, strict=True)
        )

    def _find(self, mark: Mark) -> tuple[tuple[Action, ...], ...]:
        return tuple(tuple(cell.action for cell in row if cell.mark == mark) for row in self.rows)

    @cached_property
    def added(self) -> tuple[tuple[Action, ...], ...]:
        """Per rank, what came."""
        return self._find("+")

    @cached_property
    def removed(self) -> tuple[tuple[Action, ...], ...]:
        """Per rank, what went."""
        return self._find("-")

    @cached_property
    def moved(self) -> tuple[tuple[Action, ...], ...]:
        """Per rank, what stands elsewhere: as few actions as explain the new order."""
        return self._find("~")

    @property
    def is_empty(self) -> bool:
        """True if the pass changed nothing."""
        return self.before.actions == self.after.actions

    @cached_property
    def counts(self) -> dict[str, int]:
        """How many actions of each kind came (``"+SEND_F"``), went and moved."""
        found = Counter(
            f"{cell.mark}{cell.action.kind}"
            for row in self.rows
            for cell in row
            if cell.mark != " "
        )
        order = {mark: index for index, mark in enumerate("+-~")}
        return dict(sorted(found.items(), key=lambda item: order[item[0][0]]))

    def format(self, *, max_cells: int | None = 40) -> str:
        """Text for people; each rank shows its first ``max_cells`` cells near changes."""
        counts = ", ".join(f"{key[0]}{count} {key[1:]}" for key, count in self.counts.items())
        lines = [f"{self.name}: {counts or 'nothing changed'}"]
        label = len(f"rank {len(self.rows) - 1}")
        for rank, row in enumerate(self.rows):
            if any(cell.mark != " " for cell in row):
                cells = "  ".join(_excerpt(row, max_cells))
                lines.append(f"  {f'rank {rank}'.ljust(label)}   {cells}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.format()


def compare_programs(before: Schedule, after: Schedule, *, name: str = "change") -> Difference:
    """The difference between two programs of the same ranks.

    >>> from pipeloom.ir.notation import parse_grid
    >>> print(compare_programs(parse_grid("0F0 0F1 0F2"), parse_grid("0F1 0F2 0F0")))
    change: ~1 F
      rank 0   0F1  0F2  ~0F0
    """
    return Difference(name, before, after)


def _compare(old: Sequence[Action], new: Sequence[Action]) -> Iterator[Cell]:
    """Near-linear: actions are matched by what they are (the k-th of several equal ones by k),
    and of those in both the longest run that kept its order counts as unmoved."""
    old_keys, new_keys = _number_repeats(old), _number_repeats(new)
    place_in_old = {key: index for index, key in enumerate(old_keys)}
    places = [place_in_old.get(key) for key in new_keys]
    steady = _longest_increasing([place for place in places if place is not None])
    kept = set(new_keys)
    gone = [index for index, key in enumerate(old_keys) if key not in kept]
    steady_in_order = [*sorted(steady), len(old)]
    next_steady = next_gone = 0
    came: list[Cell] = []
    for action, place in zip([*new, None], [*places, len(old)], strict=True):
        if place != steady_in_order[next_steady]:
            assert action is not None
            came.append(Cell("+" if place is None else "~", action))
            continue
        # Between two unmoved actions: what went, next to what came in its place.
        first_gone = next_gone
        while next_gone < len(gone) and gone[next_gone] < place:
            next_gone += 1
        yield from _interleave([Cell("-", old[i]) for i in gone[first_gone:next_gone]], came)
        if action is not None:
            yield Cell(" ", action)
        came = []
        next_steady += 1


def _interleave(went: list[Cell], came: list[Cell]) -> Iterator[Cell]:
    """What came follows what went of the same stage and microbatch; both keep their order."""
    last_of = {cell.action[1:3]: index for index, cell in enumerate(went)}
    next_went = 0
    for cell in came:
        last = last_of.get(cell.action[1:3], -1)
        if cell.mark == "+" and last >= next_went:
            yield from went[next_went : last + 1]
            next_went = last + 1
        yield cell
    yield from went[next_went:]


def _number_repeats(row: Sequence[Action]) -> list[tuple[Action, int]]:
    seen: Counter[Action] = Counter()
    keys = []
    for action in row:
        keys.append((action, seen[action]))
        seen[action] += 1
    return keys


def _longest_increasing(values: Sequence[int]) -> set[int]:
    """The members of a longest increasing subsequence of distinct numbers."""
    tails: list[int] = []
    previous: dict[int, int | None] = {}
    for value in values:
        length = bisect_left(tails, value)
        previous[value] = tails[length - 1] if length else None
        if length == len(tails):
            tails.append(value)
        else:
            tails[length] = value
    members = set()
    current = tails[-1] if tails else None
    while current is not None:
        members.add(current)
        current = previous[current]
    return members


def _excerpt(row: Sequence[Cell], max_cells: int | None) -> list[str]:
    """The cells, long stretches without a change left out."""
    near = {
        index + shift
        for index, cell in enumerate(row)
        if cell.mark != " "
        for shift in (-2, -1, 0, 1, 2)
    }
    shown: list[str] = []
    left_out = num_shown = 0
    for index, cell in enumerate(row):
        if max_cells is not None and (num_shown >= max_cells or index not in near):
            left_out += 1
            continue
        if left_out:
            shown.append(f"… {left_out} more …")
            left_out = 0
        shown.append(str(cell))
        num_shown += 1
    if left_out:
        shown.append(f"… {left_out} more")
    return shown
