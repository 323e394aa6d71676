"""Strategy local: workers train alone and average parameters once per round of steps (DiLoCo)."""

from functools import partial

from paceline.core.link_fit import in_ring
from paceline.core.strategy import REPLICA_SETTINGS, Options, Planning, Running, Strategy
from paceline.strategies.local import plan
from paceline.strategies.local.config import Local
from paceline.strategies.local.loss_table import steps_to_loss, variants

_PLANNING = Planning(
    plan.plan,
    plan_balanced=partial(plan.plan, balanced=True),
    memory=plan.memory,
    calibrate=partial(in_ring, at_once=True),
    steps_per_period=lambda config: int(config.sync_every),
    variants=variants,
    steps_to_loss=steps_to_loss,
)
_OPTIONS = Options(REPLICA_SETTINGS | {"codec", "elastic", "lighthouse", "worker_ids"})
STRATEGY = Strategy("local", Local, _PLANNING, Running(f"{__name__}.run"), _OPTIONS)
