"""The simulator against one that is slow and obvious, on thousands of random programs."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter

import pytest

from pipeloom import Link, Network, StageCosts, VerificationError, simulate
from pipeloom.ir.action import Action
from pipeloom.ir.schedule import Schedule
from pipeloom.ir.timeline import Timeline
from support.random_programs import make_program
from support.time_stepped_simulator import Result, World, run

CASES_PER_SEED = 100


def make_case(rng: random.Random) -> tuple[Schedule, dict[str, object], dict[str, object]]:
    """(schedule, costs as plain data, options of simulate)"""
    written = rng.random() < 0.6
    schedule = make_program(rng, written=written, sharded=rng.random() < 0.3)
    num_stages, num_ranks = schedule.num_stages, schedule.num_ranks
    least = rng.choice([0, 1])
    most = rng.choice([1, 3, 6])

    def ticks() -> list[int]:
        return [rng.randint(min(least, most), most) for _ in range(num_stages)]

    pairs = [(a, b) for a in range(num_ranks) for b in range(num_ranks) if a != b]
    slowest = rng.choice([0, 0, 2, 9])
    costs = {
        **{name: ticks() for name in ("forward", "input", "weight", "full")},
        **{name: ticks() for name in ("unshard", "reshard", "reduce_grad")},
        "activation": [rng.randint(0, 4) * 2 for _ in range(num_stages)],
        "retained": rng.choice([0, 0.5, 1]),
        "gathered": [rng.randint(0, 4) for _ in range(num_stages)],
        "boundary": [rng.randint(0, 3) for _ in range(num_stages)],
        "overlap": rng.choice(["sum", "max"]),
        "latency": {pair: rng.randint(0, slowest) for pair in pairs},
        "ticks_per_byte": rng.choice([0, 0, 1, 2]),
    }
    options = {
        "sends": rng.choice(["buffered", "rendezvous", "blocking"]) if written else "buffered",
        "channel": rng.choice(["edge", "pair", "all"]),
        "communication": rng.choice(["overlapped", "overlapped", "serialised"]),
    }
    return schedule, costs, options


def run_ours(
    schedule: Schedule,
    costs: dict[str, object],
    options: dict[str, object],
    memory: float | None = None,
) -> Timeline:
    fields = {k: v for k, v in costs.items() if k not in ("latency", "ticks_per_byte")}
    ticks_per_byte = costs["ticks_per_byte"]
    bandwidth = 1 / ticks_per_byte if ticks_per_byte else math.inf
    edges = {pair: Link(latency, bandwidth) for pair, latency in costs["latency"].items()}
    return simulate(
        schedule, StageCosts(**fields, network=Network(edges=edges)), memory=memory, **options
    )


def run_theirs(
    schedule: Schedule,
    costs: dict[str, object],
    options: dict[str, object],
    delays: dict[tuple[int, int], int] | None = None,
) -> Result:
    names = {"F": "forward", "I": "input", "W": "weight", "B": "full"}
    names |= {"UNSHARD": "unshard", "RESHARD": "reshard", "REDUCE_GRAD": "reduce_grad"}
    stages = range(schedule.num_stages)
    chains, extra = schedule.topology.chains, schedule.topology.extra_edges
    following: dict[int, list[int]] = {stage: [] for stage in stages}
    for chain in chains:
        for before, after in itertools.pairwise(chain):
            following[before].append(after)
    for before, after in extra:
        following[before].append(after)
    activation = costs["activation"]
    return run(
        World(
            rows=[list(row) for row in schedule.actions],
            following=following,
            rank_of=dict(enumerate(schedule.placement.ranks)),
            ticks={(kind, s): costs[name][s] for kind, name in names.items() for s in stages},
            overlap=costs["overlap"],
            latency=costs["latency"],
            occupies={
                (*pair, s): costs["ticks_per_byte"] * costs["boundary"][s]
                for pair in costs["latency"]
                for s in stages
            },
            written=schedule.has_communication,
            backward=any("F" not in str(a) or "OVERLAP" in str(a) for a in compute_of(schedule)),
            sends=options["sends"],
            channel=options["channel"],
            serialised=options["communication"] == "serialised",
            copies=[set(group) for group in schedule.topology.replicas],
            activation=dict(enumerate(activation)),
            retained={s: a * costs["retained"] for s, a in enumerate(activation)},
            buffer=dict(enumerate(costs["boundary"])),
            whole=dict(enumerate(costs["gathered"])),
            delays=delays or {},
        )
    )


def takes_no_time(costs: dict[str, object]) -> bool:
    names = ("forward", "input", "weight", "full", "unshard", "reshard", "reduce_grad")
    return any(0 in costs[name] for name in names)


def compute_of(schedule: Schedule) -> list[Action]:
    kinds = ("F", "B", "I", "W", "OVERLAP_F_B")
    return [a for row in schedule.actions for a in row if a.kind.value in kinds]


def describe(schedule: Schedule, costs: dict[str, object], options: dict[str, object]) -> str:
    rows = "\n".join(" ".join(map(str, row)) for row in schedule.actions)
    return f"{schedule.topology}\n{schedule.placement}\n{rows}\n{costs}\n{options}"


def check_alike(schedule: Schedule, costs: dict[str, object], options: dict[str, object]) -> bool:
    """Compare the two; True if the program ran, False if both found it stuck."""
    story = describe(schedule, costs, options)
    theirs = run_theirs(schedule, costs, options)
    if theirs.stuck:
        with pytest.raises(VerificationError):
            run_ours(schedule, costs, options)
        return False
    ours = run_ours(schedule, costs, options)
    assert (ours.makespan, ours.span) == (theirs.makespan, theirs.span), story
    times = {}
    for rank in range(schedule.num_ranks):
        computed = iter(ours.spans_of(rank, "compute"))
        in_row = {}
        for span in computed:
            in_row[span.action] = (span.start, span.end)
        for position, action in enumerate(schedule.actions[rank]):
            if action in in_row:
                times[rank, position] = in_row[action]
    assert times == theirs.times, story
    if not (schedule.sharded_stages and takes_no_time(costs)):
        # Else several things happen in one lane at one moment, while the other goes on beside it.
        assert list(ours.peak_memory) == theirs.peaks, story
    causes: Counter[tuple[int, str]] = Counter()
    for idle in ours.idle_causes:
        causes[idle.rank, idle.cause] += idle.end - idle.start
    assert causes == theirs.idle, story
    work = [
        sum(span.duration for span in ours.spans_of(rank, "compute"))
        for rank in range(schedule.num_ranks)
    ]
    assert sum(causes.values()) == schedule.num_ranks * ours.makespan - sum(work), story
    # No order beats the bounds, those included that know how little memory this order needs.
    limited = run_ours(schedule, costs, options, max(ours.peak_memory))
    for timeline in (ours, limited):
        assert timeline.figures is not None
        assert timeline.figures.lower_bound <= ours.makespan + 1e-9, story
    return True


@pytest.mark.parametrize("seed", range(40))
def test_both_simulators_agree(seed: int) -> None:
    rng = random.Random(seed)
    ran = sum(check_alike(*make_case(rng)) for _ in range(CASES_PER_SEED))
    assert ran > CASES_PER_SEED / 2


@pytest.mark.parametrize("seed", range(10))
def test_both_find_the_same_orders_stuck(seed: int) -> None:
    rng = random.Random(3000 + seed)
    results: Counter[bool] = Counter()
    while results.total() < 60:
        schedule, costs, options = make_case(rng)
        if schedule.has_communication or schedule.sharded_stages:
            continue  # the verifier, whose report is raised, is stricter there than time is
        rows = [list(row) for row in schedule.actions]
        for row in rng.choices(rows, k=rng.randint(1, 3)):
            if row:
                i, j = rng.randrange(len(row)), rng.randrange(len(row))
                row[i], row[j] = row[j], row[i]
        results[check_alike(schedule.with_actions(rows), costs, options)] += 1
    assert min(results[True], results[False]) > 5


@pytest.mark.parametrize("seed", range(20))
def test_slack_is_what_an_action_can_wait_and_no_more(seed: int) -> None:
    rng = random.Random(1000 + seed)
    checked = 0
    while checked < 10:
        schedule, costs, options = make_case(rng)
        if len({action for row in schedule.actions for action in row}) < len(
            [action for row in schedule.actions for action in row]
        ):
            continue  # the same UNSHARD twice in a row of a rank: which is which is not the point
        makespan = run_theirs(schedule, costs, options).makespan
        timeline = run_ours(schedule, costs, options)
        assert timeline.figures is not None
        slack_of = dict(zip(timeline.spans, timeline.figures.slack, strict=True))
        computed = [span for span in timeline.spans if span.lane == "compute"]
        if not computed:
            continue
        for span in rng.sample(computed, min(5, len(computed))):
            place = (span.rank, schedule.actions[span.rank].index(span.action))
            slack = int(slack_of[span])
            story = f"{span}\n{describe(schedule, costs, options)}"
            late = run_theirs(schedule, costs, options, {place: slack})
            later = run_theirs(schedule, costs, options, {place: slack + 1})
            assert (late.makespan, later.makespan) == (makespan, makespan + 1), story
            checked += 1


@pytest.mark.parametrize("seed", range(10))
def test_the_critical_path_leads_from_the_start_to_the_end_without_slack(seed: int) -> None:
    rng = random.Random(2000 + seed)
    for _ in range(30):
        schedule, costs, options = make_case(rng)
        try:
            timeline = run_ours(schedule, costs, options)
        except VerificationError:
            continue
        assert timeline.figures is not None
        slack_of = dict(zip(timeline.spans, timeline.figures.slack, strict=True))
        path = timeline.critical_path
        story = f"{path}\n{describe(schedule, costs, options)}"
        assert path[-1].end == timeline.makespan, story
        assert all(slack_of.get(span, 0) == 0 for span in path), story
        assert all(a.end <= b.end for a, b in itertools.pairwise(path)), story
        if costs["latency"] and not max(costs["latency"].values()) and not costs["ticks_per_byte"]:
            # Nothing lies between two computations: each begins when the one before it ends.
            spans = [span for span in path if span.duration]
            assert sum(span.duration for span in spans) == timeline.makespan, story
