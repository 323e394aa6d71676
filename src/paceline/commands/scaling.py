"""The command that studies how training scales: scale."""

from pathlib import Path
from typing import Annotated

import typer

from paceline.commands.options import (
    Debug,
    InputShape,
    Json,
    Model,
    ProfileSeconds,
    print_json,
    shape,
)
from paceline.core.errors import InvalidInput

_NUMBERS = "NUMBER,..."
_NOT_SETTINGS = ("output", "as_json", "debug")


def scale(
    model: Model,
    workers: Annotated[
        str, typer.Option(metavar=_NUMBERS, help="How many workers, such as 1,2,4.")
    ] = "1,2",
    batch: Annotated[
        str,
        typer.Option(
            metavar=_NUMBERS, help="Samples of a step: of all workers (strong), of each (weak)."
        ),
    ] = "16,32,64",
    exchange: Annotated[
        str, typer.Option(metavar="NAME,...", help="The methods: allreduce, tree, host.")
    ] = "allreduce,tree,host",
    scaling: Annotated[
        str,
        typer.Option(
            metavar="strong,weak", help="Whether workers share a batch, or have one each."
        ),
    ] = "strong",
    measure: Annotated[
        bool, typer.Option("--measure", help="Train on this machine; without --device, --predict.")
    ] = False,
    device: Annotated[
        str | None,
        typer.Option(help="Rehearse: the device whose time layers take, as for paceline rehearse."),
    ] = None,
    predict: Annotated[bool, typer.Option("--predict", help="Predict.")] = False,
    machine: Annotated[
        str | None,
        typer.Option(help="For which machine to predict: a file or its name; or from profiles."),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Repetitions of each cell.")] = 3,
    steps: Annotated[int, typer.Option(help="Steps of a repetition.")] = 20,
    samples: Annotated[
        int, typer.Option(help="Of an epoch; with weak scaling of each worker's.")
    ] = 262_144,
    input_shape: InputShape = None,
    classes: Annotated[int, typer.Option(help="Of the random samples that are trained on.")] = 10,
    profile_s: ProfileSeconds = 1.0,
    seed: Annotated[int, typer.Option(help="Of the weights and the samples.")] = 0,
    deadline_s: Annotated[
        float, typer.Option(help="How long a repetition may take before it is given up.")
    ] = 600.0,
    output: Annotated[
        Path | None,
        typer.Option(help="The folder of the study; one that was interrupted is gone on with."),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure, rehearse or predict an epoch by method, workers and batch, and say what pays."""
    values = {name: value for name, value in locals().items() if name not in _NOT_SETTINGS}
    from paceline.launching import under_torchrun
    from paceline.scale_settings import validated_scale
    from paceline.scaling.text import cells_table, sentences
    from paceline.scaling.whole import scale as scale_all
    from paceline.scaling.whole import usual_folder
    from paceline.tables import console

    if under_torchrun():
        raise InvalidInput("scale starts its workers itself; run it without torchrun")
    values |= {"workers": numbers("workers", workers), "batch": numbers("batch", batch)}
    values |= {"exchange": words(exchange), "scaling": words(scaling)}
    settings = validated_scale(values | {"input_shape": shape(input_shape)})
    folder = output or usual_folder(settings)
    result = scale_all(settings, folder, console(stderr=True))
    if as_json:
        print_json(result.model_dump(mode="json"))
        return
    out = console()
    out.print(cells_table(result.cells))
    for sentence in sentences(result):
        out.print(sentence, soft_wrap=True)
    out.print(f"written    {folder}/result.json, cells.jsonl, report.html", soft_wrap=True)


def numbers(name: str, text: str) -> tuple[int, ...]:
    """Return the numbers of a list such as 1,2,4."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InvalidInput(f"{name}: {text!r} is not a list of numbers such as 1,2,4") from None


def words(text: str) -> tuple[str, ...]:
    """Return the words of a list such as strong,weak."""
    return tuple(part.strip() for part in text.split(","))
