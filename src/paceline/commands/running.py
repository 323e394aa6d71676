"""Commands that start workers: train, rehearse, and plan on this machine."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from paceline.commands.options import (
    BatchSize,
    Data,
    Deadline,
    Debug,
    InputShape,
    Json,
    Model,
    Options,
    Output,
    Port,
    ProfileSeconds,
    StrategyName,
    Workers,
    common,
    shape,
)

_NOT_SETTINGS = ("options", "workers", "as_json", "debug")
Milliseconds = Annotated[float | None, typer.Option(help="What all layers take together.")]


def train(
    model: Model,
    data: Data = "digits",
    strategy: StrategyName = "allreduce",
    options: Options = None,
    workers: Workers = None,
    epochs: Annotated[int, typer.Option(help="Passes over the training samples.")] = 3,
    batch_size: BatchSize = 64,
    learning_rate: Annotated[float, typer.Option(help="Of SGD with momentum.")] = 0.05,
    momentum: Annotated[float, typer.Option(help="Of SGD.")] = 0.9,
    seed: Annotated[int, typer.Option(help="Of the weights, the split and the order.")] = 0,
    profile_s: ProfileSeconds = 4.0,
    deadline_s: Deadline = 30.0,
    port: Port = 0,
    output: Output = Path("runs"),
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Profile, plan and train a model, and write its result, trace and report."""
    settings = {name: value for name, value in locals().items() if name not in _NOT_SETTINGS}
    carry_out("train", settings | common(options, workers), as_json, debug)


def rehearse(
    model: Model,
    device: Annotated[
        str | None,
        typer.Option(help="Whose time layers take: a device of a machine file, or FILE.toml:NAME."),
    ] = None,
    stretch: Annotated[
        float | None, typer.Option(help="Or compute here, each layer slowed so many times.")
    ] = None,
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
    deadline_s: Deadline = 30.0,
    port: Port = 0,
    output: Output = Path("runs"),
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Rehearse training on devices you need not have: real exchange, layers that only take time."""
    settings = {name: value for name, value in locals().items() if name not in _NOT_SETTINGS}
    settings["input_shape"] = shape(input_shape)
    carry_out("rehearse", settings | common(options, workers), as_json, debug)


def carry_out(
    verb: Literal["train", "plan", "rehearse"], settings: dict[str, Any], as_json: bool, debug: bool
) -> None:
    """Check the settings, and have workers do it."""
    from paceline import launching

    launching.carry_out(launching.order(verb, settings, as_json=as_json, debug=debug))
