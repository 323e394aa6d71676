"""Strategy allreduce: torch's DistributedDataParallel."""

from functools import partial

from paceline.core.link_fit import in_ring
from paceline.core.strategy import Options, Planning, Running, Strategy
from paceline.strategies.allreduce import plan
from paceline.strategies.allreduce.config import AllReduce

STRATEGY = Strategy(
    name="allreduce",
    config=AllReduce,
    planning=Planning(plan=plan.plan, calibrate=partial(in_ring, at_once=True), symmetric=True),
    running=Running(module="paceline.strategies.allreduce.run"),
    options=Options(
        settings=frozenset({"balance", "codec", "exchange_alone", "keep_all", "slowdown"})
    ),
)
