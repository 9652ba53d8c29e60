"""Lengths and peaks: closed forms, the table of worked cases, the published table.

The judge is the small simulator under ``tests/support``, which shares nothing with the product;
where the product's own simulator is asked too, both must say the same.
"""

from __future__ import annotations

import json
import random
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from pipeloom.errors import ScheduleError
from pipeloom.schedules.registry import build_schedule
from tests.support.tiny_simulator import TinyCosts, simulate_tiny

REFERENCE = Path(__file__).parents[2] / "data" / "reference"
CASES = json.loads((REFERENCE / "cases_4_ranks.json").read_text())
NAMES = sorted({case["schedule"] for case in CASES["cases"]})
TINY = 1e-6


def draw_costs(rng: random.Random) -> TinyCosts:
    return TinyCosts(forward=rng.uniform(1, 3), input=rng.uniform(1, 3), weight=rng.uniform(0.5, 3))


def bubble_1f1b(p: int, c: TinyCosts) -> float:
    return (p - 1) * (c.forward + c.input + c.weight)


def bubble_zb(p: int, c: TinyCosts) -> float:
    return (p - 1) * max(c.forward, c.input, c.forward + c.input - c.weight)


#: name → (bubble, peak on any rank or None) as functions of ranks, microbatches, chunks and costs.
CLOSED_FORMS: dict[str, Any] = {
    "gpipe": (lambda p, m, v, c: bubble_1f1b(p, c), lambda p, m, v: m),
    "1f1b": (lambda p, m, v, c: bubble_1f1b(p, c), lambda p, m, v: min(p, m)),
    "interleaved_1f1b": (
        lambda p, m, v, c: bubble_1f1b(p, c) / v,
        lambda p, m, v: min(m, p + Fraction(p - 1, v)),
    ),
    "looped_bfs": (lambda p, m, v, c: bubble_1f1b(p, c) / v, lambda p, m, v: m),
    "zb_h1": (lambda p, m, v, c: bubble_zb(p, c), lambda p, m, v: min(p, m)),
    "grouped_interleaved": (
        lambda p, m, v, c: (p - 1) * (c.forward + c.input) / v,
        lambda p, m, v: p,
    ),
    "interleaved_zero_bubble": (lambda p, m, v, c: bubble_zb(p, c) / v, lambda p, m, v: min(p, m)),
}


@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_closed_forms_under_random_costs(name: str) -> None:
    bubble, peak = CLOSED_FORMS[name]
    looped = name in ("interleaved_1f1b", "looped_bfs", "grouped_interleaved") or "_zero" in name
    rng = random.Random(name)
    for p in (2, 3, 4, 8):
        for m in range(p, 4 * p + 1, p if looped else max(1, p // 2)):
            for v in (1, 2, 4) if looped else (1,):
                schedule = build_schedule(
                    name, ranks=p, microbatches=m, chunks=v if looped else None
                )
                costs = draw_costs(rng)
                result = simulate_tiny(schedule, costs)
                work = m * (costs.forward + costs.input + costs.weight)
                expected = work + bubble(p, m, v, costs)
                if name == "interleaved_zero_bubble" and v > 1:
                    # Stated for equal passes; otherwise W's may come too late.
                    result = simulate_tiny(schedule)
                    expected = 3 * m + bubble(p, m, v, TinyCosts())
                assert result.makespan == pytest.approx(expected), (p, m, v, costs)
                assert result.peak == pytest.approx(float(peak(p, m, v))), (p, m, v)


def test_zb_h2_under_random_costs() -> None:
    rng = random.Random(2)
    for p in (2, 3, 4, 8):
        for m in range(2 * p - 1, 4 * p + 1):
            c = draw_costs(rng)
            result = simulate_tiny(build_schedule("zb_h2", ranks=p, microbatches=m), c)
            work = m * (c.forward + c.input + c.weight)
            wait = max(c.forward + c.input - 2 * c.weight, c.input - c.forward)
            assert result.makespan == pytest.approx(work + (p - 1) * max(c.forward, wait))
            assert result.span == pytest.approx(work + (p - 1) * max(0, wait))
            assert result.peaks == pytest.approx([2 * p - 1] * p)


def test_1f1b_peak_of_every_rank() -> None:
    for p, m in ((4, 8), (4, 2), (8, 8)):
        result = simulate_tiny(build_schedule("1f1b", ranks=p, microbatches=m))
        assert result.peaks == tuple(min(p - rank, m) for rank in range(p))


@pytest.mark.parametrize("p", [2, 3, 4, 8, 16])
def test_schedules_that_leave_no_rank_idle(p: int) -> None:
    m = 2 * p + 1
    zbv = simulate_tiny(build_schedule("zbv", ranks=p, microbatches=m))
    assert zbv.span == 3 * m
    assert zbv.makespan == 3 * m + (p - 1) / 2
    assert set(zbv.peaks) == {p}
    dualpipev = simulate_tiny(build_schedule("dualpipev", ranks=p, microbatches=m))
    assert dualpipev.makespan == pytest.approx(3 * m + (p - 1))
    assert dualpipev.peak == p + 0.5


@pytest.mark.parametrize("p", [2, 4, 8])
def test_bidirectional_figures(p: int) -> None:
    for m in (2 * p, 4 * p):
        dualpipe = simulate_tiny(build_schedule("dualpipe", ranks=p, microbatches=m))
        assert dualpipe.makespan == pytest.approx(3 * m + (p / 2 - 1) * 2)
        assert dualpipe.peak == p + 1
        even = TinyCosts(forward=1, input=0.5, weight=0.5)
        chimera = simulate_tiny(build_schedule("chimera", ranks=p, microbatches=m), even)
        assert chimera.makespan == pytest.approx(2 * m + p - 2)
        assert p / 2 + 1 <= chimera.peak <= p


@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 14])
def test_v_half_and_v_min_attain_their_bound(p: int) -> None:
    for name, chunks in (("v_half", 2 * ((p + 2) // 2)), ("v_min", 2 * ((p + 4) // 3))):
        for m in {p, p + 1, 2 * p, 2 * p + 3}:
            result = simulate_tiny(build_schedule(name, ranks=p, microbatches=m))
            # The last rank begins p−1 chunk-passes late and has 6m of them.
            bound = max(6 * m + 6 * p - 3 * chunks - 1, 6 * m + p - 1)
            assert 2 * result.makespan == bound, (name, m)
            assert 2 * result.peak <= chunks


@pytest.mark.parametrize(
    ("p", "bubble", "peak"),
    [
        (4, 7.5, 3),
        (7, 15, 5),
        pytest.param(
            *(8, 16.5, 6),
            marks=pytest.mark.xfail(reason="17: half a forward longer than the best that is known"),
        ),
        (8, 17, 6),
        (16, 37.5, 11),
    ],
)
def test_1f1b_v_figures(p: int, bubble: float, peak: float) -> None:
    for m in (p, 2 * p, 3 * p + 1):
        result = simulate_tiny(build_schedule("1f1b_v", ranks=p, microbatches=m))
        assert result.makespan <= 3 * m + bubble
        assert result.peak <= peak


@pytest.mark.parametrize(("waves", "makespan"), [(1, 18.0), (2, 15.25), (4, 13.625)])
def test_hanayo_worked_values(waves: int, makespan: float) -> None:
    schedule = build_schedule("hanayo", ranks=4, microbatches=4, waves=waves)
    result = simulate_tiny(schedule)
    assert result.makespan <= makespan
    assert result.peak <= 4
    assert schedule == build_schedule("hanayo", ranks=4, microbatches=4, chunks=2 * waves)


def test_eager_1f1b_is_never_worse_and_hides_latency() -> None:
    for p in (2, 3, 4, 8):
        for m in (1, p - 1, p, 2 * p, 4 * p + 1):
            for latency in (0, 0.1, 0.5, 1, 3):
                costs = TinyCosts(latency=latency)
                eager, plain = (
                    simulate_tiny(build_schedule(name, ranks=p, microbatches=m), costs)
                    for name in ("eager_1f1b", "1f1b")
                )
                assert eager.makespan <= plain.makespan + TINY
                if m >= 2 * p and latency == 0.5:
                    assert eager.makespan < plain.makespan - TINY
                assert eager.peaks == tuple(min(2 * (p - rank) - 1, m) for rank in range(p))


def test_a_larger_group_hides_latency() -> None:
    costs = TinyCosts(latency=0.1)
    lengths = [
        simulate_tiny(
            build_schedule("interleaved_1f1b", ranks=4, microbatches=8, group_size=size), costs
        ).makespan
        for size in (4, 8)
    ]
    assert lengths == pytest.approx([29.9, 29.1])


@pytest.mark.parametrize("name", NAMES)
def test_worked_cases_of_4_ranks(name: str) -> None:
    """Exact rows exactly; heuristic rows: no longer, within the same memory."""
    for case in CASES["cases"]:
        if case["schedule"] != name:
            continue
        given = CASES["costs"][case["cost"]]
        options = {}
        if name == "zb_auto":
            options = {
                "costs": {**given, "retained": case["retained"]},
                "memory_limit": case["memory_limit"],
            }
        schedule = build_schedule(
            name, ranks=4, microbatches=case["microbatches"], chunks=case["chunks"], **options
        )
        costs = TinyCosts(**given, overlap=case.get("overlap", 1))
        whole, half = (simulate_tiny(schedule, costs, retained=share) for share in (1, 0.5))
        if case["exact"]:
            # The table keeps times in steps of 0.0005 and rounds every overlapped pair to one.
            slack = 0.0005 * 2 * case["microbatches"] if "overlap" in case else TINY
            assert whole.makespan == pytest.approx(case["makespan"], abs=slack), case
            assert whole.span == pytest.approx(case["span"], abs=slack), case
            assert (whole.peak, half.peak) == pytest.approx(
                (case["peak_retained_1"], case["peak_retained_half"])
            ), case
            continue
        assert whole.makespan <= case["makespan"] + TINY, case
        assert whole.span <= case["span"] + TINY, case
        if name == "zb_auto":
            assert (whole if case["retained"] == 1 else half).peak <= case["memory_limit"] + TINY
        else:
            assert whole.peak <= case["peak_retained_1"] + TINY, case
            assert half.peak <= case["peak_retained_half"] + TINY, case


#: p, m, F, I, W, c, then the bubbles of 1F1B, ZB-1p, ZB-H2, ZB-2p and interleaved 1F1B; and the
#: share of an activation that stays from I until W in models of that size.
PUBLISHED = """
8 24 18.522 18.086 9.337 .601 .2431 .1585 .1083 .0433 .1090 .37
8 32 18.513 18.086 9.331 .626 .1985 .1242 .0837 .0039 .0847 .37
8 64 18.546 18.097 9.321 .762 .1240 .0674 .0444 .0026 .0461 .37
8 24 29.718 29.444 19.927 .527 .2347 .1323 .0698 .0029 .0827 .43
8 32 29.802 29.428 19.530 .577 .1898 .1045 .0559 .0022 .0644 .43
8 64 29.935 29.621 19.388 .535 .1091 .0554 .0294 .0010 .0328 .43
16 48 11.347 11.248 8.132 .377 .2552 .1397 .0672 .0066 .1136 .43
16 64 11.307 11.254 8.101 .379 .2082 .1088 .0516 .0054 .0878 .43
16 128 11.325 11.308 8.109 .378 .1251 .0576 .0266 .0028 .0459 .43
32 96 10.419 10.207 7.715 .408 .2646 .1421 .0641 .0038 .1528 .49
32 128 10.408 10.204 7.703 .408 .2168 .1106 .0490 .0029 .1192 .49
32 256 10.402 10.248 7.698 .460 .1352 .0594 .0257 .0018 .0641 .49
"""
ROWS = [tuple(map(float, line.split())) for line in PUBLISHED.strip().splitlines()]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"p{row[0]:g}-m{row[1]:g}-F{row[2]:g}")
def test_published_table(row: tuple[float, ...]) -> None:
    p, m, F, I, W, c = int(row[0]), int(row[1]), *row[2:6]
    one_f_one_b, zb_1p, zb_h2, zb_2p, interleaved, retained = row[6:]
    costs = TinyCosts(forward=F, input=I, weight=W, latency=c)

    def bubble(name: str, **options: Any) -> float:
        schedule = build_schedule(name, ranks=p, microbatches=m, **options)
        return 1 - m * (F + I + W) / simulate_tiny(schedule, costs).span

    assert round(bubble("1f1b"), 4) == one_f_one_b
    assert round(bubble("zb_h1"), 4) == zb_1p
    assert round(bubble("zb_h2"), 4) == zb_h2
    # As many chunks as the models had layers for.
    chunks = {8: 3 if F < 20 else 4, 16: 3, 32: 2}[p]
    assert round(bubble("interleaved_1f1b", chunks=chunks), 4) == interleaved
    given = {"forward": F, "input": I, "weight": W, "latency": c, "retained": retained}
    for limit, published in ((p, zb_1p), (2 * p, zb_2p)):
        assert bubble("zb_auto", costs=given, memory_limit=limit) <= published + 0.00005


@pytest.mark.parametrize(
    ("F", "I", "W", "optimum"), [(20, 30, 10, 624), (20, 20, 30, 632)], ids=["W<I", "W>I"]
)
def test_zb_auto_attains_small_optima(F: int, I: int, W: int, optimum: int) -> None:
    given = {"forward": F, "input": I, "weight": W, "latency": 2}
    schedule = build_schedule("zb_auto", ranks=4, microbatches=8, costs=given, memory_limit=4)
    result = simulate_tiny(schedule, TinyCosts(forward=F, input=I, weight=W, latency=2))
    assert result.makespan == optimum
    assert result.peak <= 4


def test_zb_auto_is_no_worse_than_the_handmade_ones() -> None:
    rng = random.Random(5)
    for _ in range(12):
        p, m = rng.randint(2, 6), rng.randint(1, 16)
        costs = TinyCosts(
            forward=rng.uniform(1, 3),
            input=rng.uniform(1, 3),
            weight=rng.uniform(0.3, 3),
            latency=rng.choice((0, 0.2, 1)),
        )
        given = {name: getattr(costs, name) for name in ("forward", "input", "weight", "latency")}
        for name, limit in (("zb_h1", p), ("zb_h2", 2 * p - 1)):
            try:
                handmade = build_schedule(name, ranks=p, microbatches=m)
            except ScheduleError:
                continue
            made = build_schedule(
                "zb_auto", ranks=p, microbatches=m, costs=given, memory_limit=limit
            )
            ours, theirs = simulate_tiny(made, costs), simulate_tiny(handmade, costs)
            assert ours.peak <= limit + TINY
            assert ours.makespan <= theirs.makespan + TINY, (p, m, costs, name)
