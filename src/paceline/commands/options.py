"""Options that commands have in common, and what their texts mean."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.core.errors import InvalidInput

Model = Annotated[str, typer.Argument(help="A built-in name, or package.module:factory.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Data = Annotated[
    str,
    typer.Option(
        metavar="SPEC",
        help="digits; synthetic:3x224x224,classes=10,samples=512, each part optional; "
        "images:FOLDER, with a folder for each class; libsvm:PATH; covtype:FOLDER, w8a:FOLDER, "
        "delicious:FOLDER or real-sim:FOLDER, with the files as they are published; or sets that "
        "are like those: covtype-like, w8a-like, delicious-like or real-sim-like, of fewer samples "
        "as in covtype-like:samples=5000.",
    ),
]
Workers = Annotated[
    int | None, typer.Option(help="Worker processes; 2, or as many as torchrun started.")
]
WorkersOrList = Annotated[
    str | None,
    typer.Option(
        "--workers",
        metavar="NUMBER|LIST",
        help="Worker processes; for hogbatch also a list: cpu:1,cpu:2@slow=16,gpu:0.",
    ),
]
BatchSize = Annotated[int, typer.Option(help="Samples of a step, over all workers.")]
LearningRate = Annotated[
    float | None,
    typer.Option(
        help="For batches of the batch size, with wheel for those of a worker; 0.05, and 0.001 "
        "for alexnet."
    ),
]
StrategyName = Annotated[
    str, typer.Option("--strategy", help="How the workers share the work; train knows auto, too.")
]
Options = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="A field of the strategy's configuration."),
]
Codec = Annotated[
    str | None,
    typer.Option(
        metavar="PURPOSE=CODEC,...",
        help="Of wheel and subbatch: what travels encoded, as activations=dynamic8,errors=half; "
        "body-gradients of wheel are gradients of subbatch.",
    ),
]
Snapshots = Annotated[
    Path | None, typer.Option(help="Of wheel: the folder where its server is kept.")
]
SnapshotSeconds = Annotated[float, typer.Option(help="Of wheel: how often the server is kept.")]
Resume = Annotated[bool, typer.Option("--resume", help="Of wheel: go on from the snapshot.")]
Port = Annotated[
    int, typer.Option(help="The loopback port where workers meet; 0 takes a free one.")
]
ProfileSeconds = Annotated[float, typer.Option(help="How long to profile before planning.")]
Output = Annotated[Path, typer.Option(help="Where the folder of the run is made.")]
Deadline = Annotated[float, typer.Option(help="How long a worker may not answer.")]
InputShape = Annotated[
    str | None, typer.Option(help="Of one sample, such as 3x224x224; for a model of your own.")
]


def common(options: list[str] | None, workers: int | None) -> dict[str, Any]:
    """Return the settings that the command line writes in another form."""
    started = int(os.environ.get("WORLD_SIZE", "2")) if workers is None else workers
    return {"options": fields(options), "workers": started}


def fields(options: list[str] | None) -> dict[str, Any]:
    """Return the fields of a strategy's configuration that --set names."""
    values: dict[str, Any] = {}
    for option in options or ():
        field, equals, value = option.partition("=")
        if not equals:
            raise InvalidInput(f"--set: {option!r} is not FIELD=VALUE")
        values[field] = _value(value)
    return values


def with_codecs(chosen: dict[str, Any], text: str | None) -> dict[str, Any]:
    """Return the fields of --set and those that --codec names of strategy subbatch.

    `text` is such as activations=dynamic8,gradients=none. InvalidInput if the two differ.
    """
    for part in text.split(",") if text else ():
        field, equals, name = (word.strip() for word in part.partition("="))
        if field not in _SUBBATCH_CODECS or not equals or not name:
            raise InvalidInput(
                f"codec: {part!r} is not PURPOSE=CODEC with one of {', '.join(_SUBBATCH_CODECS)}, "
                "as activations=dynamic8"
            )
        codec = None if name == "none" else name
        if chosen.setdefault(field, codec) != codec:
            raise InvalidInput(f"codec: {field} travels by {name!r}, but is named before otherwise")
    return chosen


_SUBBATCH_CODECS = ("activations", "errors", "gradients")


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def number_of(workers: str | None) -> int | None:
    """Return how many workers the text asks for; InvalidInput if it is no number."""
    if workers is None:
        return None
    try:
        return int(workers)
    except ValueError:
        raise InvalidInput(
            f"workers: {workers!r} is not a number; only strategy hogbatch takes a list"
        ) from None


def shape(text: str | None) -> tuple[int, ...] | None:
    """Return the sizes of a shape such as 3x224x224."""
    if text is None:
        return None
    try:
        return tuple(int(size) for size in text.split("x"))
    except ValueError:
        raise InvalidInput(f"input_shape: {text!r} is not a shape such as 3x224x224") from None


def print_json(value: Any) -> None:
    """Print the one object of `--json`."""
    sys.stdout.write(json.dumps(value) + "\n")
