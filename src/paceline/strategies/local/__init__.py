"""Strategy local: inner steps, and an exchange every so many (DiLoCo, arXiv 2311.08105)."""

from paceline.core.strategy import Role, Strategy
from paceline.strategies.local import plan
from paceline.strategies.local.config import Local


def _roles(config: Local) -> tuple[Role, ...]:
    return Role("hub", 1, leads=True), Role("worker", config.workers)


STRATEGY = Strategy(
    name="local",
    config=Local,
    plan=plan.plan,
    run="paceline.strategies.local.run",
    roles=_roles,
    settings=frozenset({"codec", "bind", "keys", "run", "wait_s", "balance"}),
    may_skip_profile=True,
)
