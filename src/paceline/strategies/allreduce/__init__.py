"""Strategy allreduce: torch's DistributedDataParallel."""

from functools import partial

from paceline.core.link_fit import in_ring
from paceline.core.strategy import REPLICA_SETTINGS, Options, Planning, Running, Strategy
from paceline.strategies.allreduce import plan
from paceline.strategies.allreduce.config import AllReduce

_PLANNING = Planning(plan.plan, calibrate=partial(in_ring, at_once=True), symmetric=True)
_OPTIONS = Options(REPLICA_SETTINGS | {"codec", "exchange_alone"})
STRATEGY = Strategy("allreduce", AllReduce, _PLANNING, Running(f"{__name__}.run"), _OPTIONS)
