"""What a message between two ranks costs.

::

    rank 0  ──████──            ████ bytes ÷ bandwidth: occupies the edge (a directed pair of
                 ╲╲╲╲                ranks); the next message waits
    rank 1        ──████──      ╲╲╲╲ latency: occupies nothing; messages follow each other in it

Without a bandwidth a message is pure latency, as in the published tables.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from pipeloom.cost.amounts import is_amount


@dataclass(frozen=True)
class Link:
    """One kind of connection."""

    #: Added to every message; occupies nothing.
    latency: float = 0.0
    #: Memory units per time unit; infinite unless given.
    bandwidth: float = math.inf

    def find_problems(self) -> list[str]:
        """What is wrong with the numbers."""
        problems = []
        if not is_amount(self.latency):
            problems.append(f"latency must be a number from 0 up, not {self.latency!r}")
        if self.bandwidth != math.inf and not is_amount(self.bandwidth, above=True):
            problems.append(f"bandwidth must be a number above 0, not {self.bandwidth!r}")
        return problems


@dataclass(frozen=True)
class Network:
    """Which link lies between two ranks: the edge's own, else that of its class, else ``link``.

    >>> fast, slow = Link(latency=1), Link(latency=5)
    >>> network = Network(ranks_per_node=2, within_node=fast, between_nodes=slow)
    >>> network.link_between(0, 1).latency, network.link_between(1, 2).latency
    (1, 5)
    """

    #: Every edge that nothing else names.
    link: Link = Link()
    #: Consecutive ranks that share a node; ``None`` where nodes make no difference.
    ranks_per_node: int | None = None
    within_node: Link | None = None
    between_nodes: Link | None = None
    #: (sending rank, receiving rank) → link.
    edges: Mapping[tuple[int, int], Link] = field(default_factory=dict, hash=False)

    def link_between(self, sender: int, receiver: int) -> Link:
        """The link that a message takes."""
        named = self.edges.get((sender, receiver))
        if named is not None:
            return named
        if self.ranks_per_node is not None:
            together = sender // self.ranks_per_node == receiver // self.ranks_per_node
            of_class = self.within_node if together else self.between_nodes
            if of_class is not None:
                return of_class
        return self.link

    def find_problems(self) -> list[str]:
        """What is wrong with the numbers, link by link."""
        problems = []
        nodes = self.ranks_per_node
        if nodes is None:
            if self.within_node is not None or self.between_nodes is not None:
                problems.append("within_node and between_nodes need ranks_per_node")
        elif type(nodes) is not int or nodes < 1:
            problems.append(f"ranks_per_node must be a whole number from 1 up, not {nodes!r}")
        links = {"": self.link, "within_node: ": self.within_node}
        links["between_nodes: "] = self.between_nodes
        links |= {f"edge {a}>{b}: ": link for (a, b), link in self.edges.items()}
        for where, link in links.items():
            if link is not None:
                problems += [where + problem for problem in link.find_problems()]
        return problems
