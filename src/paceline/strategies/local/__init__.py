"""Strategy local: inner steps, and an exchange every so many (DiLoCo, arXiv 2311.08105)."""

from paceline.core.strategy import Role, Strategy
from paceline.strategies.local import plan
from paceline.strategies.local.config import Local
from paceline.strategies.local.loss_table import caveat


def _roles(config: Local) -> tuple[Role, ...]:
    return Role("hub", 1, leads=True), Role("worker", config.workers)


STRATEGY = Strategy(
    name="local",
    config=Local,
    plan=plan.plan,
    plan_balanced=plan.plan_balanced,
    steps_per_period=lambda config: int(config.sync_every),
    run="paceline.strategies.local.run",
    worker="paceline.strategies.local.worker",
    takes_ranks=True,
    roles=_roles,
    memory=plan.memory,
    settings=frozenset({"balance", "bind", "codec", "force", "keys", "run", "stretch", "wait_s"}),
    may_skip_profile=True,
    refused_options={"hub": "names a host of a machine file; a run's hub is where it is started"},
    caveat=caveat,
)
