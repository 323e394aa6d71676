"""Strategy hierarchy: host sums, then group by group of hosts; planned only."""

from paceline.core.strategy import Strategy
from paceline.strategies.hierarchy import plan
from paceline.strategies.hierarchy.config import Hierarchy

STRATEGY = Strategy(
    name="hierarchy",
    config=Hierarchy,
    plan=plan.plan,
    memory=plan.memory,
    variants=plan.variants,
    symmetric=True,
    is_for_clusters=True,
)
