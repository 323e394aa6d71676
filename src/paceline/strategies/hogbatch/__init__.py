"""Strategy hogbatch: asynchronous workers train one shared model (Ma, Rusu et al. 2020)."""

from paceline.core.strategy import Options, Planning, Role, Running, Strategy
from paceline.strategies.hogbatch import plan
from paceline.strategies.hogbatch.config import Hogbatch, parse_workers

_PLANNING = Planning(
    plan.plan,
    memory=plan.memory,
    calibrate=None,
    # The planner compares the two policies that suit devices of different speeds.
    variants=lambda workers: [Hogbatch(workers, policy) for policy in ("adaptive", "cpu_gpu")],
    is_asynchronous=True,
)
_RUNNING = Running(
    f"{__name__}.run",
    roles=lambda config: (Role("coordinator", 1, leads=True), Role("worker", config.workers)),
    is_rehearsed=False,
)
_OPTIONS = Options(
    frozenset({"keep_all"}),
    refused_settings={
        "accumulate": "every batch updates the model; for smaller batches set batch_size, or "
        "--strategy-option cpu_batch=[1,16]",
        "evaluate_every": "workers do not step together; the model is tested after each epoch",
    },
    refused_options={"threads": "is part of workers, as in cpu:4"},
    count_workers=lambda workers: len(parse_workers(workers)),
)
STRATEGY = Strategy("hogbatch", Hogbatch, _PLANNING, _RUNNING, _OPTIONS)
