"""Strategy tree: a binary tree of sums to rank 0, the baseline of Le et al. 2018."""

from paceline.core.strategy import Strategy
from paceline.strategies.tree import plan
from paceline.strategies.tree.after_backward import after_backward
from paceline.strategies.tree.config import Tree

STRATEGY = Strategy(
    name="tree",
    config=Tree,
    plan=plan.plan,
    run="paceline.strategies.tree.run",
    memory=plan.memory,
    calibrate=plan.calibrate,
    ends_together=False,  # the root sends the means last, and its kernel keeps them
    after_backward=after_backward,
    settings=frozenset({"balance", "exchange_alone", "force", "port", "stretch"}),
)
