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

from paceline.core.strategy import Options, Planning, Role, Running, Strategy
from paceline.strategies.wheel import plan
from paceline.strategies.wheel.config import MOMENTUM, Wheel


def _roles(config: Wheel) -> tuple[Role, ...]:
    bodies = Role("body", len(config.workers_by_device))
    children = (Role("child hub", config.child_hubs),) if config.child_hubs else ()
    return Role("hub", 1, leads=True), *children, bodies


STRATEGY = Strategy(
    name="wheel",
    config=Wheel,
    planning=Planning(
        plan=plan.plan,
        memory=plan.memory,
        calibrate=None,
        repeats_after=lambda config: config.period,
        sizes=plan.placements,
        trial="paceline.strategies.wheel.trial",
        shares_devices=True,
        is_asynchronous=True,
        limit=plan.limit,
    ),
    running=Running(
        module="paceline.strategies.wheel.run",
        roles=_roles,
        remote="paceline.strategies.wheel.remote",
        may_skip_profile=True,
    ),
    options=Options(
        settings=frozenset({"codec", "listen", "keys", "run_name", "wait_s"}),
        defaults={"momentum": MOMENTUM, "profile_s": 1.0},
        refused_settings={
            "accumulate": "each worker's part of a step is one message, and an update of its own; "
            "a smaller batch_size takes as little memory"
        },
        refused_options={
            "hub": "names a host of a machine file; a run's hub is where it is started"
        },
    ),
)
