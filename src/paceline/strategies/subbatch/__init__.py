"""Strategy subbatch: a replicated body and a head that is split by its outputs (Dettmers 2016)."""

from paceline.core.strategy import Strategy
from paceline.strategies.subbatch import plan
from paceline.strategies.subbatch.config import SubBatch

STRATEGY = Strategy(
    name="subbatch",
    config=SubBatch,
    plan=plan.plan,
    run="paceline.strategies.subbatch.run",
    memory=plan.memory,
    sizes=plan.sizes,
    symmetric=True,
    trial="paceline.strategies.subbatch.trial",
    settings=frozenset({"port", "codec"}),
    refused_settings={
        "accumulate": "its head works on samples of all workers in sub-batches of one step; take a "
        "smaller batch_size, or strategy allreduce or host"
    },
)
