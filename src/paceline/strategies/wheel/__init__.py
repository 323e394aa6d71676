"""Strategy wheel: bodies on workers, heads beside an asynchronous server (Du et al. 2017)."""

from paceline.core.strategy import Role, Strategy
from paceline.strategies.wheel import plan
from paceline.strategies.wheel.config import MOMENTUM, Wheel


def _roles(config: Wheel) -> tuple[Role, ...]:
    bodies = Role("body", len(config.workers_by_device))
    children = (Role("child hub", config.child_hubs),) if config.child_hubs else ()
    return Role("hub", 1, leads=True), *children, bodies


STRATEGY = Strategy(
    name="wheel",
    config=Wheel,
    plan=plan.plan,
    repeats_after=lambda config: config.period,
    run="paceline.strategies.wheel.run",
    is_asynchronous=True,
    roles=_roles,
    memory=plan.memory,
    sizes=plan.placements,
    shares_devices=True,
    limit=plan.limit,
    trial="paceline.strategies.wheel.trial",
    settings=frozenset({"codec", "bind", "keys", "run", "wait_s"}),
    defaults={"momentum": MOMENTUM, "profile_s": 1.0},
    may_skip_profile=True,
    worker="paceline.strategies.wheel.worker",
    child_hub="paceline.strategies.wheel.remote",
    refused_settings={
        "accumulate": "each worker's part of a step is one message, and an update of its own; a "
        "smaller batch_size takes as little memory"
    },
    refused_options={"hub": "names a host of a machine file; a run's hub is where it is started"},
)
