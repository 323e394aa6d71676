"""Strategy host: sum gradients in host memory during backward (Le et al. 2018)."""

from paceline.core.strategy import Options, Planning, Running, Strategy
from paceline.strategies.host import plan
from paceline.strategies.host.config import HostReduce

STRATEGY = Strategy(
    name="host",
    config=HostReduce,
    planning=Planning(
        plan=plan.plan,
        memory=plan.memory,
        calibrate=plan.calibrate,
        symmetric=True,
        reports_after_backward=True,
    ),
    running=Running(module="paceline.strategies.host.run"),
    options=Options(
        settings=frozenset({"balance", "codec", "exchange_alone", "keep_all", "slowdown"})
    ),
)
