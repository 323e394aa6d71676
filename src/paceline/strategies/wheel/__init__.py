"""Strategy wheel: workers train a model's first layers, a hub the last layers (Du et al. 2017).

The first layers are called the body, the last layers the head. The hub also runs a parameter
server, which updates all parameters asynchronously.

The path of a gradient from a worker to the parameters:

    worker.py         BodyWorker._backward     autograd computes the gradients as one vector
    tensor_parts.py   Endpoint.message         a codec encodes the vector; the host gets a copy
                         |
                         |  rpc: the request is sent in pieces and executed once
                         v
    answers.py        Gate.check               the hub checks the request
    answers.py        Answers._update          a codec decodes the vector
    server.py         ParameterServer.update   joins body's and head's gradients of a step
    server.py         ParameterServer._apply   the optimizer takes a step; the version grows by 1

On this path, `Endpoint.decode` refuses a wrong number of bytes, and `ValueChecks.gradients` refuses
NaN, infinite and huge values (both in rpc). `Hub._refused` then drops the worker, which may join
again; or it ends the run, if the hub started this worker or all workers have sent such values.

In a tree of hubs, a child hub acts as a worker of its parent hub. A child hub's `ChildServer` takes
no optimizer steps: it sums the gradients of the child hub's workers, and sends the mean to the
parent hub (`child_server`, `tree`).

Planning uses `config`, `plan`, `split`, `routes` and `hubs_plan`. `job` builds the same model, body
and head in every process. `run` makes this process the hub of a training run or of a rehearsal, in
which layers sleep instead of computing; `child` makes this process a child hub.
"""

from paceline.core.strategy import Options, Planning, Role, Running, Strategy
from paceline.strategies.wheel import plan
from paceline.strategies.wheel.config import MOMENTUM, Wheel


def _roles(config: Wheel) -> tuple[Role, ...]:
    bodies = Role("body", len(config.workers_by_device))
    children = (Role("child hub", config.child_hubs),) if config.child_hubs else ()
    return Role("hub", 1, leads=True), *children, bodies


_PLANNING = Planning(
    plan.plan,
    memory=plan.memory,
    calibrate=None,
    repeats_after=lambda config: config.period,
    sizes=plan.placements,
    trial=f"{__name__}.job",
    shares_devices=True,
    is_asynchronous=True,
    limit=plan.limit,
)
_RUNNING = Running(
    f"{__name__}.run", roles=_roles, remote=f"{__name__}.remote", may_skip_profile=True
)
_OPTIONS = Options(
    frozenset({"codec", "listen", "keys", "run_name", "wait_s"}),
    defaults={"momentum": MOMENTUM, "profile_s": 1.0},
    refused_settings={
        "accumulate": "each batch of a worker is one update; to save memory, reduce batch_size"
    },
    refused_options={"hub": "applies to plans; a run's hub is the machine that starts it"},
)
STRATEGY = Strategy("wheel", Wheel, _PLANNING, _RUNNING, _OPTIONS)
