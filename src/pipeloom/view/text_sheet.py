"""One picture as lines of styled characters: windows with names, or a density view.

::

    rank 0 │F0│F1│░░░░░░░░│B0   │   33% idle   peak 2     a line: margin, room, note
    ──┬─── ────────┬────────────  ───────┬────────
    margin         room                  note
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor
from statistics import median

from pipeloom.ir.action import Action
from pipeloom.ir.questions import simple_actions
from pipeloom.view.palette import STYLE_OF_CAUSE, style_of, style_of_cause
from pipeloom.view.picture import Box, Picture
from pipeloom.view.quantities import (
    find_ticks,
    format_memory,
    format_number,
    format_share,
    format_time,
)

#: Longer pictures are shown as a density view.
MOST_WINDOWS = 4
MOST_LINES = 72
#: Of a density view: more ranks than this share lines.
MOST_RANKS = 64
NARROWEST = 40
#: Columns for the lanes, below which what stands beside them moves away.
LEAST_ROOM = 24
MOST_CAUSES = 3

UNICODE_IDLE = {"warm-up": "·", "waiting": "░", "communication": "≈", "drain": "_", "overhead": "+"}


@dataclass(frozen=True)
class Pen:
    """The characters that boxes and idle time are made of."""

    unicode: bool

    @property
    def edge(self) -> str:
        return "│" if self.unicode else "|"

    @property
    def times(self) -> str:
        return "×" if self.unicode else "x"

    @property
    def dot(self) -> str:
        return " · " if self.unicode else " | "

    def idle(self, cause: str) -> str:
        letter = style_of_cause(cause).letter
        return UNICODE_IDLE.get(cause, letter) if self.unicode else letter


#: Characters, each with the name of its style ("" for none).
Cell = tuple[str, str]
Line = list[Cell]


class Sheet:
    """One picture on its way to lines of characters."""

    def __init__(
        self, picture: Picture, width: int, end: float, pen: Pen, communication: bool
    ) -> None:
        self.picture, self.width, self.end, self.pen = picture, width, end, pen
        self.rows = [
            index
            for index, row in enumerate(picture.rows)
            if communication or row.lane == "compute"
        ]
        ranks = picture.timeline.num_ranks
        self.ranks_per_line = 1 if communication else ceil(ranks / MOST_RANKS)
        placement = picture.timeline.schedule.placement.ranks
        self.says_stage = len(set(placement)) < len(placement)
        self.margin = max((len(self._name_row(index)) for index in self.rows), default=0) + 1
        self.notes = [self._note_row(index) for index in self.rows]
        self.windows = self._choose_windows()

    def _choose_windows(self) -> list[tuple[float, float]] | None:
        """Where to cut; notes stand on lines of their own where the picture is shorter so."""
        notes = self.notes
        self.notes = [""] * len(self.rows)
        self.notes_apart = True
        self.room = self.width - self.margin
        apart = self._find_windows()
        room = self.room - max(map(len, notes), default=0)
        if room < LEAST_ROOM:
            return apart
        self.notes = notes
        self.notes_apart = False
        self.room = room
        beside = self._find_windows()
        if apart is not None and (beside is None or len(apart) < len(beside)):
            self.notes = [""] * len(self.rows)
            self.notes_apart = True
            self.room = self.width - self.margin
            return self._find_windows()
        return beside

    def draw(self) -> list[Line]:
        lines: list[Line] = self._draw_title()
        windows = self.windows
        if not self.picture.boxes:
            lines.append([("nothing ran", "muted")])
        elif windows is None:
            lines += self._draw_density()
        else:
            for number, (start, stop) in enumerate(windows, 1):
                if len(windows) > 1:
                    lines.append([(self._name_window(number, len(windows), start, stop), "muted")])
                lines += self._draw_window(start, stop)
        if self.notes_apart:
            lines += self._draw_notes()
        return [*lines, *self._draw_causes(), *self._draw_legend()]

    # ── how much fits ────────────────────────────────────────────────────────────────────────

    def _find_windows(self) -> list[tuple[float, float]] | None:
        """From when to when each part shows, so that names fit; ``None`` if too many parts.

        Where durations are multiples of one of them, so are the widths of their boxes.
        """
        boxes = [box for row in self.rows for box in self.picture.boxes_of_row[row]]
        lasting = [box for box in boxes if box.end > box.start]
        if not lasting or self.ranks_per_line > 1:
            return None
        typical = median(box.end - box.start for box in lasting)
        named = [box for box in lasting if box.end - box.start > typical / 4]
        unit = min(box.end - box.start for box in named)
        narrowest = ceil(
            max(
                self._need_columns(box.action) * unit / (box.end - box.start) - 1e-9
                for box in named
            )
        )
        units = ceil(self.end / unit - 1e-6)
        fitting = self.room // narrowest
        if fitting < 1:
            return None
        count = ceil(units / fitting)
        if count > MOST_WINDOWS or count * (len(self.rows) + 2) > max(MOST_LINES, len(self.rows)):
            return None
        length = ceil(units / count) * unit
        columns = floor(self.room / ceil(units / count))
        self.scale = columns / unit
        self.used = columns * ceil(units / count)
        return [(part * length, min((part + 1) * length, self.end)) for part in range(count)]

    def _need_columns(self, action: Action) -> int:
        return sum(len(self._name_part(part)) + 1 for part in simple_actions(action))

    def _name_part(self, action: Action) -> str:
        """The shortest name that says all: without the stage where a rank has only one."""
        return str(action) if self.says_stage else str(action).removeprefix(str(action.stage))

    def _name_row(self, index: int) -> str:
        row = self.picture.rows[index]
        if row.lane != "compute":
            return f"  {row.lane}"
        last = min(row.rank + self.ranks_per_line, self.picture.timeline.num_ranks) - 1
        return f"rank {row.rank}" if last == row.rank else f"rank {row.rank}-{last}"

    def _note_row(self, index: int) -> str:
        """What stands at the right end of a rank's line."""
        row = self.picture.rows[index]
        if row.lane != "compute" or self.ranks_per_line > 1:
            return ""
        figures, timeline = self.picture.figures, self.picture.timeline
        note = f" {100 * figures.bubble_of_rank[row.rank]:3.0f}% idle"
        peaks = figures.peaks
        if any(peak.total for peak in peaks):
            amounts = [format_memory(peak.total, timeline.memory_unit) for peak in peaks]
            note += f"  peak {amounts[row.rank]:>{max(map(len, amounts))}}"
        return note

    def _name_window(self, number: int, windows: int, start: float, stop: float) -> str:
        unit = self.picture.timeline.time_unit
        return (
            f"part {number} of {windows}: {format_time(start, unit)} to {format_time(stop, unit)}"
        )

    # ── lines ────────────────────────────────────────────────────────────────────────────────

    def _draw_title(self) -> list[Line]:
        picture, pen = self.picture, self.pen
        schedule = picture.timeline.schedule
        shape = f"{schedule.num_ranks} ranks {pen.times} {schedule.num_microbatches} microbatches"
        facts = pen.dot.join(f"{name} {value}" for name, value in picture.facts)
        about = f"{pen.dot}{shape}{pen.dot}{picture.timeline.source}"
        return [
            _fit([(picture.title, "title"), (about, "")], self.width),
            _fit([(facts, "")], self.width),
        ]

    def _draw_window(self, start: float, stop: float) -> list[Line]:
        lines = [self._draw_axis(start, self.used / self.scale, self.used)]
        last = stop >= self.end
        for index, note in zip(self.rows, self.notes, strict=True):
            cells: list[Cell] = [(" ", "")] * self.used
            row = self.picture.rows[index]

            def columns(begin: float, end: float) -> tuple[int, int]:
                left = round((begin - start) * self.scale)
                right = round((min(end, stop) - start) * self.scale)
                return max(0, left), min(self.used, right)

            if row.lane == "compute":
                for idle in self.picture.idle_of_rank[row.rank]:
                    left, right = columns(idle.start, idle.end)
                    glyph = (self.pen.idle(idle.cause), idle.cause)
                    cells[left:right] = [glyph] * (right - left)
            for box in self.picture.boxes_of_row[index]:
                left, right = columns(box.start, box.end)
                if left < right:
                    cells[left:right] = self._draw_box(box, right - left, cut=box.start < start)
            line: Line = [(self._name_row(index).ljust(self.margin), "muted"), *cells]
            lines.append([*line, (note, "muted")] if last and note else line)
        return lines

    def _draw_box(self, box: Box, width: int, *, cut: bool) -> list[Cell]:
        if width == 1:
            return [(style_of(box.action).letter, style_of(box.action).name)]
        # A fused action is drawn as its parts, side by side, without an edge between them.
        parts = simple_actions(box.action)
        cells: list[Cell] = []
        for number, part in enumerate(parts):
            share = width * (number + 1) // len(parts) - len(cells)
            edge = self.pen.edge if number == 0 and not cut else " "
            name = self._name_part(part)
            if len(name) >= share:
                name = style_of(part).letter
            text = (edge + name).ljust(share)[:share]
            cells += [(character, style_of(part).name) for character in text]
        return cells

    def _draw_density(self) -> list[Line]:
        lines = [self._draw_axis(0.0, self.end, self.room)]
        for first in range(0, len(self.rows), self.ranks_per_line):
            group = self.rows[first : first + self.ranks_per_line]
            shares: list[dict[Cell, float]] = [{} for _ in range(self.room)]
            for index in group:
                self._add_density(index, shares)
            cells = _spread(shares)
            name = self._name_row(group[0]).ljust(self.margin)
            lines.append([(name, "muted"), *cells, (self.notes[first], "muted")])
        column = format_time(self.end / self.room, self.picture.timeline.time_unit)
        about = f"density view: a column is {column}; characters stand in proportion to time"
        lines.append(_fit([(about, "muted")], self.width))
        return lines

    def _add_density(self, index: int, shares: list[dict[Cell, float]]) -> None:
        scale = self.room / self.end
        row = self.picture.rows[index]
        pieces: list[tuple[Cell, float, float]] = []
        for box in self.picture.boxes_of_row[index]:
            style = style_of(box.action)
            pieces.append(((style.letter, style.name), box.start, box.end))
        if row.lane == "compute":
            pieces += [
                ((self.pen.idle(idle.cause), idle.cause), idle.start, idle.end)
                for idle in self.picture.idle_of_rank[row.rank]
            ]
        for cell, start, end in pieces:
            for column in range(int(start * scale), min(self.room, ceil(end * scale))):
                covered = min(end * scale, column + 1) - max(start * scale, column)
                if covered > 0:
                    shares[column][cell] = shares[column].get(cell, 0.0) + covered

    def _draw_axis(self, start: float, length: float, columns: int) -> Line:
        axis = [" "] * columns
        for tick in find_ticks(self.end, max(2, round(columns / 12 * self.end / length))):
            name = format_number(tick)
            at = round((tick - start) / length * columns)
            if at >= 0 and at + len(name) <= columns and set(axis[max(0, at - 1) : at]) <= {" "}:
                axis[at : at + len(name)] = name
        return [(" " * self.margin + "".join(axis), "muted")]

    def _draw_notes(self) -> list[Line]:
        """What does not fit at the end of the lines."""
        figures, unit = self.picture.figures, self.picture.timeline.memory_unit
        idle = " ".join(f"{100 * share:.0f}%" for share in figures.bubble_of_rank)
        lines: list[Line] = [[("  idle by rank  ", "muted"), (idle, "")]]
        if any(peak.total for peak in figures.peaks):
            amounts = ", ".join(format_memory(peak.total, unit) for peak in figures.peaks)
            lines.append([("  peak by rank  ", "muted"), (amounts, "")])
        return [_fit(line, self.width) for line in lines]

    def _draw_causes(self) -> list[Line]:
        timeline = self.picture.timeline
        causes = self.picture.rank_causes()
        lines: list[Line] = []
        for cause in causes[:MOST_CAUSES]:
            awaited = f" for {cause.waits_for}" if cause.waits_for else ""
            lines.append(
                _fit(
                    [
                        ("  idle  " if not lines else "        ", "muted"),
                        (self.pen.idle(cause.cause) * 2, cause.cause),
                        (f" {cause.cause}{awaited}: ", ""),
                        (format_time(cause.time, timeline.time_unit), ""),
                        (f" ({format_share(cause.share)})", "muted"),
                    ],
                    self.width,
                )
            )
        if len(causes) > MOST_CAUSES:
            rest = sum(cause.time for cause in causes[MOST_CAUSES:])
            text = f"           {len(causes) - MOST_CAUSES} more: "
            lines.append([(text + format_time(rest, timeline.time_unit), "muted")])
        return lines

    def _draw_legend(self) -> list[Line]:
        drawn = {
            style_of(part).name
            for row in self.rows
            for box in self.picture.boxes_of_row[row]
            for part in (box.action, *simple_actions(box.action))
        }
        lines: list[Line] = [[]]
        used = 0
        for style in self.picture.legend:
            if style.name in STYLE_OF_CAUSE:
                sign = self.pen.idle(style.name)
                meaning = style.name
            elif style.name in drawn:
                sign, meaning = style.letter, style.meaning
            else:
                continue
            length = len(meaning) + 6
            if used + length > self.width - 7:
                lines.append([])
                used = 0
            lines[-1] += [(f" {sign} ", style.name), (f" {meaning}  ", "")]
            used += length
        heads = ["  key  ", *["       "] * (len(lines) - 1)]
        return [[(head, "muted"), *line] for head, line in zip(heads, lines, strict=True)]


def _spread(shares: list[dict[Cell, float]]) -> list[Cell]:
    """One character per column, so that over a few columns each is there as much as its share.

    What a column could not show is carried over to the next, as a printer carries grey.
    """
    owed: dict[Cell, float] = {}
    cells: list[Cell] = []
    for share in shares:
        for cell, part in share.items():
            owed[cell] = owed.get(cell, 0.0) + part
        # Of equals always the same; and nothing is drawn where it is not.
        there = sorted(cell for cell, part in share.items() if part > 0)
        if not there:
            cells.append((" ", ""))
            continue
        chosen = max(there, key=lambda cell: round(owed[cell], 9))
        owed[chosen] -= sum(share.values())
        cells.append(chosen)
    return cells


def _fit(line: Line, width: int) -> Line:
    """Cut a line that is too long, visibly."""
    total = sum(len(text) for text, _ in line)
    if total <= width:
        return line
    kept: Line = []
    room = width - 3
    for text, style in line:
        if room <= 0:
            break
        kept.append((text[:room], style))
        room -= len(text)
    return [*kept, ("...", "")]
