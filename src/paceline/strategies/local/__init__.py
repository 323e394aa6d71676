"""Strategy local: inner steps, and an exchange every so many (DiLoCo, arXiv 2311.08105)."""

from paceline.core.strategy import Strategy
from paceline.strategies.local import plan
from paceline.strategies.local.config import Local
from paceline.strategies.local.loss_table import steps_to_loss, variants

STRATEGY = Strategy(
    name="local",
    config=Local,
    plan=plan.plan,
    plan_balanced=plan.plan_balanced,
    calibrate=plan.calibrate,
    steps_per_period=lambda config: int(config.sync_every),
    run="paceline.strategies.local.run",
    memory=plan.memory,
    variants=variants,
    settings=frozenset(
        {"balance", "codec", "elastic", "force", "here", "lighthouse", "port", "stretch"}
    ),
    steps_to_loss=steps_to_loss,
)
