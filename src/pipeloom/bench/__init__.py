"""The benchmarks as one run: which there are, on what machine, on one page.

::

    benchmarks/*.py ── each a process of its own ──► what it printed ─┐
    the machine ──────────────────────────────────► facts ───────────┴─► bench.md, bench.json
"""
