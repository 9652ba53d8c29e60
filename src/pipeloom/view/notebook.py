"""What a notebook shows for a Schedule or a Timeline that ends a cell."""

from __future__ import annotations

from html import escape

from pipeloom.ir.schedule import Schedule
from pipeloom.ir.timeline import Timeline
from pipeloom.view.palette import STYLE_OF_KIND, style_of
from pipeloom.view.svg import draw_svg

#: Longer programs are cut off, with a word about how much is missing.
MOST_RANKS = 16
MOST_ACTIONS = 120


def render_timeline(timeline: Timeline) -> str:
    """The compact figure as inline SVG."""
    return f'<div style="overflow-x:auto">{draw_svg(timeline, width=860)}</div>'


def render_schedule(schedule: Schedule) -> str:
    """The order of every rank as a row of coloured names: there are no times in a schedule."""
    rows = "".join(
        _draw_rank(schedule, rank) for rank in range(min(MOST_RANKS, schedule.num_ranks))
    )
    missing = schedule.num_ranks - MOST_RANKS
    more = f"<p>… and {missing} more ranks</p>" if missing > 0 else ""
    kinds = {action.kind for action in schedule.all_actions()}
    legend = " &nbsp; ".join(
        f"{_draw_name(style.letter, style.colour, style.ink)} {escape(style.meaning)}"
        for kind, style in STYLE_OF_KIND.items()
        if kind in kinds
    )
    title = (
        f"<b>{escape(schedule.name)}</b> · {schedule.num_ranks} ranks · "
        f"{schedule.num_stages} stages · {schedule.num_microbatches} microbatches"
    )
    return (
        '<div style="font:12px/1.5 sans-serif"><p style="margin:2px 0">'
        f"{title}</p>"
        '<div style="overflow-x:auto"><table style="border-collapse:collapse;margin:2px 0">'
        f"{rows}</table></div>{more}"
        f'<p style="margin:2px 0">{legend}</p></div>'
    )


def _draw_rank(schedule: Schedule, rank: int) -> str:
    actions = schedule.actions[rank]
    cells = []
    for action in actions[:MOST_ACTIONS]:
        style = style_of(action)
        cells.append(_draw_name(str(action), style.colour, style.ink))
    if len(actions) > MOST_ACTIONS:
        cells.append(f"… {len(actions) - MOST_ACTIONS} more")
    return (
        '<tr><th scope="row" style="text-align:right;padding:1px 8px 1px 0;white-space:nowrap">'
        f'rank {rank}</th><td style="text-align:left;white-space:nowrap;padding:1px 0">'
        f"{''.join(cells)}</td></tr>"
    )


def _draw_name(name: str, colour: str, ink: str) -> str:
    return (
        f'<span style="background:{colour};color:{ink};padding:0 3px;margin-right:1px;'
        f'font-family:monospace;font-size:11px">{escape(name)}</span>'
    )
