"""Run a program where every send and receive holds its rank until the two meet.

Written from the words of the schedule language alone: it reads texts with a regular expression and
knows nothing of the package, so that it can judge what the passes make.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise

_MESSAGE = re.compile(r"(\d+)(SEND|RECV)_([FB])(\d+)(?:[<>](\d+))?")


def find_stuck(rows: Iterable[Iterable[str]], stage_edges: set[tuple[int, int]]) -> list[str]:
    """Where the ranks stand when nothing can go on any more; empty if all got to their ends.

    ``stage_edges`` are the edges of the stage graph, (from, to).
    """
    programs = [list(row) for row in rows]
    at = [0] * len(programs)
    while True:
        heads: dict[tuple[str, int, int, str], dict[str, int]] = {}
        moved = False
        for rank, program in enumerate(programs):
            while at[rank] < len(program):
                match = _MESSAGE.fullmatch(program[at[rank]])
                if match is None:
                    at[rank] += 1
                    moved = True
                    continue
                key = _message(match, stage_edges)
                heads.setdefault(key, {})[match[2]] = rank
                break
        for ranks in heads.values():
            if len(ranks) == 2:
                moved = True
                for rank in ranks.values():
                    at[rank] += 1
        if not moved:
            return [p[i] for p, i in zip(programs, at, strict=True) if i < len(p)]


def _message(match: re.Match[str], stage_edges: set[tuple[int, int]]) -> tuple[str, int, int, str]:
    """(F or B, sending stage, receiving stage, microbatch)."""
    stage, way, what, microbatch, peer = match.groups()
    here = int(stage)
    ahead = (what == "F") == (way == "SEND")
    if peer is not None:
        other = int(peer)
    else:
        others = (
            {b for a, b in stage_edges if a == here}
            if ahead
            else {a for a, b in stage_edges if b == here}
        )
        (other,) = others
    return (what, here, other, microbatch) if way == "SEND" else (what, other, here, microbatch)


def edges_of(topology: object) -> set[tuple[int, int]]:
    """The edges of a topology, from its chains and skip connections."""
    edges = set(topology.extra_edges)  # type: ignore[attr-defined]
    for chain in topology.chains:  # type: ignore[attr-defined]
        edges |= set(pairwise(chain))
    return edges
