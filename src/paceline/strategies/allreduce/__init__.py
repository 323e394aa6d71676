"""Strategy allreduce: torch's DistributedDataParallel, the baseline of every claim."""

from paceline.core.strategy import Strategy
from paceline.strategies.allreduce import plan
from paceline.strategies.allreduce.config import AllReduce

STRATEGY = Strategy(
    name="allreduce",
    config=AllReduce,
    plan=plan.plan,
    run="paceline.strategies.allreduce.run",
    calibrate=plan.calibrate,
    symmetric=True,
    settings=frozenset({"balance", "codec", "exchange_alone", "force", "port", "stretch"}),
)
