"""Strategy host: sum gradients in host memory during backward (Le et al. 2018)."""

from paceline.core.strategy import REPLICA_SETTINGS, Options, Planning, Running, Strategy
from paceline.strategies.host import plan
from paceline.strategies.host.config import HostReduce

_PLANNING = Planning(
    plan.plan,
    memory=plan.memory,
    calibrate=plan.calibrate,
    symmetric=True,
    reports_after_backward=True,
)
_OPTIONS = Options(REPLICA_SETTINGS | {"codec", "exchange_alone"})
STRATEGY = Strategy("host", HostReduce, _PLANNING, Running(f"{__name__}.run"), _OPTIONS)
