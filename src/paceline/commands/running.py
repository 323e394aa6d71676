"""Commands that start workers: train, rehearse, and plan on this machine."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from paceline.commands.options import (
    BatchSize,
    Codec,
    Data,
    Deadline,
    Debug,
    InputShape,
    Json,
    LearningRate,
    Model,
    Options,
    Output,
    Port,
    ProfileSeconds,
    Resume,
    Snapshots,
    StrategyName,
    Workers,
    WorkersOrList,
    common,
    fields,
    number_of,
    shape,
    with_codecs,
)
from paceline.core.errors import InvalidInput

_NOT_SETTINGS = ("options", "workers", "as_json", "debug")
_OF_WHEEL = ("codec", "snapshots", "snapshot_s", "resume")
_NOT_OF_WHEEL = ("port", "balance", "force", "tensorboard")
_REHEARSED_BY_WHEEL = ("codec", "bind", "keys", "run", "wait_s", "profile_s")
_NOT_REHEARSED_BY_WHEEL = (
    *("stretch", "balance", "port"),
    *("chunk_search", "search_step", "search_range", "interval"),
)
Balance = Annotated[
    str | None, typer.Option(help="auto: the workers' parts of a batch follow their speeds.")
]
Milliseconds = Annotated[float | None, typer.Option(help="What all layers take together.")]


def train(
    model: Model,
    data: Data = "digits",
    strategy: StrategyName = "allreduce",
    options: Options = None,
    policy: Annotated[
        str | None, typer.Option(help="Of hogbatch: who gets how many samples; adaptive.")
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(help="Of hogbatch and wheel: one of torch's, or package.module:factory."),
    ] = None,
    codec: Codec = None,
    workers: WorkersOrList = None,
    epochs: Annotated[int, typer.Option(help="Passes over the training samples.")] = 3,
    batch_size: BatchSize = 64,
    learning_rate: LearningRate = None,
    momentum: Annotated[float | None, typer.Option(help="0.9; with hogbatch and wheel 0.")] = None,
    seed: Annotated[int, typer.Option(help="Of the weights, the split and the order.")] = 0,
    balance: Balance = None,
    force: Annotated[
        bool | None, typer.Option("--force", help="Take workers that do not help, too.")
    ] = None,
    profile_s: ProfileSeconds = 4.0,
    snapshots: Snapshots = None,
    snapshot_s: Annotated[
        float | None, typer.Option(help="Of wheel: how often the server is kept; 60.")
    ] = None,
    resume: Resume = False,
    deadline_s: Deadline = 30.0,
    port: Port = 0,
    output: Output = Path("runs"),
    tensorboard: Annotated[
        Path | None, typer.Option(help="Where a folder for TensorBoard is made; an extra.")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Profile, plan and train a model, and write its result, trace and report."""
    settings = {name: value for name, value in locals().items() if name not in _NOT_SETTINGS}
    settings = {name: value for name, value in settings.items() if value is not None}
    if not settings["resume"]:
        del settings["resume"]
    if strategy == "wheel":
        _train_wheel(settings, options, workers, as_json)
        return
    if strategy == "subbatch":
        settings.pop("codec", None)
    for name in _OF_WHEEL:
        if name in settings:
            others = " or subbatch" if name == "codec" else ""
            raise InvalidInput(f"{name}: goes only with strategy wheel{others}")
    if strategy == "hogbatch":
        _train_uneven(settings, options, workers, as_json)
        return
    settings |= common(options, number_of(workers))
    if codec is not None:
        settings["options"] = with_codecs(settings["options"], codec)
    carry_out("train", settings, as_json, debug)


def _train_wheel(
    settings: dict[str, Any], options: list[str] | None, workers: str | None, as_json: bool
) -> None:
    """Have this process be the hub of strategy wheel, and start the bodies."""
    from paceline.commands import wheel

    if "policy" in settings:
        raise InvalidInput("policy: goes only with strategy hogbatch")
    for name in _NOT_OF_WHEEL:
        if settings.pop(name, None):
            raise InvalidInput(f"{name}: goes not with strategy wheel")
    number = number_of(workers)
    settings |= {} if number is None else {"workers": number}
    wheel.train(settings, options, settings.pop("codec", None), as_json)


def _train_uneven(
    settings: dict[str, Any], options: list[str] | None, workers: str | None, as_json: bool
) -> None:
    """Have this process coordinate the workers of strategy hogbatch."""
    from paceline import launching, uneven

    if launching.under_torchrun():
        raise InvalidInput("strategy: hogbatch starts its workers itself; run it without torchrun")
    if "tensorboard" in settings:
        raise InvalidInput("tensorboard: goes not with strategy hogbatch")
    settings |= {"options": fields(options)} | ({} if workers is None else {"workers": workers})
    uneven.train_uneven(uneven.order(settings), as_json=as_json)


def rehearse(
    model: Model,
    device: Annotated[
        str | None,
        typer.Option(help="Whose time layers take: a device of a machine file, or FILE.toml:NAME."),
    ] = None,
    stretch: Annotated[
        str | None,
        typer.Option(
            metavar="TIMES", help="Or compute here, each layer slowed 4 times; or 1,4 by worker."
        ),
    ] = None,
    balance: Balance = None,
    forward_ms: Milliseconds = None,
    backward_ms: Milliseconds = None,
    update_ms: Annotated[float | None, typer.Option(help="What the update takes.")] = None,
    strategy: StrategyName = "allreduce",
    options: Options = None,
    workers: Workers = None,
    batch_size: BatchSize = 64,
    input_shape: InputShape = None,
    steps: Annotated[int, typer.Option(help="How many are measured.")] = 20,
    chunk_search: Annotated[
        str | None, typer.Option(help="Look for host's chunk first: runtime or predicted.")
    ] = None,
    search_step: Annotated[int | None, typer.Option(help="Of the runtime search; 5.")] = None,
    search_range: Annotated[int | None, typer.Option(help="Of the runtime search; 5.")] = None,
    interval: Annotated[int | None, typer.Option(help="Steps of a trial of a search; 10.")] = None,
    codec: Codec = None,
    bind: Annotated[
        str | None, typer.Option(help="Of wheel: the address for workers of other machines.")
    ] = None,
    keys: Annotated[
        Path | None, typer.Option(help="Of wheel: the folder of keys, as for paceline hub.")
    ] = None,
    run: Annotated[
        str | None, typer.Option("--run", help="Of wheel: what hub and workers call their run.")
    ] = None,
    wait_s: Annotated[
        float | None, typer.Option(help="Of wheel: how long to wait for workers; 600.")
    ] = None,
    profile_s: Annotated[
        float | None, typer.Option(help="Of wheel: how long to measure before; 1, or 0: not.")
    ] = None,
    deadline_s: Deadline = 30.0,
    port: Port = 0,
    output: Output = Path("runs"),
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Rehearse training on devices you need not have: real exchange, layers that only take time."""
    settings = {name: value for name, value in locals().items() if name not in _NOT_SETTINGS}
    settings["input_shape"] = shape(input_shape)
    if strategy == "wheel":
        _rehearse_wheel(settings | common(options, workers), as_json)
        return
    settings |= common(options, workers)
    if strategy == "subbatch":
        settings["options"] = with_codecs(settings["options"], settings["codec"])
        settings["codec"] = None
    for name in _REHEARSED_BY_WHEEL:
        if settings.pop(name) is not None:
            raise InvalidInput(f"{name}: goes only with strategy wheel")
    carry_out("rehearse", settings, as_json, debug)


def _rehearse_wheel(settings: dict[str, Any], as_json: bool) -> None:
    """Have this process be the hub of a rehearsal, and start the bodies or wait for them."""
    from paceline import launching
    from paceline.commands.wheel import with_codecs
    from paceline.wheel_rehearsal import rehearse_wheel
    from paceline.wheel_settings import validated_wheel_rehearsal

    if launching.under_torchrun():
        raise InvalidInput("strategy: wheel starts its workers itself; run it without torchrun")
    for name in _NOT_REHEARSED_BY_WHEEL:
        if settings.pop(name):
            raise InvalidInput(f"{name}: goes not with strategy wheel")
    settings["options"] = with_codecs(settings["options"], settings.pop("codec"))
    given = {name: value for name, value in settings.items() if value is not None}
    if "device" not in given:
        raise InvalidInput("device: name the device whose time layers take, as k40-gigabit/gpu0")
    rehearse_wheel(validated_wheel_rehearsal(given), as_json=as_json)


def carry_out(
    verb: Literal["train", "plan", "rehearse"],
    settings: dict[str, Any],
    as_json: bool,
    debug: bool,
    keep: bool = False,
) -> None:
    """Check the settings, and have workers do it; a plan is written down only to `keep` it."""
    from paceline import launching

    order = launching.order(verb, settings, as_json=as_json, debug=debug, keep=keep)
    launching.carry_out(order)
