"""Strategy subbatch: replicate the first layers, split the last layers (Dettmers 2016)."""

from paceline.core.strategy import Options, Planning, Running, Strategy
from paceline.strategies.subbatch import plan
from paceline.strategies.subbatch.config import SubBatch

_PLANNING = Planning(
    plan.plan,
    memory=plan.memory,
    calibrate=None,
    sizes=plan.sizes,
    trial=f"{__name__}.build",
    symmetric=True,
)
_OPTIONS = Options(
    frozenset({"codec"}),
    refused_settings={"accumulate": "use a smaller batch_size, or strategy allreduce or host"},
)
STRATEGY = Strategy("subbatch", SubBatch, _PLANNING, Running(f"{__name__}.run"), _OPTIONS)
