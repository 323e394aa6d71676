"""Serve as a child hub: what `paceline hub --connect` does.

Model, data, batch and epochs are the parent's to say, and the result is the root's to keep. This
process says in the end what it has gathered, and how many bytes that took.
"""

from collections.abc import Callable
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from rich.console import Console

from paceline.core.errors import InvalidInput
from paceline.data import load
from paceline.models import describe, find
from paceline.settings import validated
from paceline.strategies.wheel.body import agreement, tell_failure
from paceline.strategies.wheel.branch import Parent
from paceline.strategies.wheel.config import Wheel
from paceline.strategies.wheel.job import Job
from paceline.strategies.wheel.lanes import Refused
from paceline.strategies.wheel.order import Run
from paceline.strategies.wheel.outcome import Outcome
from paceline.strategies.wheel.run import train
from paceline.tables import console
from paceline.wheel_live import Live
from paceline.wheel_result import PurposeRow
from paceline.wheel_run import purposes_of, purposes_table, rows_between
from paceline.wheel_settings import config_of
from paceline.wire.client import Client
from paceline.wire.identity import Identity
from paceline.wire.keys import load_client, load_hub

_Seconds = Annotated[float, Field(gt=0, le=1e9)]


class BranchSettings(BaseModel):
    """What a child hub needs to know, beside what its parent says.

    It is worker `number` of the hub at `connect`, to which it shows `parent_keys`. `gather` steps
    of its own `workers` make one update there, by default one of each. `options` are fields of the
    strategy's configuration, for its own workers. Its parent may be away for `deadline_s`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    connect: str
    bind: str
    number: Annotated[int, Field(ge=0, lt=2**32)] = 0
    gather: Annotated[int, Field(ge=1)] | None = None
    parent_keys: Path | None = None
    keys: Path | None = None
    run: str = "wheel"
    workers: Annotated[int, Field(ge=1, le=4096)] = 2
    options: dict[str, Any] = {}
    deadline_s: _Seconds = 30.0
    wait_s: _Seconds = 600.0

    def config(self) -> Wheel:
        """Return the configuration of its own workers; InvalidInput names a field that is wrong."""
        config = config_of(self.options, self.workers)
        if config.head is not None:
            raise InvalidInput("head: the parent hub says where the model is cut")
        if config.staleness_decay:
            raise InvalidInput("staleness_decay: learning rates are the root hub's")
        return config


class BranchResult(BaseModel):
    """What a child hub did: `steps` of each worker, which made `updates` of its parent.

    `staleness` counts steps by how many updates of the root they missed. `purposes` are those of
    its workers, and of its own child hubs; `parent_purposes` what it exchanged with its parent.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    settings: BranchSettings
    model: str
    steps: tuple[int, ...]
    updates: int
    staleness: dict[int, int]
    mean_staleness: float
    purposes: tuple[PurposeRow, ...]
    parent_purposes: tuple[PurposeRow, ...]
    wire_nbytes: tuple[int, int]
    parent_wire_nbytes: tuple[int, int]
    lost: tuple[str, ...]


def validated_branch(values: dict[str, Any]) -> BranchSettings:
    """Return the settings of these fields, or raise InvalidInput that names a wrong one."""
    settings: BranchSettings = validated(TypeAdapter(BranchSettings), values)
    settings.config()
    return settings


def serve_branch(
    settings: BranchSettings, *, as_json: bool = False, quiet: bool = False
) -> BranchResult:
    """Serve this hub's workers until all steps are done, and return what came of it.

    The result goes to standard output, unless `quiet`; progress goes to standard error. Raises
    InvalidInput if the parent refuses this hub, or what it says cannot be done here; WorkerLost if
    the parent is away for longer than the deadline, or no worker is left.
    """
    out, err = console(quiet=quiet), console(stderr=True)

    def say(text: str) -> None:
        err.print(text, soft_wrap=True)

    keys = None if settings.parent_keys is None else load_client(settings.parent_keys)
    identity = Identity(settings.run, agreement(), settings.number)
    client = Client(settings.connect, identity, keys=keys, deadline_s=settings.deadline_s, say=say)
    try:
        result = _served(settings, client, say, err)
    except Refused:
        raise
    except Exception as error:
        tell_failure({settings.number: client}, error)
        raise
    finally:
        client.close()
    if as_json:
        out.print_json(result.model_dump_json())
    else:
        _show(result, out)
    return result


def build(settings: BranchSettings, client: Client, job: Job, say: Callable[[str], None]) -> Run:
    """Load the data, build the model and describe it, as the parent says.

    InvalidInput if they do not fit each other, or this hub's workers.
    """
    if job.pace is not None:
        raise InvalidInput(
            "connect: the hub there rehearses, and trees of hubs cannot be rehearsed"
        )
    config = settings.config()
    place = job.part(settings.number), job.num_parts
    data = load(job.data, job.input_shape, job.seed)
    torch.manual_seed(job.seed)
    model = find(job.model).build(job.num_classes).train()
    size = ceil(job.batch_size / (place[1] * settings.workers))
    return Run(
        model_name=job.model,
        num_classes=job.num_classes,
        data_name=job.data,
        input_shape=job.input_shape,
        model=model,
        workload=describe(model, torch.zeros(size, *data.sample_shape), job.model),
        data=data,
        config=config_of(settings.options | {"head": job.first}, settings.workers),
        make=torch.optim.SGD,  # of no use here: the root's optimizer takes the steps
        batch_size=job.batch_size,
        epochs=job.epochs,
        seed=job.seed,
        device=torch.device("cuda:0" if torch.cuda.is_available() else "cpu"),
        address=settings.bind,
        run_id=settings.run,
        keys=None if settings.keys is None else load_hub(settings.keys),
        profile_s=0.0,
        deadline_s=settings.deadline_s,
        wait_s=settings.wait_s,
        parent=Parent(client, job, settings.gather or config.workers),
        place=place,
        prepared=lambda address, _: say(
            f"listening on {address}; waiting for {settings.workers} workers"
        ),
        say=say,
    )


def _served(
    settings: BranchSettings, client: Client, say: Callable[[str], None], err: Console
) -> BranchResult:
    job = Job.of(client.settings)
    run = build(settings, client, job, say)
    say(
        f"{job.model}: worker {settings.number} of the hub at {settings.connect}, and a hub of "
        f"{settings.workers} workers, {run.config.lanes} a device"
    )
    with Live(err, len(run.data.train) * run.epochs // run.place[1]) as live:
        outcome = train(replace(run, look=live.look))
    traffic = client.traffic.sent_nbytes, client.traffic.received_nbytes
    return result_of(settings, job.model, outcome, traffic)


def result_of(
    settings: BranchSettings, model: str, outcome: Outcome, traffic: tuple[int, int]
) -> BranchResult:
    """Return the result; `traffic` is what was sent to the parent and came from it."""
    done = outcome.updates
    return BranchResult(
        settings=settings,
        model=model,
        steps=done.steps,
        updates=outcome.num_pushed,
        staleness=dict(done.staleness),
        mean_staleness=done.mean_staleness,
        purposes=purposes_of(outcome),
        parent_purposes=rows_between(outcome.to_parent),
        wire_nbytes=outcome.wire_nbytes,
        parent_wire_nbytes=traffic,
        lost=tuple(outcome.tally.lost),
    )


def _show(result: BranchResult, out: Console) -> None:
    out.print(purposes_table("Bytes by purpose", result.purposes))
    out.print(purposes_table("Bytes to and from the parent", result.parent_purposes))
    out.print(f"updates    {result.updates:,} of the parent, of {sum(result.steps):,} steps here")
    out.print(f"staleness  {result.mean_staleness:.2f} of the root's updates on average")
