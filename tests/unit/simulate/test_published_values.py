"""Closed forms, worked values and published tables: what others say of the same orders."""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from pipeloom import UniformCosts, build_schedule, simulate
from pipeloom.ir.schedule import Schedule
from pipeloom.ir.serialization import load_schedule

REFERENCE = Path(__file__).parents[2] / "data" / "reference"
CASES = json.loads((REFERENCE / "cases_4_ranks.json").read_text())
RANKS = (2, 3, 4, 8)


@functools.cache
def build(name: str, ranks: int, microbatches: int, chunks: int | None = None) -> Schedule:
    return build_schedule(name, ranks=ranks, microbatches=microbatches, chunks=chunks)


def case_id(case: dict[str, Any]) -> str:
    return f"{case['schedule']}-m{case['microbatches']}-v{case['chunks']}-{case['cost']}"


FIXED_ORDERS = [case for case in CASES["cases"] if case["schedule"] != "zb_auto"]


@pytest.mark.parametrize("case", FIXED_ORDERS, ids=case_id)
def test_four_ranks(case: dict[str, Any]) -> None:
    chunks = case["chunks"] if case["chunks"] > 1 else None
    schedule = build(case["schedule"], 4, case["microbatches"], chunks)
    for retained, key in ((1.0, "peak_retained_1"), (0.5, "peak_retained_half")):
        costs = UniformCosts(
            **CASES["costs"][case["cost"]],
            retained=retained,
            overlap=case.get("overlap", "sum"),
        )
        timeline = simulate(schedule, costs)
        peak = max(timeline.peak_memory)
        if case["exact"]:
            # The rows with an overlap factor were computed in whole ticks of 0.00025, to which
            # the duration of a pair was rounded.
            tolerance = 5e-6 if "overlap" in case else 1e-9
            assert timeline.makespan == pytest.approx(case["makespan"], rel=tolerance)
            assert timeline.span == pytest.approx(case["span"], rel=tolerance)
            assert peak == pytest.approx(case[key])
        else:
            assert timeline.makespan <= case["makespan"] * (1 + 1e-9)
            assert peak <= case[key] * (1 + 1e-9)


MADE_FOR_COSTS = [case for case in CASES["cases"] if case["schedule"] == "zb_auto"]


@pytest.mark.parametrize("case", MADE_FOR_COSTS, ids=case_id)
def test_four_ranks_made_for_costs(case: dict[str, Any]) -> None:
    costs = UniformCosts(**CASES["costs"][case["cost"]], retained=case["retained"])
    limit = case["memory_limit"]
    schedule = build_schedule(
        "zb_auto", ranks=4, microbatches=case["microbatches"], costs=costs, memory_limit=limit
    )
    timeline = simulate(schedule, costs, memory=limit)
    assert timeline.makespan <= case["makespan"] * (1 + 1e-9)
    assert max(timeline.peak_memory) <= limit * (1 + 1e-9)


# ── golden orders at unit costs: makespan, span, peak ────────────────────────────────────────────

#: Of the table "p4 m8" and of cases_4_ranks.json under unit costs.
GOLDEN = {
    "1F1B_4ranks_8mb_1chunks": (33, 33, 4),
    "1F1B_4ranks_4mb_1chunks": (21, 21, 4),
    "GPipe_4ranks_8mb_1chunks": (33, 33, 8),
    "GPipe_4ranks_4mb_1chunks": (21, 21, 4),
    "ZB_H1_4ranks_8mb_1chunks": (27, 27, 4),
    "ZB_H2_4ranks_8mb_1chunks": (27, 24, 7),
    "ZB_1p_auto_4ranks_8mb_1chunks": (27, 27, 4),
    "ZB_2p_auto_4ranks_8mb_1chunks": (27, 24, 8),
    "ZB_V_hand_4ranks_8mb_2chunks": (25.5, 24, 4),
    "V_Half_4ranks_8mb_2chunks": (26.5, 26.5, 3),
    "V_Min_4ranks_8mb_2chunks": (29.5, 29.5, 2),
    "1F1B_V_4ranks_8mb_2chunks": (31.5, 31.5, 3),
    "GIS_g_p_4ranks_8mb_2chunks": (27, 27, 4),
    "DualPipeV_deepseek_4ranks_8mb_2chunks": (27, 27, 4.5),
    "DualPipe_deepseek_4ranks_8mb_1chunks": (26, 26, 5),
    "Chimera_4ranks_4mb_1chunks": (16, 16, 4),
    "Chimera_4ranks_8mb_1chunks": (30, 30, 4),
}
BIDIRECTIONAL = ("DualPipe_", "Chimera")


def load_golden(name: str) -> Schedule:
    """The files of two directions number the microbatches of each from 0."""
    path = REFERENCE / "orders_by_reference" / f"{name}.csv"
    if not name.startswith(BIDIRECTIONAL):
        return load_schedule(path)
    from pipeloom.ir.topology import Topology

    schedule = load_schedule(path, topology="bidirectional")
    num_parts = schedule.num_stages // 2
    half = schedule.num_microbatches

    def renumber(action: Any) -> Any:
        if action.parts:
            return action._replace(parts=tuple(map(renumber, action.parts)))
        if action.stage < num_parts:
            return action
        return action._replace(microbatch=action.microbatch + half)

    return Schedule(
        placement=schedule.placement,
        topology=Topology.bidirectional(num_parts),
        num_microbatches=2 * half,
        actions=tuple(tuple(map(renumber, row)) for row in schedule.actions),
        name=name,
    )


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_orders(name: str) -> None:
    timeline = simulate(load_golden(name), UniformCosts(1, 1, 1))
    makespan, span, peak = GOLDEN[name]
    assert (timeline.makespan, timeline.span) == (makespan, span)
    assert max(timeline.peak_memory) == peak


# ── closed forms ─────────────────────────────────────────────────────────────────────────────────


def random_costs(seed: object) -> tuple[float, float, float]:
    rng = random.Random(str(seed))
    return rng.uniform(0.5, 3), rng.uniform(0.5, 3), rng.uniform(0.2, 3)


def microbatches_for(ranks: int) -> list[int]:
    return sorted({ranks, ranks + 1, 2 * ranks, 3 * ranks, 4 * ranks})


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager_1f1b"])
def test_bubble_without_chunks(name: str, ranks: int) -> None:
    for m in microbatches_for(ranks):
        F, I, W = random_costs((name, ranks, m))
        timeline = simulate(build(name, ranks, m), UniformCosts(F, I, W))
        assert timeline.makespan == pytest.approx((m + ranks - 1) * (F + I + W))
        if name == "1f1b":
            assert list(timeline.peak_memory) == [min(ranks - r, m) for r in range(ranks)]
        if name == "gpipe":
            assert list(timeline.peak_memory) == [m] * ranks


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize("name", ["interleaved_1f1b", "looped_bfs"])
def test_bubble_with_chunks(name: str, ranks: int, chunks: int) -> None:
    for m in (ranks, 2 * ranks, 4 * ranks):
        F, I, W = random_costs((name, ranks, chunks, m))
        timeline = simulate(build(name, ranks, m, chunks), UniformCosts(F, I, W))
        bubble = (ranks - 1) * (F + I + W) / chunks
        assert timeline.makespan == pytest.approx(m * (F + I + W) + bubble)
        peak = m if name == "looped_bfs" else min(m, ranks + (ranks - 1) / chunks)
        assert max(timeline.peak_memory) == pytest.approx(peak)


@pytest.mark.parametrize("ranks", RANKS)
def test_bubble_of_zb_h1(ranks: int) -> None:
    for m in microbatches_for(ranks):
        F, I, W = random_costs(("zb_h1", ranks, m))
        timeline = simulate(build("zb_h1", ranks, m), UniformCosts(F, I, W))
        bubble = (ranks - 1) * max(F, I, F + I - W)
        assert timeline.makespan == pytest.approx(m * (F + I + W) + bubble)


@pytest.mark.parametrize("ranks", RANKS)
def test_bubbles_of_zb_h2(ranks: int) -> None:
    for m in (2 * ranks - 1, 3 * ranks, 4 * ranks):
        F, I, W = random_costs(("zb_h2", ranks, m))
        timeline = simulate(build("zb_h2", ranks, m), UniformCosts(F, I, W))
        work, p = m * (F + I + W), ranks - 1
        assert timeline.span == pytest.approx(work + p * max(0, F + I - 2 * W, I - F))
        assert timeline.makespan == pytest.approx(work + p * max(F, F + I - 2 * W, I - F))
        assert max(timeline.peak_memory) == 2 * ranks - 1


# ── the published table ──────────────────────────────────────────────────────────────────────────

#: (p, m, F, I, W, c), the chunks that the models' layers allow, the share of the activation that
#: stays until W, and the bubble rates of 1F1B, ZB-H1 = ZB-1p, ZB-H2, ZB-2p, interleaved exact.
SMALL = 32 * 2304 / (34 * 2304 + 5 * 24 * 1024)  # 32h/(34h+5as)
LARGE = 32 * 4096 / (34 * 4096 + 5 * 32 * 1024)
PUBLISHED = [
    ((8, 24, 18.522, 18.086, 9.337, 0.601), 3, SMALL, (0.2431, 0.1585, 0.1083, 0.0433, 0.1090)),
    ((8, 32, 18.513, 18.086, 9.331, 0.626), 3, SMALL, (0.1985, 0.1242, 0.0837, 0.0039, 0.0847)),
    ((8, 64, 18.546, 18.097, 9.321, 0.762), 3, SMALL, (0.1240, 0.0674, 0.0444, 0.0026, 0.0461)),
    ((8, 24, 29.718, 29.444, 19.927, 0.527), 4, LARGE, (0.2347, 0.1323, 0.0698, 0.0029, 0.0827)),
    ((8, 32, 29.802, 29.428, 19.530, 0.577), 4, LARGE, (0.1898, 0.1045, 0.0559, 0.0022, 0.0644)),
    ((8, 64, 29.935, 29.621, 19.388, 0.535), 4, LARGE, (0.1091, 0.0554, 0.0294, 0.0010, 0.0328)),
    ((16, 48, 11.347, 11.248, 8.132, 0.377), 3, LARGE, (0.2552, 0.1397, 0.0672, 0.0066, 0.1136)),
    ((16, 64, 11.307, 11.254, 8.101, 0.379), 3, LARGE, (0.2082, 0.1088, 0.0516, 0.0054, 0.0878)),
    ((16, 128, 11.325, 11.308, 8.109, 0.378), 3, LARGE, (0.1251, 0.0576, 0.0266, 0.0028, 0.0459)),
    ((32, 96, 10.419, 10.207, 7.715, 0.408), 2, LARGE, (0.2646, 0.1421, 0.0641, 0.0038, 0.1528)),
    ((32, 128, 10.408, 10.204, 7.703, 0.408), 2, LARGE, (0.2168, 0.1106, 0.0490, 0.0029, 0.1192)),
    ((32, 256, 10.402, 10.248, 7.698, 0.460), 2, LARGE, (0.1352, 0.0594, 0.0257, 0.0018, 0.0641)),
]


def bubble_rate(schedule: Schedule, costs: UniformCosts) -> float:
    work = schedule.num_microbatches * (costs.forward + costs.input + costs.weight)
    return 1 - work / simulate(schedule, costs).span


def row_id(row: Any) -> str:
    return f"p{row[0][0]}-m{row[0][1]}-F{row[0][2]}"


@pytest.mark.parametrize("row", PUBLISHED, ids=row_id)
def test_published_bubbles(row: Any) -> None:
    (p, m, F, I, W, c), chunks, _, (one_f, h1, h2, _, interleaved) = row
    costs = UniformCosts(F, I, W, latency=c)
    assert round(bubble_rate(build("1f1b", p, m), costs), 4) == one_f
    assert round(bubble_rate(build("zb_h1", p, m), costs), 4) == h1
    assert round(bubble_rate(build("zb_h2", p, m), costs), 4) == h2
    assert round(bubble_rate(build("interleaved_1f1b", p, m, chunks), costs), 4) == interleaved


@pytest.mark.parametrize("row", PUBLISHED, ids=row_id)
def test_published_bubbles_of_schedules_made_for_costs(row: Any) -> None:
    (p, m, F, I, W, c), _, retained, (_, one_p, _, two_p, _) = row
    costs = UniformCosts(F, I, W, latency=c, retained=retained)
    for limit, published in ((p, one_p), (2 * p, two_p)):
        schedule = build_schedule(
            "zb_auto", ranks=p, microbatches=m, costs=costs, memory_limit=limit
        )
        assert bubble_rate(schedule, costs) <= published + 0.00005
        assert max(simulate(schedule, costs).peak_memory) <= limit * (1 + 1e-9)


def test_interleaving_beyond_the_groups_of_ranks() -> None:
    # p4 m8 v2 and a latency: groups of 4 and of 8.
    costs = UniformCosts(1, 1, 1, latency=0.1)
    lengths = {
        group: simulate(
            build_schedule("interleaved_1f1b", ranks=4, microbatches=8, chunks=2, group_size=group),
            costs,
        ).makespan
        for group in (4, 8)
    }
    assert lengths == {4: pytest.approx(29.9), 8: pytest.approx(29.1)}


@pytest.mark.parametrize(
    ("m", "ticks", "limit", "schedules"),
    [
        (8, (20, 30, 10, 2), 4, {"1f1b": 692, "zb_h1": 624}),
        (8, (20, 20, 30, 2), 4, {"1f1b": 802, "zb_h1": 638}),
    ],
)
def test_small_cases_in_ticks(
    m: int, ticks: tuple[int, ...], limit: int, schedules: dict[str, int]
) -> None:
    F, I, W, c = ticks
    for name, makespan in schedules.items():
        timeline = simulate(build(name, 4, m), UniformCosts(F, I, W, latency=c), memory=limit)
        assert timeline.makespan == makespan
        # The optimum found by search under this limit; a bound must not exceed it.
        assert timeline.figures is not None
        assert timeline.figures.lower_bound <= {10: 624, 30: 632}[W]
