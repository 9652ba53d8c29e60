"""Files: CSV for the orders, versioned JSON for everything.

::

    {"pipeloom": "schedule", "version": 1, "name": "1f1b", "microbatches": 2,
     "placement": {"ranks": 2, "rank_of_stage": [0, 1]},
     "topology": {"chains": [[0, 1]], "extra_edges": [], "replicas": []},
     "communication": false,
     "actions": [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]}
"""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any, Literal

from pipeloom.errors import ParseError, ScheduleError
from pipeloom.ir.notation import LARGEST_NUMBER, format_csv, parse_csv, parse_rows
from pipeloom.ir.placement import Placement
from pipeloom.ir.questions import simple_actions
from pipeloom.ir.schedule import Schedule, make_schedule
from pipeloom.ir.topology import Topology

VERSION = 1

TopologyName = Literal["chain", "bidirectional"]


def load_schedule(path: str | Path, *, topology: TopologyName | Topology | None = None) -> Schedule:
    """Load a schedule from a ``.csv`` or ``.json`` file.

    A CSV does not say the topology: it is a chain unless ``topology`` is ``"bidirectional"`` (the
    first half of the stages is one chain, the second half the other) or a Topology.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in (".csv", ".json"):
        raise ParseError(f"{path}: a schedule file ends in .csv or .json")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ParseError(f"{path} is not a text file: {error}") from error
    except OSError as error:
        raise ParseError(f"{path} cannot be read: {error.strerror}") from error
    if suffix == ".json":
        if topology is not None:
            raise ScheduleError(f"{path}: a JSON file carries its topology; do not pass one")
        return schedule_from_json(text, source=str(path))
    rows = parse_csv(text, source=str(path))
    schedule = make_schedule(rows, name=path.stem)
    if topology is None and _looks_bidirectional(schedule):
        warnings.warn(
            f"{path}: its two halves of stages share no microbatches, as in a bidirectional "
            "schedule; if it is one, say topology bidirectional",
            stacklevel=2,
        )
    if topology is None or topology == "chain":
        return schedule
    if topology == "bidirectional":
        if schedule.num_stages % 2:
            raise ScheduleError(
                f"{path}: a bidirectional schedule has an even number of stages, "
                f"this one has {schedule.num_stages}"
            )
        topology = Topology.bidirectional(schedule.num_stages // 2)
    if not isinstance(topology, Topology):
        raise ScheduleError(
            f"topology must be 'chain', 'bidirectional' or a Topology, not {topology!r}"
        )
    return make_schedule(rows, name=path.stem, topology=topology)


def _looks_bidirectional(schedule: Schedule) -> bool:
    """True if the stages that would begin two chains see different microbatches. In a chain every
    stage sees all."""
    middle, odd = divmod(schedule.num_stages, 2)
    if odd:
        return False
    seen: dict[int | None, set[int]] = {0: set(), middle: set()}
    for action in schedule.all_actions():
        for _, stage, microbatch, _, _ in simple_actions(action):
            if stage in seen and microbatch is not None:
                seen[stage].add(microbatch)
    return bool(seen[0]) and bool(seen[middle]) and seen[0].isdisjoint(seen[middle])


def save_schedule(schedule: Schedule, path: Path) -> Path:
    """Write a schedule to a file whose suffix says the format; never leave half a file."""
    suffix = path.suffix.lower()
    if suffix == ".csv":
        if not schedule.topology.is_chain:
            two_chains = schedule.topology == Topology.bidirectional(schedule.num_stages // 2)
            remedy = "load it with topology='bidirectional'" if two_chains else "save it as .json"
            warnings.warn(f"{path}: a CSV does not say the topology; {remedy}", stacklevel=3)
        text = format_csv(schedule.actions)
    elif suffix == ".json":
        text = schedule_to_json(schedule)
    else:
        raise ScheduleError(
            f"{path}: a schedule is saved as .csv or .json; "
            "for a picture, simulate it and save the timeline"
        )
    write_text(path, text)
    return path


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        temporary.write_text(text, encoding="utf-8", newline="")
        temporary.replace(path)
    except OSError as error:
        # Whoever reads it knows nothing of a temporary file.
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)


def schedule_to_json(schedule: Schedule) -> str:
    """The JSON text of a schedule."""
    data: dict[str, Any] = {
        "pipeloom": "schedule",
        "version": VERSION,
        "name": schedule.name,
        "microbatches": schedule.num_microbatches,
        "placement": {
            "ranks": schedule.num_ranks,
            "rank_of_stage": list(schedule.placement.ranks),
        },
        "topology": {
            "chains": [list(chain) for chain in schedule.topology.chains],
            "extra_edges": [list(edge) for edge in schedule.topology.extra_edges],
            "replicas": [list(group) for group in schedule.topology.replicas],
        },
        "communication": schedule.has_communication,
    }
    head = json.dumps(data, indent=1, ensure_ascii=False)
    rows = ",\n  ".join(json.dumps([str(action) for action in row]) for row in schedule.actions)
    return f'{head.removesuffix(chr(10) + "}")},\n "actions": [\n  {rows}\n ]\n}}\n'


def schedule_from_json(text: str, *, source: str = "the JSON") -> Schedule:
    """Parse what :func:`schedule_to_json` wrote; every bad field is reported."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ParseError(f"{source} is not JSON: {error}") from error
    reader = _Reader(source)
    if not isinstance(data, dict) or data.get("pipeloom") != "schedule":
        raise ParseError(f'{source} is not a schedule: it does not say "pipeloom": "schedule"')
    version = data.get("version")
    if version != VERSION:
        raise ParseError(
            f"{source} has version {version!r}, this pipeloom reads version {VERSION}; "
            "a newer pipeloom may have written it"
        )
    placement = reader.mapping(data, "placement")
    topology = reader.mapping(data, "topology")
    name = reader.take(data, "name", str, "custom")
    num_microbatches = reader.take(data, "microbatches", int)
    has_communication = reader.take(data, "communication", bool, False)
    num_ranks = reader.take(placement, "ranks", int)
    ranks = reader.numbers(placement, "rank_of_stage", optional=True)
    chains = reader.groups(topology, "chains")
    extra_edges = reader.groups(topology, "extra_edges")
    replicas = reader.groups(topology, "replicas")
    rows = data.get("actions")
    if not isinstance(rows, list) or not all(
        isinstance(row, list) and all(isinstance(cell, str) for cell in row) for row in rows
    ):
        reader.problems.append('"actions" must be a list of lists of texts')
    if any(len(edge) != 2 for edge in extra_edges):
        reader.problems.append('"extra_edges" must be pairs of stages')
    reader.raise_for_problems()
    actions = parse_rows(rows or [], source=f'{source}, "actions"')
    actions += [[] for _ in range(len(rows or []) - len(actions))]
    try:
        return Schedule(
            placement=Placement(ranks, num_ranks),
            topology=Topology(
                chains=chains,
                extra_edges=tuple((edge[0], edge[1]) for edge in extra_edges),
                replicas=replicas,
            ),
            num_microbatches=num_microbatches,
            actions=tuple(map(tuple, actions)),
            has_communication=has_communication,
            name=name,
        )
    except ScheduleError as error:
        raise ParseError(f"{source}: {error}") from error


def _can_be_written(text: str) -> bool:
    """False for half a character, which JSON can spell and no file can hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class _Reader:
    """Takes fields out of JSON objects and collects what is wrong with them."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.problems: list[str] = []

    def take(self, data: dict[str, Any], key: str, kind: type, default: Any = None) -> Any:
        value: Any = data.get(key, default)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            self.problems.append(f'"{key}" must be {kind.__name__}, not {value!r}')
        elif isinstance(value, str) and not _can_be_written(value):
            self.problems.append(f'"{key}" must be text that can be written, not {value!a}')
        elif isinstance(value, int) and not 0 <= value <= LARGEST_NUMBER + 1:
            self.problems.append(
                f'"{key}" must be a number from 0 to {LARGEST_NUMBER + 1}, not {value!r}'
            )
        return value

    def mapping(self, data: dict[str, Any], key: str) -> dict[str, Any]:
        value = data.get(key)
        if not isinstance(value, dict):
            self.problems.append(f'"{key}" must be an object, not {value!r}')
            return {}
        return value

    def numbers(self, data: dict[str, Any], key: str, *, optional: bool = False) -> tuple[Any, ...]:
        value = data.get(key)
        if not isinstance(value, list) or not all(
            (type(item) is int and item >= 0) or (optional and item is None) for item in value
        ):
            self.problems.append(f'"{key}" must be a list of numbers from 0 up, not {value!r}')
            return ()
        return tuple(value)

    def groups(self, data: dict[str, Any], key: str) -> tuple[tuple[int, ...], ...]:
        value = data.get(key, [])
        if not isinstance(value, list):
            self.problems.append(f'"{key}" must be a list of lists of stages, not {value!r}')
            return ()
        return tuple(self.numbers({key: group}, key) for group in value)

    def raise_for_problems(self) -> None:
        if self.problems:
            lines = "\n".join(f"  {problem}" for problem in self.problems)
            raise ParseError(f"{self.source} is not a schedule:\n{lines}")
