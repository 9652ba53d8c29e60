"""Pictures laid out as a figure for a page: what SVG and PNG show.

::

    zbv                     4 ranks × 8 microbatches · simulated
    makespan 25.5 · bubble 0.0 % · …
    rank 0  |F0|F1|F2|F3|            compute             idle 6 %
            |> |> |                  messages (thin)
            ▁▂▃▄▄▄▃▂▁                memory              peak 4
    rank 1  ...
            0        10        20                        time
    ■ F forward  ■ I backward of inputs …                legend

Several pictures stand below each other on one time axis.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from pipeloom.errors import ScheduleError
from pipeloom.ir.questions import simple_actions
from pipeloom.ir.timeline import Timeline
from pipeloom.view.density import measure_density
from pipeloom.view.figure_parts import draw_legend, make_areas, number_chunks, outline_steps
from pipeloom.view.links import find_links, find_messages
from pipeloom.view.palette import (
    THEMES,
    Style,
    Theme,
    style_of,
    style_of_cause,
)
from pipeloom.view.picture import Box, Picture, make_pictures, without_details
from pipeloom.view.quantities import (
    find_ticks,
    format_memory,
    format_number,
    format_time,
)
from pipeloom.view.scene import Area, Line, Rect, Scene, Words, measure_text

LEFT, RIGHT, TOP, BOTTOM = 64.0, 104.0, 14.0, 12.0
#: More boxes than this carry no hints.
MOST_HINTS = 2000
#: Narrower boxes, in pixels, are shown as a density.
NARROWEST = 2.0


@dataclass(frozen=True)
class FigureOptions:
    """What a figure shows."""

    width: float = 960.0
    theme: Theme = THEMES["light"]
    #: ``None``: where there is room for it.
    memory: bool | None = None
    communication: bool | None = None
    #: Show idle time by its cause; otherwise it is left blank.
    causes: bool = True
    critical_path: bool = False
    arrows: bool = False


def make_options(
    *,
    width: float = 960.0,
    theme: str = "light",
    memory: bool | None = None,
    communication: bool | None = None,
    causes: bool = True,
    critical_path: bool = False,
    arrows: bool = False,
) -> FigureOptions:
    """Check the options that ``Timeline.save`` passes on."""
    if theme not in THEMES:
        raise ScheduleError(f"no theme is called {theme!r}; known are {', '.join(THEMES)}")
    if not width >= 320:
        raise ScheduleError(f"a figure of width {width} has no room for anything; try 960")
    return FigureOptions(
        float(width), THEMES[theme], memory, communication, causes, critical_path, arrows
    )


def draw_figure(timelines: Iterable[Timeline], options: FigureOptions) -> Scene:
    """Lay timelines out below each other, on one time axis."""
    pictures = make_pictures(timelines)
    if not pictures:
        raise ScheduleError("there is no timeline to draw")
    scene = Scene(
        width=options.width,
        title=", ".join(picture.title for picture in pictures),
        description="; ".join(_describe(picture) for picture in pictures),
        background=options.theme.paper,
    )
    end = max(picture.end for picture in pictures)
    y = TOP
    for picture in pictures:
        y = _Panel(scene, picture, end, options).draw(y) + 10
    y = draw_legend(scene, pictures, theme=options.theme, left=LEFT, causes=options.causes, y=y)
    scene.height = y + BOTTOM
    return scene


def _describe(picture: Picture) -> str:
    schedule = picture.timeline.schedule
    facts = ", ".join(f"{name} {value}" for name, value in picture.facts)
    return (
        f"{picture.title}: {schedule.num_ranks} ranks, "
        f"{schedule.num_microbatches} microbatches, {facts}"
    )


class _Panel:
    """One picture on its way to shapes."""

    def __init__(self, scene: Scene, picture: Picture, end: float, options: FigureOptions) -> None:
        self.scene, self.end, self.options = scene, end, options
        self.theme = options.theme
        ranks = picture.timeline.num_ranks
        few = ranks <= 8
        communication = few if options.communication is None else options.communication
        self.picture = picture if communication else without_details(picture)
        self.memory = (few if options.memory is None else options.memory) and any(
            any(curve.totals) for curve in picture.memory
        )
        self.lane_height = 22.0 if ranks <= 16 else 14.0 if ranks <= 32 else 9.0
        self.gap = 7.0 if few else 3.0
        self.scale = (options.width - LEFT - RIGHT) / end if end > 0 else 0.0
        self.hints = len(picture.boxes) <= MOST_HINTS
        self.chunk_of_stage = number_chunks(picture)
        self.place_of: dict[int, tuple[float, float, float]] = {}

    def draw(self, y: float) -> float:
        y = self._draw_title(y)
        top = y
        background = len(self.scene.shapes)
        for rank in range(self.picture.timeline.num_ranks):
            y = self._draw_rank(rank, y)
        y -= self.gap
        grid, y = self._make_axis(top, y)
        self.scene.shapes[background:background] = grid
        if self.options.arrows:
            self._draw_arrows()
        if self.options.critical_path:
            self._draw_critical_path()
        return y

    def x(self, time: float) -> float:
        return LEFT + time * self.scale

    # ── what stands around the lanes ─────────────────────────────────────────────────────────

    def _draw_title(self, y: float) -> float:
        timeline = self.picture.timeline
        schedule, theme = timeline.schedule, self.theme
        shape = (
            f"{schedule.num_ranks} ranks × {schedule.num_microbatches} microbatches, "
            f"{timeline.source}"
        )
        facts = "  ·  ".join(f"{name} {value}" for name, value in self.picture.facts)
        right = self.options.width - 14
        room = right - LEFT - measure_text(shape, 11) - 16
        title = self.picture.title
        while measure_text(title, 15) > room and len(title) > 8:
            title = title[:-2].rstrip() + "…"
        self.scene.add(
            Words(LEFT, y + 13, title, 15, theme.text, bold=True),
            Words(right, y + 13, shape, 11, theme.muted, "end"),
            Words(LEFT, y + 30, facts, 11, theme.text),
        )
        return y + 42

    def _make_axis(self, top: float, bottom: float) -> tuple[list[Line], float]:
        theme, unit = self.theme, self.picture.timeline.time_unit
        grid = []
        for tick in find_ticks(self.end, int((self.options.width - LEFT - RIGHT) / 70)):
            x = self.x(tick)
            grid.append(Line(((x, top), (x, bottom + 4)), theme.grid, 1.0))
            self.scene.add(Words(x, bottom + 15, format_number(tick), 9, theme.muted, "middle"))
        name = f"time ({unit})" if unit else "time"
        right = self.options.width - RIGHT
        self.scene.add(Words(right + 10, bottom + 15, name, 9, theme.muted))
        return grid, bottom + 20

    # ── lanes ────────────────────────────────────────────────────────────────────────────────

    def _draw_rank(self, rank: int, y: float) -> float:
        theme, figures = self.theme, self.picture.figures
        size = min(11.0, self.lane_height - 1)
        baseline = y + self.lane_height / 2 + 0.36 * size
        right = self.options.width - RIGHT + 10
        if self.lane_height > 10 or rank % 4 == 0:
            self.scene.add(
                Words(LEFT - 8, baseline, f"rank {rank}", size, theme.text, "end"),
                Words(
                    right, baseline, f"idle {100 * figures.bubble_of_rank[rank]:.1f} %",
                    min(10.0, size), theme.muted,
                ),
            )  # fmt: skip
        for index, row in enumerate(self.picture.rows):
            if row.rank != rank:
                continue
            if row.lane == "compute":
                self._draw_lane(index, y, self.lane_height)
                y += self.lane_height
            else:
                # Overlapping messages stand below each other, up to three deep.
                height = 5.0 * min(row.num_tracks, 3)
                self._draw_lane(index, y + 1, height, tracks=min(row.num_tracks, 3))
                y += height + 1
        if self.memory:
            y = self._draw_memory(rank, y + 3)
        return y + self.gap

    def _draw_lane(self, index: int, y: float, height: float, tracks: int = 1) -> None:
        row = self.picture.rows[index]
        boxes = self.picture.boxes_of_row[index]
        compute = row.lane == "compute"
        right = self.x(self.picture.end)
        if compute:
            self.scene.add(Rect(LEFT, y, right - LEFT, height, self.theme.lane))
        lasting = [box.end - box.start for box in boxes if box.end > box.start]
        crowded = len(lasting) * NARROWEST > (right - LEFT) / 2
        if crowded and median(lasting) * self.scale < NARROWEST:
            self._draw_density(index, y, height)
            return
        if compute and self.options.causes:
            # A band half as high as the boxes: work stays in front.
            for idle in self.picture.idle_of_rank[row.rank]:
                style = style_of_cause(idle.cause)
                awaited = f" for {idle.waits_for} of rank {idle.waits_for_rank}"
                self.scene.add(
                    Rect(
                        self.x(idle.start), y + height / 4,
                        (idle.end - idle.start) * self.scale, height / 2,
                        style.colour, style.pattern, style.ink,
                        hint=f"{idle.cause}{awaited if idle.waits_for else ''}",
                    )
                )  # fmt: skip
        for box in boxes:
            track = min(box.track, tracks - 1)
            self._draw_box(box, y + track * height / tracks, height / tracks, named=compute)

    def _draw_box(self, box: Box, y: float, height: float, *, named: bool) -> None:
        left, width = self.x(box.start), (box.end - box.start) * self.scale
        self.place_of[box.span] = (left, y, height)
        # A hair of background between neighbours; what takes no time still leaves a mark.
        drawn = max(width - 0.8, 0.6)
        parts = simple_actions(box.action)
        unit = self.picture.timeline.time_unit
        for number, part in enumerate(parts):
            style = style_of(part)
            x, share = left + drawn * number / len(parts), drawn / len(parts)
            hint = ""
            if self.hints:
                times = f"{format_time(box.start, unit)} to {format_time(box.end, unit)}"
                hint = f"{box.action}: {times}"
            self.scene.add(
                Rect(x, y, share, height, style.colour, style.pattern, style.ink, hint=hint)
            )
            if not named:
                continue
            chunk = self.chunk_of_stage.get(part.stage or 0, 0)
            if chunk and share > 3:
                bar = min(2.0, height / 6)
                for line in range(min(chunk, 3)):
                    at = y + height - bar - 1.7 * bar * line
                    self.scene.add(Rect(x, at, share, bar * 0.8, style.ink))
            size = min(9.5, height - 3)
            number_text = "" if part.microbatch is None else str(part.microbatch)
            letter = part.kind.value if len(part.kind.value) == 1 else style.letter
            for name in (f"{letter}{number_text}", number_text, letter):
                if name and size >= 6 and measure_text(name, size) <= share - 2:
                    at = y + height / 2 + 0.34 * size - (1.0 if chunk else 0.0)
                    self._draw_name(x + share / 2, at, name, size, style)
                    break

    def _draw_name(self, x: float, y: float, name: str, size: float, style: Style) -> None:
        if style.pattern != "plain":
            # The pattern makes way for the name.
            width = measure_text(name, size)
            self.scene.add(Rect(x - width / 2, y - 0.85 * size, width, size, style.colour))
        self.scene.add(Words(x, y, name, size, style.ink, "middle"))

    def _draw_density(self, index: int, y: float, height: float) -> None:
        """Too many boxes to see one: in each column, the height of a colour is its share."""
        left, right = LEFT, self.x(self.picture.end)
        columns = max(1, int((right - left) / NARROWEST))
        density = measure_density(self.picture, index, columns, causes=self.options.causes)
        floors = [y + height] * columns
        step = (right - left) / columns
        for style, shares in density:
            tops = [floor - share * height for floor, share in zip(floors, shares, strict=True)]
            self.scene.add(*make_areas(tops, floors, left, step, style.colour))
            floors = tops

    def _draw_memory(self, rank: int, y: float) -> float:
        height, theme = 16.0, self.theme
        largest = self.picture.largest_memory
        limit = self.picture.memory_limit
        right = self.x(self.picture.end)
        curve = next((c for c in self.picture.memory if c.rank == rank), None)
        if curve is not None and curve.times and largest > 0:
            outline = outline_steps(
                [self.x(time) for time in curve.times],
                [y + height * (1 - total / largest) for total in curve.totals],
                right,
            )
            ends = ((right, y + height), (outline[0][0], y + height))
            self.scene.add(Area((*outline, *ends), theme.memory, 0.35))
            self.scene.add(Line(outline, theme.memory, 1.0))
        self.scene.add(Line(((LEFT, y + height), (right, y + height)), theme.grid, 1.0))
        if limit is not None and largest > 0:
            level = y + height * (1 - limit / largest)
            self.scene.add(Line(((LEFT, level), (right, level)), theme.limit, 1.0, dashed=True))
        peak = self.picture.figures.peaks[rank].total
        unit = self.picture.timeline.memory_unit
        over = limit is not None and peak > limit
        self.scene.add(
            Words(LEFT - 8, y + height - 4, "memory", 9, theme.muted, "end"),
            Words(
                self.options.width - RIGHT + 10, y + height - 4,
                f"peak {format_memory(peak, unit)}", 10, theme.limit if over else theme.muted,
            ),
        )  # fmt: skip
        return y + height

    # ── over the lanes ───────────────────────────────────────────────────────────────────────

    def _draw_arrows(self) -> None:
        timeline = self.picture.timeline
        for source, span in find_messages(timeline, find_links(timeline)):
            if source in self.place_of and span in self.place_of:
                self._connect(source, span, arrow=True, width=0.7, colour=self.theme.arrow)

    def _draw_critical_path(self) -> None:
        path = sorted(self.picture.critical_spans & self.place_of.keys())
        spans = self.picture.timeline.spans
        for index in path:
            x, y, height = self.place_of[index]
            width = max((spans[index].end - spans[index].start) * self.scale - 0.8, 0.6)
            self.scene.add(
                Rect(x, y, width, height, "none", stroke=self.theme.critical, stroke_width=1.6)
            )

    def _connect(self, source: int, target: int, *, arrow: bool, width: float, colour: str) -> None:
        spans = self.picture.timeline.spans
        _, from_y, from_height = self.place_of[source]
        to_x, to_y, to_height = self.place_of[target]
        down = to_y > from_y
        start = (self.x(spans[source].end), from_y + (from_height if down else 0))
        self.scene.add(
            Line((start, (to_x, to_y + (0 if down else to_height))), colour, width, arrow=arrow)
        )
