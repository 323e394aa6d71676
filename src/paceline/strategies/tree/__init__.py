"""Strategy tree: a binary tree of sums to rank 0, the baseline of Le et al. 2018."""

from paceline.core.strategy import Options, Planning, Running, Strategy
from paceline.strategies.tree import plan
from paceline.strategies.tree.after_backward import after_backward
from paceline.strategies.tree.config import Tree

STRATEGY = Strategy(
    name="tree",
    config=Tree,
    planning=Planning(
        plan=plan.plan,
        memory=plan.memory,
        calibrate=plan.calibrate,
        after_backward=after_backward,
    ),
    running=Running(
        module="paceline.strategies.tree.run",
        ends_together=False,  # the root sends the means last, and its kernel keeps them
    ),
    options=Options(settings=frozenset({"balance", "exchange_alone", "force", "slowdown"})),
)
