"""The library of schedules: shape → Schedule, one family a file.

::

    fill_drain.py               forward_only, gpipe
    one_f_one_b.py              1f1b, eager_1f1b
    interleaved.py              interleaved_1f1b, looped_bfs, grouped_interleaved
    zero_bubble.py              zb_h1, zb_h2
    zb_auto.py                  zb_auto: driven by costs and a memory limit
    interleaved_zero_bubble.py  interleaved_zero_bubble
    zbv.py                      zbv
    v_family.py                 v_half, v_min, 1f1b_v
    hanayo.py                   hanayo
    chimera.py                  chimera
    dualpipe.py                 dualpipe, dualpipev

Every function is pure: the same shape gives the same schedule. :mod:`pipeloom.schedules.registry`
finds them by name.
"""
