"""The command that says where a model's step goes: profile."""

from pathlib import Path
from typing import Annotated

import typer

from paceline.commands.options import (
    BatchSize,
    Deadline,
    Debug,
    Json,
    Model,
    Options,
    Output,
    Port,
    fields,
)

_NOT_SETTINGS = ("options", "as_json", "debug")


def profile(
    model: Model,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="SPEC", help="As for train; without it synthetic ones of the model's shape."
        ),
    ] = None,
    batch_size: BatchSize = 64,
    workers: Annotated[int, typer.Option(help="Worker processes.")] = 1,
    strategy: Annotated[str, typer.Option(help="How workers exchange gradients.")] = "allreduce",
    options: Options = None,
    steps: Annotated[
        int, typer.Option(help="How many are measured as they are, and as many recorded.")
    ] = 20,
    largest_batch: Annotated[
        bool, typer.Option("--largest-batch", help="Search for the largest batch that fits.")
    ] = False,
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="What a worker may have in that search, as 8GiB."),
    ] = None,
    attempt_s: Annotated[
        float | None, typer.Option(help="How long an attempt of that search may take; 120.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the weights and the data.")] = 0,
    deadline_s: Deadline = 30.0,
    port: Port = 0,
    output: Output = Path("runs"),
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure where a step goes, layer by layer: times, waits, memory, and what limits."""
    settings = {name: value for name, value in locals().items() if name not in _NOT_SETTINGS}
    given = {name: value for name, value in settings.items() if value is not None}
    from paceline.profile_settings import validated_profile
    from paceline.profiling.launching import carry_out

    wanted = validated_profile(given | {"options": fields(options)})
    carry_out(wanted, as_json=as_json, debug=debug)
