"""Strategy tree: sum gradients in a binary tree (the baseline of Le et al. 2018)."""

from paceline.core.strategy import REPLICA_SETTINGS, Options, Planning, Running, Strategy
from paceline.strategies.tree import plan
from paceline.strategies.tree.config import Tree

_PLANNING = Planning(
    plan.plan, memory=plan.memory, calibrate=plan.calibrate, reports_after_backward=True
)
# Exchanges do not end together: rank 0 may return before other ranks have the mean gradients.
_RUNNING = Running(f"{__name__}.run", ends_together=False)
_OPTIONS = Options(REPLICA_SETTINGS | {"exchange_alone"})
STRATEGY = Strategy("tree", Tree, _PLANNING, _RUNNING, _OPTIONS)
