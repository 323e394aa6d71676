"""Strategy subbatch: a replicated body and a head that is split by its outputs (Dettmers 2016)."""

from paceline.core.strategy import Options, Planning, Running, Strategy
from paceline.strategies.subbatch import plan
from paceline.strategies.subbatch.config import SubBatch

STRATEGY = Strategy(
    name="subbatch",
    config=SubBatch,
    planning=Planning(
        plan=plan.plan,
        memory=plan.memory,
        calibrate=None,
        sizes=plan.sizes,
        trial="paceline.strategies.subbatch.trial",
        symmetric=True,
    ),
    running=Running(module="paceline.strategies.subbatch.run"),
    options=Options(
        settings=frozenset({"codec"}),
        refused_settings={
            "accumulate": "its head works on samples of all workers in sub-batches of one step; "
            "take a smaller batch_size, or strategy allreduce or host"
        },
    ),
)
