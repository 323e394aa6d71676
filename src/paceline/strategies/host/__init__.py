"""Strategy host: gradients are summed in the memory of the workers' host (Le et al. 2018)."""

from paceline.core.strategy import Strategy
from paceline.strategies.host import plan
from paceline.strategies.host.after_backward import after_backward
from paceline.strategies.host.config import HostReduce

STRATEGY = Strategy(
    name="host",
    config=HostReduce,
    plan=plan.plan,
    run="paceline.strategies.host.run",
    memory=plan.memory,
    calibrate=plan.calibrate,
    symmetric=True,
    after_backward=after_backward,
    settings=frozenset(
        {"balance", "codec", "exchange_alone", "force", "port", "stretch", "chunk_search"}
    ),
)
