"""The commands `hub` and `worker`, for workers on other machines."""

from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.commands.options import Debug, Json, print_json, with_options
from paceline.core.errors import InvalidInput
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
_CHILD_HELP = {name: one.description for name, one in _CHILD.ChildSettings.model_fields.items()}
_NUMBERS = WorkerProcessSettings.model_fields["workers"].description
_NOT_OF_HUB = ("policy", "port")


@with_options(TrainSettings, leave_out=_NOT_OF_HUB, required=False, strategy=_STRATEGY)
def hub(
    values: dict[str, Any],
    *,
    strategy: Annotated[
        str | None,
        typer.Option(help=f"{' or '.join(_REMOTE)}; {_STRATEGY.name} by default."),
    ] = None,
    generate_keys: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write new keys there, and end.")
    ] = None,
    connect: Annotated[str | None, typer.Option(help=_CHILD_HELP["connect"])] = None,
    number: Annotated[int | None, typer.Option("--as", help=_CHILD_HELP["number"])] = None,
    gather: Annotated[int | None, typer.Option(help=_CHILD_HELP["gather"])] = None,
    parent_keys: Annotated[Path | None, typer.Option(help=_CHILD_HELP["parent_keys"])] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Serve workers of other machines, which join by `paceline worker`."""
    from paceline.runs import launching

    if generate_keys is not None:
        from paceline.rpc import keys

        written = [str(path) for path in keys.generate_keys(generate_keys)]
        print_json({"written": written}) if as_json else typer.echo("\n".join(written))
        return
    known = {"as": number, "gather": gather, "parent_keys": parent_keys}
    own = {name: value for name, value in known.items() if value is not None}
    if strategy is not None:
        values["strategy"] = strategy
    if connect is not None:
        named = values.pop("strategy", _STRATEGY.name)
        if named != _STRATEGY.name:
            raise InvalidInput("connect", f"a hub of {named} is no worker of another")
        _serve_parent({**values, **own, "connect": connect}, as_json)
        return
    for name in own:
        raise InvalidInput(name, "goes only with connect, for a child hub")
    if not {"model", "resume"} & values.keys():
        raise InvalidInput("model", "name what to train, or a folder by --generate-keys")
    if "bind" not in values:
        raise InvalidInput("bind", "name the address that workers reach, as tcp://10.0.0.1:5555")
    given = values if "resume" in values else {"strategy": _STRATEGY.name, **values}
    named = given.get("strategy", _STRATEGY.name)
    if named not in _REMOTE:
        raise InvalidInput("strategy", f"a hub is one of {', '.join(_REMOTE)}, not {named}")
    launching.carry_out(launching.requested("train", given, as_json=as_json, debug=debug))


def _serve_parent(values: dict[str, Any], as_json: bool) -> None:
    from paceline.records.settings import validated, without_shorthands
    from paceline.report.format import nbytes
    from paceline.report.terminal import console, log_to_stderr, traffic_table
    from paceline.runs.progress import TerminalProgress

    for name in values:
        if name not in (*_CHILD_HELP, "as", "codec"):
            raise InvalidInput(name, "is the root hub's to say", hint="leave it out with connect")
    if "bind" not in values:
        raise InvalidInput("bind", "name the address that workers reach, as tcp://10.0.1.1:5555")
    values = without_shorthands(values, _STRATEGY)
    values["number"] = values.pop("as", 0)
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
    numbers: Annotated[str | None, typer.Option("--as", help=_NUMBERS)] = None,
    debug: Debug = False,
) -> None:
    """Work for a hub, on one device. The hub says on what, and with which strategy."""
    from paceline.records.settings import validated
    from paceline.report.terminal import log_to_stderr
    from paceline.runs.working import work

    if numbers is not None:
        values["workers"] = numbers
    log_to_stderr()
    work(validated(WorkerProcessSettings, values))
