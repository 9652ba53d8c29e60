"""Cost files: JSON, as docs/costs.md says.

::

    {"forward": 1, "input": 1, "weight": 1, "latency": 0.1, "activation": 1, "retained": 0.5}

A field with a list has a number per stage, and the costs are StageCosts; else they are
UniformCosts. Every bad field is reported at once.
"""

from __future__ import annotations

import difflib
import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

from pipeloom.cost.amounts import is_amount
from pipeloom.cost.constant import SHARED_FIELDS, STAGE_FIELDS, StageCosts, UniformCosts
from pipeloom.cost.network import Link, Network
from pipeloom.errors import CostFileError
from pipeloom.ir.serialization import write_text

VERSION = 1

_HEAD = {"pipeloom": "costs", "version": VERSION}
_UNITS = ("time_unit", "memory_unit")
_PER_STAGE = (*SHARED_FIELDS, *STAGE_FIELDS)
_NETWORK_LINKS = ("link", "within_node", "between_nodes")
_LINK_FIELDS = ("latency", "bandwidth")


def load_costs(path: str | Path) -> UniformCosts | StageCosts:
    """Load a cost file."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise CostFileError(f"{path} is not a text file: {error}") from error
    except OSError as error:
        raise CostFileError(f"{path} cannot be read: {error.strerror}") from error
    return costs_from_json(text, source=str(path))


def save_costs(costs: UniformCosts | StageCosts, path: str | Path) -> Path:
    """Write a cost file; what has its default value is left out."""
    path = Path(path)
    write_text(path, costs_to_json(costs))
    return path


def costs_from_json(text: str, *, source: str = "the JSON") -> UniformCosts | StageCosts:
    """Parse the text of a cost file; every bad field is reported.

    >>> costs_from_json('{"forward": 1, "input": 1, "weights": 1}')
    Traceback (most recent call last):
    pipeloom.errors.CostFileError: the JSON is not a cost file:
      "weight" is missing: a number from 0 up, or a list with one per stage
    """
    try:
        data = json.loads(text, parse_constant=_read_constant)
    except (ValueError, RecursionError) as error:
        raise CostFileError(f"{source} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise CostFileError(f"{source} is not a cost file: it must be an object with fields")
    reader = _Reader(data)
    values = reader.read()
    if reader.problems:
        raise CostFileError(_list_problems(source, reader.problems))
    made: type[UniformCosts | StageCosts] = StageCosts if reader.has_lists else UniformCosts
    try:
        return made(**values)
    except CostFileError as error:
        problems = [line.strip() for line in str(error).splitlines()[1:]]
        raise CostFileError(_list_problems(source, problems)) from None


def costs_to_json(costs: UniformCosts | StageCosts) -> str:
    """The text of a cost file."""
    data: dict[str, Any] = dict(_HEAD)
    for field in sorted(fields(costs), key=lambda field: bool(field.kw_only)):
        value = getattr(costs, field.name)
        if field.name != "network" and value != field.default:
            data[field.name] = _plain(value)
    if costs.network is not None:
        data["network"] = _network_to_data(costs.network)
    lines = ",\n".join(
        f" {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}"
        for key, value in data.items()
    )
    return f"{{\n{lines}\n}}\n"


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    if hasattr(value, "items"):
        return {str(key): item for key, item in value.items()}
    return value


def _network_to_data(network: Network) -> dict[str, Any]:
    data: dict[str, Any] = {}
    if network.ranks_per_node is not None:
        data["ranks_per_node"] = network.ranks_per_node
    for name in _NETWORK_LINKS:
        link = getattr(network, name)
        if link is not None and link != Link():
            data[name] = _link_to_data(link)
    if network.edges:
        data["edges"] = {f"{a}>{b}": _link_to_data(link) for (a, b), link in network.edges.items()}
    return data


def _link_to_data(link: Link) -> dict[str, float]:
    data = {"latency": link.latency}
    if link.bandwidth != math.inf:
        data["bandwidth"] = link.bandwidth
    return data


def _read_constant(text: str) -> float:
    # What json would read as a number although JSON has no such thing: the field is reported.
    return math.nan if text == "NaN" else math.inf


def _list_problems(source: str, problems: list[str]) -> str:
    return f"{source} is not a cost file:\n" + "\n".join(f"  {line}" for line in problems)


class _Reader:
    """Takes the fields out of the object and collects what is wrong with them."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data
        self.problems: list[str] = []
        self.has_lists = any(isinstance(data.get(name), list) for name in _PER_STAGE)

    def read(self) -> dict[str, Any]:
        values: dict[str, Any] = {}
        said = self.data.get("pipeloom", "costs")
        if said != "costs":
            self.problems.append(f'it says "pipeloom": {said!r}, so it is something else')
        version = self.data.get("version", VERSION)
        if version != VERSION:
            self.problems.append(f'"version" is {version!r}, this pipeloom reads {VERSION}')
        for name in ("forward", "input", "weight"):
            if name not in self.data:
                self.problems.append(
                    f'"{name}" is missing: a number from 0 up, or a list with one per stage'
                )
        made = StageCosts if self.has_lists else UniformCosts
        known = {field.name for field in fields(made)}
        for name, value in self.data.items():
            if name in known:
                self._take(name, value, values)
            elif name not in _HEAD:
                self._report_unknown(name, known)
        return values

    def _take(self, name: str, value: Any, values: dict[str, Any]) -> None:
        if name == "network":
            values[name] = self._network(value)
        elif name in _UNITS:
            if isinstance(value, str):
                values[name] = value
            else:
                self.problems.append(f'"{name}" must be a text such as "ms", not {value!r}')
        elif name == "speeds":
            values[name] = self._speeds(value)
        elif name == "overlap":
            if value in ("sum", "max") or is_amount(value, above=True):
                values[name] = value
            else:
                self.problems.append(
                    f'"overlap" must be "sum", "max" or a factor above 0, not {value!r}'
                )
        elif name == "retained":
            values[name] = self._numbers(name, value, most=1.0)
        elif name == "bandwidth":
            values[name] = self._number(name, value, above=True)
        elif name in _PER_STAGE:
            values[name] = self._numbers(name, value)
        else:
            values[name] = self._number(name, value)

    def _number(self, name: str, value: Any, *, above: bool = False, most: float = math.inf) -> Any:
        if is_amount(value, above=above) and value <= most:
            return value
        wanted = "above 0" if above else "from 0 up" if most == math.inf else f"from 0 to {most:g}"
        self.problems.append(f'"{name}" must be a number {wanted}, not {value!r}')
        return 1.0

    def _numbers(self, name: str, value: Any, *, most: float = math.inf) -> Any:
        if not isinstance(value, list):
            return self._number(name, value, most=most)
        return [
            self._number(f"{name}[{stage}]", number, most=most)
            for stage, number in enumerate(value)
        ]

    def _speeds(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._number(f"speeds[{i}]", v, above=True) for i, v in enumerate(value)]
        if isinstance(value, dict) and all(key.isdecimal() for key in value):
            return {
                int(key): self._number(f"speeds[{key}]", number, above=True)
                for key, number in value.items()
            }
        self.problems.append(
            '"speeds" must be a list with one number per rank, or an object such as '
            f'{{"3": 0.5}}, not {value!r}'
        )
        return None

    def _network(self, value: Any) -> Network | None:
        if not isinstance(value, dict):
            self.problems.append(f'"network" must be an object, not {value!r}')
            return None
        known = ("ranks_per_node", "edges", *_NETWORK_LINKS)
        parts: dict[str, Any] = {}
        for name, part in value.items():
            if name == "ranks_per_node":
                if type(part) is int and part > 0:
                    parts[name] = part
                else:
                    self.problems.append(
                        f'"network.{name}" must be a whole number from 1 up, not {part!r}'
                    )
            elif name == "edges":
                parts[name] = self._edges(part)
            elif name in _NETWORK_LINKS:
                parts[name] = self._link(f"network.{name}", part)
            else:
                self._report_unknown(name, set(known), prefix="network.")
        return Network(**parts)

    def _edges(self, value: Any) -> dict[tuple[int, int], Link]:
        edges: dict[tuple[int, int], Link] = {}
        if not isinstance(value, dict):
            self.problems.append(f'"network.edges" must be an object, not {value!r}')
            return edges
        for name, part in value.items():
            sender, arrow, receiver = name.partition(">")
            if not (arrow and sender.isdecimal() and receiver.isdecimal()):
                self.problems.append(
                    f'"network.edges" names {name!r}; an edge between ranks is written "0>1"'
                )
                continue
            edges[int(sender), int(receiver)] = self._link(f"network.edges[{name}]", part)
        return edges

    def _link(self, where: str, value: Any) -> Link:
        if not isinstance(value, dict):
            self.problems.append(
                f'"{where}" must be an object with "latency" and "bandwidth", not {value!r}'
            )
            return Link()
        for name in value:
            if name not in _LINK_FIELDS:
                self._report_unknown(name, set(_LINK_FIELDS), prefix=f"{where}.")
        latency = self._number(f"{where}.latency", value.get("latency", 0.0))
        bandwidth = value.get("bandwidth")
        if bandwidth is not None:
            bandwidth = self._number(f"{where}.bandwidth", bandwidth, above=True)
        return Link(latency, math.inf if bandwidth is None else bandwidth)

    def _report_unknown(self, name: str, known: set[str], prefix: str = "") -> None:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f'; did you mean "{prefix}{close[0]}"?' if close else ""
        if self.has_lists and name in ("extra_first", "extra_last"):
            hint = "; where there are lists, say it in the list"
        self.problems.append(f'"{prefix}{name}" is no field of a cost file{hint}')
