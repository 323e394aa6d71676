"""The commands `hub`, `worker` and `keys`, for workers on other machines."""

import json
import logging
from collections.abc import Mapping
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import parse_qsl

import typer

from paceline.commands.options import Json, option, with_options
from paceline.core.errors import InvalidInput
from paceline.core.names import not_known
from paceline.core.settings import TrainSettings
from paceline.rpc.connecting import WorkerProcessSettings
from paceline.strategies import STRATEGIES, find_runnable

_REMOTE = {
    name: one.running.remote
    for name, one in STRATEGIES.items()
    if one.running is not None and one.running.remote is not None
}
_STRATEGY = STRATEGIES[next(iter(_REMOTE))]
_CHILD = import_module(_REMOTE[_STRATEGY.name])
_NUMBERS = f"{WorkerProcessSettings.model_fields['workers'].description} Default: 0,1."
# Settings for which `hub` has no option; --config or --strategy-option sets them.
_LEFT_OUT = (
    *("accumulate", "balance", "clip_norm", "elastic", "evaluate_every"),
    *("keep_all", "optimizer", "optimizer_options"),
    *("precision", "max_restarts", "schedule", "strategy", "tensorboard", "warmup_steps"),
    *("keep_checkpoints", "seed"),
)
# Parameters in the URL of --parent, and the fields of `ChildSettings` that they set.
_OF_PARENT = {"worker": "number", "keys": "parent_keys", "gather": "gather"}

logger = logging.getLogger(__name__)


@with_options(TrainSettings, leave_out=_LEFT_OUT, required=False, strategy=_STRATEGY)
def hub(
    values: dict[str, Any],
    *,
    parent: Annotated[
        str | None,
        option(
            "URL",
            "URL of the hub whose worker this hub becomes, with the worker's number, such as "
            "tcp://10.0.0.1:5555?worker=0&keys=FOLDER.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Serve workers on other machines; a worker joins with `paceline worker`."""
    from paceline.runs import launching

    if parent is not None:
        if values.pop("strategy", _STRATEGY.name) != _STRATEGY.name:
            raise InvalidInput("parent", f"requires strategy {_STRATEGY.name}")
        _serve_parent({**values, **_parent(parent)}, as_json)
        return
    if not {"model", "resume"} & values.keys():
        raise InvalidInput("model", "is missing", hint="name a model, or a run with --resume")
    _check_listen(values)
    given = values if "resume" in values else {"strategy": _STRATEGY.name, **values}
    named = given.get("strategy", _STRATEGY.name)
    if named not in _REMOTE:
        raise InvalidInput("strategy", f"must be {' or '.join(_REMOTE)}", got=named)
    launching.carry_out(launching.requested("train", given, as_json=as_json))


def _check_listen(values: Mapping[str, Any]) -> None:
    if "listen" not in values:
        raise InvalidInput("listen", "is missing", hint="add --listen tcp://10.0.0.1:5555")


def _parent(url: str) -> dict[str, Any]:
    """Parse the URL of a parent hub into settings of the child hub."""
    address, _, query = url.partition("?")
    try:
        parts = parse_qsl(query, strict_parsing=True) if query else []
    except ValueError:
        problem = "must end in a query such as ?worker=0&keys=FOLDER"
        raise InvalidInput("parent", problem, got=url) from None
    for name, _ in parts:
        if name not in _OF_PARENT:
            raise not_known("parent", name, list(_OF_PARENT))
    return {"connect": address} | {_OF_PARENT[name]: value for name, value in parts}


def _serve_parent(values: dict[str, Any], as_json: bool) -> None:
    from paceline.core.reading import validated
    from paceline.records.settings import without_shorthands
    from paceline.report.format import nbytes
    from paceline.report.tables import traffic_table
    from paceline.report.terminal import console, log_to_stderr, shown
    from paceline.rpc.workers import connected
    from paceline.runs.progress import TerminalProgress

    for name in values:
        if name not in (*_CHILD.ChildSettings.model_fields, "codec"):
            raise InvalidInput(
                name, "cannot be combined with --parent", hint="set it at the root hub"
            )
    _check_listen(values)
    values = without_shorthands(values, _STRATEGY)
    settings = validated(_CHILD.ChildSettings, values)
    settings.config()  # check options before connecting
    log_to_stderr()
    out, err = console(), console(stderr=True)
    serving = import_module(_CHILD.SERVING)
    with (
        closing(TerminalProgress(err, "serving")) as progress,
        connected(settings, settings.parent_keys) as clients,
    ):
        result = serving.take_part(settings, clients, progress)
    if as_json:
        out.print_json(result.model_dump_json())
        return
    out.print(shown("Bytes by purpose", traffic_table(result.traffic), gap=2))
    to_parent = traffic_table(result.parent_traffic)
    out.print(shown("Bytes to and from the parent", to_parent, gap=2))
    steps, stale = result.updates.count, result.updates.mean_staleness
    sent, received = map(nbytes, result.parent_wire_nbytes)
    out.print(f"updates    {result.num_pushed:,} pushed to the parent after {steps:,} steps here")
    out.print(f"staleness  {stale:.2f} updates of the root on average")
    out.print(f"parent     {sent} sent and {received} received, with headers")


@with_options(WorkerProcessSettings, leave_out=("workers",))
def worker(
    values: dict[str, Any],
    *,
    numbers: Annotated[str | None, option("INT,…", _NUMBERS, "--worker-ids")] = None,
) -> None:
    """Run workers on one device for a hub, which sends the model, data and strategy."""
    from paceline.core.reading import validated
    from paceline.links.devices import device_named
    from paceline.report.terminal import log_to_stderr
    from paceline.rpc.workers import connected, listed

    if numbers is not None:
        values["workers"] = numbers
    log_to_stderr()
    settings = validated(WorkerProcessSettings, values)
    if settings.device is not None:
        device_named(settings.device)  # check before connecting
    with connected(settings, settings.keys) as clients:
        name = json.loads(clients[settings.numbers[0]].settings)["strategy"]
        running = find_runnable(name).running
        if running is None or running.remote is None:
            raise InvalidInput("strategy", f"{name}, used by the hub, supports no remote workers")
        working = import_module(running.remote).WORKING
        import_module(working).take_part(settings, clients)
    logger.info("workers %s: done", listed(settings.numbers))


def keys(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write the keys to.")],
) -> None:
    """Write new keys, with which a hub and its workers encrypt and authenticate messages."""
    from paceline.rpc.keys import generate_keys

    typer.echo("\n".join(map(str, generate_keys(folder))))
