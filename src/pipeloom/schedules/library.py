"""The schedules that come with pipeloom, in the order in which they are listed."""

from __future__ import annotations

from pipeloom.schedules.chimera import chimera
from pipeloom.schedules.dualpipe import dualpipe, dualpipev
from pipeloom.schedules.entry import ScheduleEntry
from pipeloom.schedules.fill_drain import forward_only, gpipe
from pipeloom.schedules.hanayo import hanayo
from pipeloom.schedules.interleaved import grouped_interleaved, interleaved_1f1b, looped_bfs
from pipeloom.schedules.interleaved_zero_bubble import interleaved_zero_bubble
from pipeloom.schedules.one_f_one_b import eager_1f1b, one_f_one_b
from pipeloom.schedules.v_family import one_f_one_b_v, v_half, v_min
from pipeloom.schedules.zb_auto import zb_auto
from pipeloom.schedules.zbv import zbv
from pipeloom.schedules.zero_bubble import zb_h1, zb_h2

BUILT_IN: tuple[ScheduleEntry, ...] = tuple(
    function.entry
    for function in (
        forward_only,
        gpipe,
        one_f_one_b,
        eager_1f1b,
        interleaved_1f1b,
        looped_bfs,
        interleaved_zero_bubble,
        zb_h1,
        zb_h2,
        zb_auto,
        zbv,
        v_half,
        v_min,
        grouped_interleaved,
        one_f_one_b_v,
        hanayo,
        chimera,
        dualpipe,
        dualpipev,
    )
)
