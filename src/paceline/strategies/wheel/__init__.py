"""Strategy wheel: bodies on workers, heads beside an asynchronous server (Du et al. 2017).

A gradient's way from a worker to the parameters:

    worker.py     BodyWorker._backward      autograd computes the body's gradients: one vector
    endpoint.py   Endpoint.message          a codec encodes it, the device's memory is left
                     |
                     |  rpc: request in pieces, each executed once
                     v
    hub.py        Hub._execute              the gate checks it; a lie costs its worker the run
    heads.py      HeadWorkers.update        decoded
    server.py     ParameterServer.update    completes the step whose head's gradients wait
    server.py     ParameterServer._apply    the optimizer takes a step; the version grows by one

At a child hub `ChildServer._apply` adds it to a sum instead, whose mean goes on to the parent
(`child_server`, `tree`). The other files: `config` and `plan` (with `split`, `routes` and
`hubs_plan`) are what a plan needs; `job` builds model and halves alike in every process; `run`
trains or rehearses here, `child` serves as a worker of another hub.
"""

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
