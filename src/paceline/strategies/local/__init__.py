"""Strategy local: rounds of local (inner) steps and one exchange (DiLoCo, arXiv 2311.08105)."""

from functools import partial

from paceline.core.link_fit import in_ring
from paceline.core.strategy import Options, Planning, Running, Strategy
from paceline.strategies.local import plan
from paceline.strategies.local.config import Local
from paceline.strategies.local.loss_table import steps_to_loss, variants

STRATEGY = Strategy(
    name="local",
    config=Local,
    planning=Planning(
        plan=plan.plan,
        plan_balanced=partial(plan.plan, balanced=True),
        memory=plan.memory,
        calibrate=partial(in_ring, at_once=True),
        steps_per_period=lambda config: int(config.sync_every),
        variants=variants,
        steps_to_loss=steps_to_loss,
    ),
    running=Running(module="paceline.strategies.local.run"),
    options=Options(
        settings=frozenset(
            {"balance", "codec", "elastic", "keep_all", "worker_ids", "lighthouse", "slowdown"}
        )
    ),
)
