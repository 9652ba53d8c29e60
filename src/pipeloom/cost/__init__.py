"""How long things take and how much they hold: the numbers behind every simulation."""

from __future__ import annotations

from pipeloom.cost.constant import StageCosts, UniformCosts
from pipeloom.cost.files import load_costs, save_costs
from pipeloom.cost.model import CostModel, ScheduleCosts
from pipeloom.cost.network import Link, Network

__all__ = [
    "CostModel",
    "Link",
    "Network",
    "ScheduleCosts",
    "StageCosts",
    "UniformCosts",
    "load_costs",
    "save_costs",
]
