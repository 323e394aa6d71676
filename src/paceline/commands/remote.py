"""The commands `hub`, `worker` and `keys`, for workers on other machines."""

from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import parse_qsl

import typer

from paceline.commands.options import Debug, Json, print_json, with_options
from paceline.core.errors import InvalidInput
from paceline.core.names import not_known
from paceline.core.settings import TrainSettings
from paceline.rpc.connecting import WorkerProcessSettings
from paceline.strategies import STRATEGIES

_REMOTE = {
    name: one.running.remote
    for name, one in STRATEGIES.items()
    if one.running is not None and one.running.remote is not None
}
_STRATEGY = STRATEGIES[next(iter(_REMOTE))]
_CHILD = import_module(_REMOTE[_STRATEGY.name])
_NUMBERS = WorkerProcessSettings.model_fields["workers"].description
# Settings of a training that a hub takes from --config only.
_LEFT_OUT = (
    *("accumulate", "balance", "clip_norm", "codec", "elastic", "evaluate_every"),
    *("exchange_alone", "force", "worker_ids", "lighthouse", "optimizer", "optimizer_options"),
    *("precision", "max_restarts", "schedule", "strategy", "tensorboard", "warmup_steps"),
)
# Parts of the query of --parent, and the settings of a child hub that they are.
_OF_PARENT = {"worker": "number", "keys": "parent_keys", "gather": "gather"}


@with_options(TrainSettings, leave_out=_LEFT_OUT, required=False, strategy=_STRATEGY)
def hub(
    values: dict[str, Any],
    *,
    parent: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Hub of which this one is a worker: tcp://10.0.0.1:5555?worker=0&keys=FOLDER.",
        ),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Serve workers of other machines, which join by `paceline worker`."""
    from paceline.runs import launching

    if parent is not None:
        if values.pop("strategy", _STRATEGY.name) != _STRATEGY.name:
            raise InvalidInput("parent", f"only a hub of {_STRATEGY.name} is a worker of another")
        _serve_parent({**values, **_parent(parent)}, as_json)
        return
    if not {"model", "resume"} & values.keys():
        raise InvalidInput("model", "a hub needs a model to train", hint="name one, or --resume")
    if "listen" not in values:
        raise InvalidInput("listen", "name the address that workers reach, as tcp://10.0.0.1:5555")
    given = values if "resume" in values else {"strategy": _STRATEGY.name, **values}
    named = given.get("strategy", _STRATEGY.name)
    if named not in _REMOTE:
        raise InvalidInput("strategy", f"a hub is one of {', '.join(_REMOTE)}, not {named}")
    launching.carry_out(launching.requested("train", given, as_json=as_json, debug=debug))


def _parent(url: str) -> dict[str, Any]:
    """Return the settings of a child hub in the URL of its parent."""
    address, _, query = url.partition("?")
    try:
        parts = parse_qsl(query, strict_parsing=True) if query else []
    except ValueError:
        raise InvalidInput("parent", f"{query!r} is not of the form worker=0&keys=FOLDER") from None
    for name, _ in parts:
        if name not in _OF_PARENT:
            raise not_known("parent", name, list(_OF_PARENT))
    return {"connect": address} | {_OF_PARENT[name]: value for name, value in parts}


def _serve_parent(values: dict[str, Any], as_json: bool) -> None:
    from paceline.records.settings import validated, without_shorthands
    from paceline.report.format import nbytes
    from paceline.report.terminal import console, log_to_stderr, traffic_table
    from paceline.runs.progress import TerminalProgress

    for name in values:
        if name not in (*_CHILD.ChildSettings.model_fields, "codec"):
            raise InvalidInput(name, "the root hub decides it", hint="leave it out with --parent")
    if "listen" not in values:
        raise InvalidInput("listen", "name the address that workers reach, as tcp://10.0.1.1:5555")
    values = without_shorthands(values, _STRATEGY)
    settings = validated(_CHILD.ChildSettings, values)
    log_to_stderr()
    out, err = console(), console(stderr=True)
    with closing(TerminalProgress(err, "serving")) as progress:
        result = import_module(_CHILD.SERVING).serve_child(settings, progress)
    if as_json:
        out.print_json(result.model_dump_json())
        return
    out.print(traffic_table(result.traffic))
    out.print(traffic_table(result.parent_traffic, "Bytes to and from the parent"))
    steps, stale = result.updates.count, result.updates.mean_staleness
    sent, received = map(nbytes, result.parent_wire_nbytes)
    out.print(f"updates    {result.num_pushed:,} of the parent, of {steps:,} steps here")
    out.print(f"staleness  {stale:.2f} of the root's updates on average")
    out.print(f"parent     {sent} sent there and {received} received, with headers")


@with_options(WorkerProcessSettings, leave_out=("workers",))
def worker(
    values: dict[str, Any],
    *,
    numbers: Annotated[
        str | None, typer.Option("--worker-ids", metavar="INT,…", help=_NUMBERS)
    ] = None,
    debug: Debug = False,
) -> None:
    """Work for a hub, on one device. The hub sends the model, the data and the strategy."""
    from paceline.records.settings import validated
    from paceline.report.terminal import log_to_stderr
    from paceline.runs.working import work

    if numbers is not None:
        values["workers"] = numbers
    log_to_stderr()
    work(validated(WorkerProcessSettings, values))


def keys(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder that gets the keys.")],
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Write new keys for a hub and its workers, which encrypt and authenticate what they send."""
    from paceline.rpc.keys import generate_keys

    written = [str(path) for path in generate_keys(folder)]
    print_json({"written": written}) if as_json else typer.echo("\n".join(written))
