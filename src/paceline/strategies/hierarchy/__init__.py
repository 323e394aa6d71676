"""Strategy hierarchy: sum gradients on each host, then among groups of hosts (planned only)."""

from paceline.core.strategy import Planning, Strategy
from paceline.strategies.hierarchy import plan
from paceline.strategies.hierarchy.config import Hierarchy

_PLANNING = Planning(
    plan.plan, memory=plan.memory, calibrate=None, variants=plan.variants, symmetric=True
)
STRATEGY = Strategy("hierarchy", Hierarchy, _PLANNING)
