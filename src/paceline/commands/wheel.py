"""Commands of strategy wheel across machines: hub and worker."""

from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.commands.options import (
    BatchSize,
    Codec,
    Data,
    Deadline,
    Debug,
    Json,
    LearningRate,
    Options,
    Output,
    Resume,
    Snapshots,
    SnapshotSeconds,
    fields,
    print_json,
)
from paceline.core.errors import InvalidInput

_NOT_SETTINGS = ("context", "options", "codec", "as_json", "debug", "generate_keys")
_OF_CHILD = ("connect", "number", "gather", "parent_keys")
_ALSO_OF_CHILD = ("bind", "keys", "run", "workers", "deadline_s", "wait_s")
Keys = Annotated[
    Path | None, typer.Option(help="The folder of keys that --generate-keys has written.")
]
RunName = Annotated[str, typer.Option("--run", help="What hub and workers call their run.")]


def hub(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Argument(help="A built-in name, or package.module:factory.")
    ] = None,
    bind: Annotated[
        str | None, typer.Option(help="The address to listen on, such as tcp://10.0.0.1:5555.")
    ] = None,
    generate_keys: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write new keys there, and end.")
    ] = None,
    keys: Keys = None,
    connect: Annotated[
        str | None, typer.Option(help="A parent hub, which takes this one for a worker.")
    ] = None,
    number: Annotated[int, typer.Option("--as", help="The number of that worker.")] = 0,
    gather: Annotated[
        int | None, typer.Option(help="Steps that go to the parent together; one of each worker.")
    ] = None,
    parent_keys: Annotated[
        Path | None, typer.Option(help="The folder with the parent's hub.pub, and a worker.key.")
    ] = None,
    run: RunName = "wheel",
    data: Data = "digits",
    workers: Annotated[int, typer.Option(help="Body workers, over all machines.")] = 2,
    options: Options = None,
    codec: Codec = None,
    optimizer: Annotated[
        str, typer.Option(help="One of torch's, or package.module:factory.")
    ] = "sgd",
    epochs: Annotated[int, typer.Option(help="Passes over the training samples.")] = 3,
    batch_size: BatchSize = 64,
    learning_rate: LearningRate = None,
    momentum: Annotated[float, typer.Option(help="Of the updates.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the weights, the split and the order.")] = 0,
    snapshots: Snapshots = None,
    snapshot_s: SnapshotSeconds = 60.0,
    resume: Resume = False,
    profile_s: Annotated[
        float, typer.Option(help="How long workers measure before the first step; 0: not.")
    ] = 1.0,
    deadline_s: Deadline = 30.0,
    wait_s: Annotated[float, typer.Option(help="How long to wait for workers.")] = 600.0,
    output: Output = Path("runs"),
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Serve the workers of strategy wheel: the parameter server, and the heads beside it."""
    settings = {name: value for name, value in locals().items() if name not in _NOT_SETTINGS}
    if generate_keys is not None:
        _generate(generate_keys, as_json)
        return
    given = [name for name in settings if _is_given(context, name)]
    if connect is not None:
        _serve_parent(settings, given, options, codec, as_json)
        return
    settings = {name: value for name, value in settings.items() if name not in _OF_CHILD}
    for name in given:
        if name in _OF_CHILD:
            raise InvalidInput(f"{_option(name)}: goes only with connect, for a child hub")
    if model is None:
        raise InvalidInput("model: name what to train, or a folder by --generate-keys")
    if bind is None:
        raise InvalidInput("bind: name the address that workers reach, as tcp://10.0.0.1:5555")
    train(settings, options, codec, as_json)


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _option(name: str) -> str:
    return "as" if name == "number" else name


def _serve_parent(
    settings: dict[str, Any],
    given: list[str],
    options: list[str] | None,
    codec: str | None,
    as_json: bool,
) -> None:
    """Have this process be a hub that is the child of another."""
    from paceline.wheel_branch import serve_branch, validated_branch

    known = (*_OF_CHILD, *_ALSO_OF_CHILD)
    for name in given:
        if name not in known:
            raise InvalidInput(f"{name}: is the root hub's to say; leave it out with connect")
    if settings["bind"] is None:
        raise InvalidInput("bind: name the address that workers reach, as tcp://10.0.1.1:5555")
    chosen = with_codecs(fields(options), codec)
    own = {name: settings[name] for name in known}
    serve_branch(validated_branch(own | {"options": chosen}), as_json=as_json)


def _generate(folder: Path, as_json: bool) -> None:
    from paceline.wire.keys import generate

    written = [str(path) for path in generate(folder)]
    if as_json:
        print_json({"written": written})
    else:
        typer.echo("\n".join(written))


def train(
    settings: dict[str, Any], options: list[str] | None, codec: str | None, as_json: bool
) -> None:
    """Have this process be the hub."""
    from paceline import launching
    from paceline.wheel_run import train_wheel
    from paceline.wheel_settings import validated_wheel

    if launching.under_torchrun():
        raise InvalidInput("strategy: wheel starts its workers itself; run it without torchrun")
    chosen = with_codecs(fields(options), codec)
    train_wheel(validated_wheel(settings | {"options": chosen}), as_json=as_json)


def with_codecs(chosen: dict[str, Any], codec: str | None) -> dict[str, Any]:
    """Return the fields of --set and those that --codec stands for; they must not differ."""
    from paceline.wheel_settings import codec_options

    for field, value in codec_options(codec).items():
        if chosen.setdefault(field, value) != value:
            raise InvalidInput(f"codec: {field} travels by {value!r}, but --set says otherwise")
    return chosen


def worker(
    connect: Annotated[str, typer.Option(help="Where the hub listens: tcp://10.0.0.1:5555.")],
    workers: Annotated[
        str | None,
        typer.Option(help="Numbers of the workers that alternate on the device; 0,1."),
    ] = None,
    lanes: Annotated[int, typer.Option(min=1, help="Or how many there are, from 0 up.")] = 2,
    device: Annotated[
        str | None, typer.Option(help="cpu, or cuda:0; a GPU if there is one.")
    ] = None,
    keys: Keys = None,
    run: RunName = "wheel",
    threads: Annotated[int, typer.Option(min=0, help="Of a CPU; 0 leaves them.")] = 0,
    deadline_s: Annotated[float, typer.Option(help="How long the hub may be away.")] = 60.0,
    debug: Debug = False,
) -> None:
    """Work for a hub: the bodies of strategy wheel, on one device. The hub says on what."""
    import torch

    from paceline.strategies.wheel.body import Post, print_line, work
    from paceline.wheel_settings import numbers

    if not 0 < deadline_s < 1e9:
        raise InvalidInput(f"deadline_s: must be a positive number of seconds, not {deadline_s}")
    found = numbers(workers) if workers is not None else tuple(range(lanes))
    usual = "cuda:0" if torch.cuda.is_available() else "cpu"
    post = Post(
        address=connect,
        run_id=run,
        workers=found,
        device=device or usual,
        keys=keys,
        deadline_s=deadline_s,
        threads=threads,
    )
    work(post, print_line)
    print_line(f"{','.join(map(str, found))}: done")
