"""Strategy tree: sum gradients in a binary tree (the baseline of Le et al. 2018)."""

from paceline.core.strategy import Options, Planning, Running, Strategy
from paceline.strategies.tree import plan
from paceline.strategies.tree.config import Tree

STRATEGY = Strategy(
    name="tree",
    config=Tree,
    planning=Planning(
        plan=plan.plan,
        memory=plan.memory,
        calibrate=plan.calibrate,
        reports_after_backward=True,
    ),
    running=Running(
        module="paceline.strategies.tree.run",
        ends_together=False,  # rank 0 may return before the other ranks have the means
    ),
    options=Options(settings=frozenset({"balance", "exchange_alone", "keep_all", "slowdown"})),
)
