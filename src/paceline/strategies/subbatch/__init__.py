"""Strategy subbatch: replicate the first layers, split the outputs of the last (Dettmers 2016)."""

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
        trial="paceline.strategies.subbatch.build",
        symmetric=True,
    ),
    running=Running(module="paceline.strategies.subbatch.run"),
    options=Options(
        settings=frozenset({"codec"}),
        refused_settings={"accumulate": "use a smaller batch_size, or strategy allreduce or host"},
    ),
)
