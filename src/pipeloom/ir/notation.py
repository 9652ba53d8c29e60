"""Text, grid and CSV: what is printed here is parsed here.

::

    text      2F0   1SEND_F0>3   (0F4;3B1)OVERLAP_F_B
    grid      # 1f1b · 2 ranks · 2 stages · 3 microbatches
              rank 0   0F0  0F1  0B0  0F2  0B1  0B2
              rank 1   1F0  1B0  1F1  1B1  1F2  1B2
    CSV       0F0,0F1,0B0,0F2,0B1,0B2
              1F0,1B0,1F1,1B1,1F2,1B2
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterable
from itertools import zip_longest
from typing import Literal

from pipeloom.errors import ParseError
from pipeloom.ir.action import Action, Kind
from pipeloom.ir.dependencies import RULES, Role
from pipeloom.ir.questions import find_malformed, role_of
from pipeloom.ir.schedule import Schedule, make_schedule
from pipeloom.ir.topology import Topology

#: Larger numbers are no stages or microbatches but garbage, and would exhaust memory.
LARGEST_NUMBER = 999_999

_KINDS = {kind.value: kind for kind in Kind}
#: Without leading zeros, so that one action has one text.
_NUMBER = "(?:0|[1-9][0-9]{0,5})"
_SIMPLE = re.compile(
    rf"({_NUMBER})("
    + "|".join(
        kind.value
        for kind, rule in sorted(RULES.items(), key=lambda item: -len(item[0].value))
        if rule.role is not Role.FUSED
    )
    + rf")({_NUMBER})?(?:([<>])({_NUMBER}))?"
)
_FUSED = re.compile(r"\(([^()]*)\)([A-Z_]+)")


def parse_action(text: str) -> Action:
    """Parse one action, strictly.

    >>> parse_action("1SEND_F0>3").peer
    3
    >>> parse_action("2F0x")
    Traceback (most recent call last):
    pipeloom.errors.ParseError: '2F0x' is not an action: 'x' after the action, at character 4
    """
    action = _parse(text)
    if isinstance(action, str):
        raise ParseError(f"{text!r} is not an action: {action}")
    return action


def _parse(text: str) -> Action | str:
    """The action, or why the text is none."""
    match = _SIMPLE.fullmatch(text)
    if match is None:
        if text.startswith("("):
            return _parse_fused(text)
        return _explain(text)
    stage, kind_text, microbatch, arrow, peer = match.groups()
    action = Action(
        _KINDS[kind_text],
        int(stage),
        None if microbatch is None else int(microbatch),
        (),
        None if peer is None else int(peer),
    )
    problem = find_malformed(action)
    if problem is None and arrow is not None:
        expected = "<" if role_of(action) is Role.RECEIVE else ">"
        if arrow != expected:
            problem = f"the peer of a {kind_text} is written with '{expected}', not '{arrow}'"
    return action if problem is None else problem


def _parse_fused(text: str) -> Action | str:
    match = _FUSED.fullmatch(text)
    if match is None:
        return "a fused action is written (0F4;3B1)OVERLAP_F_B"
    inner, kind_text = match.groups()
    kind = _KINDS.get(kind_text)
    if kind is None or RULES[kind].role is not Role.FUSED:
        return f"{kind_text!r} after the parts is no fused kind; it must be {_names(Role.FUSED)}"
    parts = []
    for part_text in inner.split(";"):
        part = _parse(part_text)
        if isinstance(part, str):
            return f"its part {part_text!r}: {part}"
        parts.append(part)
    action = Action(kind, None, None, tuple(parts))
    return find_malformed(action) or action


def _explain(text: str) -> str:
    if not text:
        return "it is empty"
    if re.search(r"(?<![0-9])0[0-9]", text):
        return "its numbers must not begin with zeros"
    digits = re.match(r"[0-9]*", text)
    assert digits is not None
    start = digits.end()
    if start == 0:
        return "it must begin with the number of a stage, as in 2F0"
    if start > 6:
        return f"the stage number is larger than {LARGEST_NUMBER}"
    rest = text[start:]
    for kind_text in sorted(_KINDS, key=len, reverse=True):
        if rest.startswith(kind_text):
            break
    else:
        return f"no kind of action at character {start + 1}; known are {', '.join(_KINDS)}"
    if RULES[_KINDS[kind_text]].role is Role.FUSED:
        return f"{kind_text} is written with its parts, as in (0F4;3B1){kind_text}"
    tail = re.match(r"[0-9]*", rest[len(kind_text) :])
    assert tail is not None
    if tail.end() > 6:
        return f"the microbatch number is larger than {LARGEST_NUMBER}"
    end = start + len(kind_text) + tail.end()
    return f"{text[end:]!r} after the action, at character {end + 1}"


def _names(role: Role) -> str:
    return " or ".join(kind.value for kind, rule in RULES.items() if rule.role is role)


# ── grid ─────────────────────────────────────────────────────────────────────────────────────────


def format_grid(
    schedule: Schedule,
    *,
    ranks_as: Literal["rows", "columns"] = "rows",
    marked: Iterable[tuple[int, int]] = (),
    around: tuple[int, int] | None = None,
    mark: str = "← here",
) -> str:
    """Print the order of every rank as an aligned grid.

    ``marked`` names (rank, position) pairs to point at; ``around=(rank, position)`` shows only the
    neighbourhood of one action, which is what error messages print.

    >>> from pipeloom.ir.schedule import make_schedule
    >>> rows = [["0F0", "0B0"], ["1F0", "1B0"]]
    >>> schedule = make_schedule([map(parse_action, row) for row in rows], name="tiny")
    >>> print(format_grid(schedule, marked=[(1, 1)]))
    # tiny · 2 ranks · 2 stages · 1 microbatches
    rank 0   0F0  0B0
    rank 1   1F0  1B0 ← here
    """
    targets = set(marked)
    first, last = 0, max(map(len, schedule.actions), default=0)
    if around is not None:
        targets.add(around)
        first, last = max(0, around[1] - 4), min(last, around[1] + 5)
    cells = [
        [
            str(action) + (f" {mark}" if (rank, position) in targets else "")
            for position, action in enumerate(row[first:last], start=first)
        ]
        for rank, row in enumerate(schedule.actions)
    ]
    lines = [_headline(schedule)]
    if ranks_as == "rows":
        widths = [max(map(len, column)) for column in zip_longest(*cells, fillvalue="")]
        label = len(f"rank {max(len(cells) - 1, 0)}")
        for rank, row in enumerate(cells):
            body = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False))
            before = "…  " if first else ""
            after = "  …" if last < len(schedule.actions[rank]) else ""
            lines.append(f"{f'rank {rank}'.ljust(label)}   {before}{body.rstrip()}{after}".rstrip())
    else:
        columns = [[f"rank {rank}", *row] for rank, row in enumerate(cells)]
        widths = [max(map(len, column)) for column in columns]
        for index, row_cells in enumerate(zip_longest(*columns, fillvalue="")):
            number = "step" if index == 0 else str(first + index - 1)
            body = "  ".join(c.ljust(w) for c, w in zip(row_cells, widths, strict=True))
            lines.append(f"{number.rjust(5)}   {body}".rstrip())
    return "\n".join(lines)


def format_excerpt(
    schedule: Schedule,
    places: Iterable[tuple[int, int]],
    *,
    reach: int = 3,
    most_ranks: int = 8,
    mark: str = "← here",
) -> str:
    """Print what stands around some (rank, position) pairs, a line a rank, for error messages.
    The first of them is marked; the others are pointed at.

    >>> schedule = parse_grid("0F0 0F1 0F2 0B0 0B1 0B2")
    >>> print(format_excerpt(schedule, [(0, 3)], reach=1))
    rank 0   …  0F2  0B0 ← here  0B1  …
    """
    places = list(places)
    positions_of_rank: dict[int, set[int]] = {}
    for rank, position in places:
        positions_of_rank.setdefault(rank, set()).add(position)
    shown = list(positions_of_rank.items())[:most_ranks]
    label = max((len(f"rank {rank}") for rank, _ in shown), default=0)
    lines = []
    for rank, positions in shown:
        row = schedule.actions[rank]
        cells: list[str] = []
        previous = -1
        near = {p + offset for p in positions for offset in range(-reach, reach + 1)}
        for position in sorted(near & set(range(len(row)))):
            if position != previous + 1:
                cells.append("…")
            pointer = " ←" if position in positions else ""
            if (rank, position) == places[0]:
                pointer = f" {mark}"
            cells.append(f"{row[position]}{pointer}")
            previous = position
        if previous < len(row) - 1:
            cells.append("…")
        lines.append(f"{f'rank {rank}'.ljust(label)}   {'  '.join(cells)}")
    if len(positions_of_rank) > len(shown):
        lines.append(f"… and {len(positions_of_rank) - len(shown)} more ranks")
    return "\n".join(lines)


def _headline(schedule: Schedule) -> str:
    return (
        f"# {schedule.name} · {schedule.num_ranks} ranks · {schedule.num_stages} stages · "
        f"{schedule.num_microbatches} microbatches"
    )


def parse_grid(text: str, *, name: str = "custom", topology: Topology | None = None) -> Schedule:
    """Parse the grid with ranks as rows; ``rank N`` may be left out, ``#`` begins a comment.

    >>> print(parse_grid("rank 0  0F0 0F1 0B0 0B1\\nrank 1  1F0 1B0 1F1 1B1", name="mine"))
    # mine · 2 ranks · 2 stages · 2 microbatches
    rank 0   0F0  0F1  0B0  0B1
    rank 1   1F0  1B0  1F1  1B1
    """
    rows: list[list[str]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.partition("#")[0].strip()
        label = re.match(r"rank +([0-9]+):?(?=\s|$)", content)
        if label is not None and int(label[1]) != len(rows):
            raise ParseError(
                f"line {number} is for rank {label[1]} where rank {len(rows)} is expected; "
                "give every rank its line, from rank 0 up"
            )
        if content:
            rows.append(content[label.end() if label else 0 :].split())
    return make_schedule(parse_rows(rows), name=name, topology=topology)


# ── CSV ──────────────────────────────────────────────────────────────────────────────────────────


def parse_rows(rows: Iterable[Iterable[str]], *, source: str = "the text") -> list[list[Action]]:
    """Parse rows of cells; every bad cell is reported, with row and column. Empty cells are
    skipped, and so are empty rows at the end."""
    known: dict[str, Action] = {}
    parsed: list[list[Action]] = []
    problems = []
    for row_number, row in enumerate(rows, start=1):
        actions = []
        for column_number, cell in enumerate(row, start=1):
            cell = cell.strip()
            if not cell:
                continue
            action = known.get(cell)
            if action is None:
                result = _parse(cell)
                if isinstance(result, str):
                    problems.append(
                        f"  row {row_number}, column {column_number}: {_shorten(cell)}: {result}"
                    )
                    continue
                action = known[cell] = result
            actions.append(action)
        parsed.append(actions)
    while parsed and not parsed[-1]:
        parsed.pop()
    if not problems and not parsed:
        problems.append("  there is not a single action in it")
    if problems:
        many = f"{len(problems)} bad cells" if len(problems) > 1 else "a bad cell"
        raise ParseError(f"{source} is not a schedule, {many}:\n" + "\n".join(problems))
    return parsed


def _shorten(cell: str) -> str:
    return repr(cell if len(cell) <= 40 else cell[:40] + "…")


def parse_csv(text: str, *, source: str = "the CSV") -> list[list[Action]]:
    """Parse a CSV: a row a rank, a cell an action.

    >>> parse_csv("0F0,,0B0\\n1F0,1B0\\n")
    [[0F0, 0B0], [1F0, 1B0]]
    """
    try:
        rows = list(csv.reader(io.StringIO(text.removeprefix("\ufeff"), newline=""), strict=True))
    except csv.Error as error:
        raise ParseError(f"{source} is not a CSV file: {error}") from error
    return parse_rows(rows, source=source)


def format_csv(
    rows: Iterable[Iterable[Action]], *, format_action: Callable[[Action], str] = str
) -> str:
    """Write a row a rank, a cell an action, as torch reads it."""
    out = io.StringIO(newline="")
    writer = csv.writer(out)
    for row in rows:
        writer.writerow(map(format_action, row))
    return out.getvalue()
