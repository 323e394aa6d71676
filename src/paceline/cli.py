"""The command line: paceline train | plan | compare | report."""

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.exceptions import TyperException

from paceline import __version__
from paceline.core.errors import InvalidInput, PacelineError, WorkersFailed

app = typer.Typer(
    help="Train PyTorch models in parallel on uneven hardware, and predict the gain beforehand.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback(invoke_without_command=True)
def start(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Train PyTorch models in parallel on uneven hardware, and predict the gain beforehand."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


Model = Annotated[str, typer.Argument(help="A built-in name, or package.module:factory.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Data = Annotated[
    str, typer.Option(help="digits, libsvm:PATH, images:FOLDER or synthetic:SHAPE,...")
]
Workers = Annotated[
    int | None, typer.Option(help="Worker processes; 2, or as many as torchrun started.")
]
BatchSize = Annotated[int, typer.Option(help="Samples of a step, over all workers.")]
StrategyName = Annotated[str, typer.Option("--strategy", help="How the workers share the work.")]
Options = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="A field of the strategy's configuration."),
]
Port = Annotated[
    int, typer.Option(help="The loopback port where workers meet; 0 takes a free one.")
]
ProfileSeconds = Annotated[float, typer.Option(help="How long to profile before planning.")]
Output = Annotated[Path, typer.Option(help="Where the folder of the run is made.")]


@app.command()
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
    deadline_s: Annotated[float, typer.Option(help="How long a worker may not answer.")] = 30.0,
    port: Port = 0,
    output: Output = Path("runs"),
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Profile, plan and train a model, and write its result, trace and report."""
    settings = {name: value for name, value in locals().items() if name not in _NOT_SETTINGS}
    _carry_out("train", settings | _common(options, workers), as_json, debug)


@app.command()
def plan(
    model: Model,
    machine: Annotated[
        Path | None, typer.Option(help="A machine file; without one this machine is profiled.")
    ] = None,
    data: Data = "digits",
    workers: Workers = None,
    batch_size: BatchSize = 64,
    input_shape: Annotated[
        str | None, typer.Option(help="Of one sample, such as 3x224x224; for a model of your own.")
    ] = None,
    profile_s: ProfileSeconds = 4.0,
    port: Port = 0,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Predict what each strategy would take, best first."""
    if machine is None:
        if input_shape is not None:
            raise InvalidInput("input_shape: the data say it; it is for plans with --machine")
        settings = {
            "model": model,
            "data": data,
            "batch_size": batch_size,
            "profile_s": profile_s,
            "port": port,
        }
        _carry_out("plan", settings | _common(None, workers), as_json, debug)
        return
    from paceline.api import plan as plan_on
    from paceline.result import PlanRow

    forecasts = plan_on(model, machine, batch_size, _shape(input_shape), workers)
    rows = [PlanRow.of(forecast) for forecast in forecasts]
    _print_plans(rows, model, str(machine), batch_size, as_json)


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(help="The folder of a run.")],
    second: Annotated[
        Path | None, typer.Argument(help="Another run; without it, predicted against measured.")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Lay the timelines of a run, or of two runs, side by side."""
    from paceline.core.compare import compare as compare_timelines
    from paceline.record.trace import read_timeline
    from paceline.result import ComparisonTable
    from paceline.tables import comparison_table, console

    left = read_timeline(first / "trace.json", "measured" if second else "predicted")
    right = read_timeline((second or first) / "trace.json", "measured")
    try:
        table = ComparisonTable.of(compare_timelines(left, right))
    except ValueError as error:
        folders = " or ".join(str(folder) for folder in (first, second) if folder)
        raise InvalidInput(f"{folders}: {error}") from None
    if second is not None:
        table = table.model_copy(update={"left": first.name, "right": second.name})
    if as_json:
        _print_json(table.model_dump())
    else:
        console().print(comparison_table(table))


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="The folder of a run.")],
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Write a run's report.html anew, from its result.json and trace.json."""
    from paceline.report import write_report

    path = write_report(folder)
    if as_json:
        _print_json({"report": str(path)})
    else:
        typer.echo(path)


_INTERRUPTED = 130  # what typer returns after Ctrl-C
_NOT_SETTINGS = ("options", "workers", "as_json", "debug")


def _common(options: list[str] | None, workers: int | None) -> dict[str, Any]:
    """Return the settings that the command line writes in another form."""
    values: dict[str, Any] = {}
    for option in options or ():
        field, equals, value = option.partition("=")
        if not equals:
            raise InvalidInput(f"--set: {option!r} is not FIELD=VALUE")
        values[field] = _value(value)
    started = int(os.environ.get("WORLD_SIZE", "2")) if workers is None else workers
    return {"options": values, "workers": started}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _shape(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(size) for size in text.split("x"))
    except ValueError:
        raise InvalidInput(f"input_shape: {text!r} is not a shape such as 3x224x224") from None


def _carry_out(verb: str, settings: dict[str, Any], as_json: bool, debug: bool) -> None:
    from paceline.launching import carry_out, new_run_id
    from paceline.settings import validated_settings
    from paceline.worker import Order

    chosen = validated_settings(settings)
    order = Order.model_validate(
        {
            "verb": verb,
            "settings": chosen,
            "run_id": new_run_id(chosen),
            "as_json": as_json,
            "debug": debug,
        }
    )
    carry_out(order)


def _print_plans(rows: list[Any], model: str, machine: str, batch_size: int, as_json: bool) -> None:
    from paceline.tables import console, plan_table

    if as_json:
        plans = [row.model_dump() for row in rows]
        _print_json(
            {
                "model": model,
                "machine": machine,
                "batch_size": batch_size,
                "origin": "predicted",
                "plans": plans,
            }
        )
    else:
        title = f"{model} predicted on {machine}, {batch_size} samples a step"
        console().print(plan_table(rows, title))


def _print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value) + "\n")


def main() -> None:
    """Run the command line: exit code 0 if the work was done, 2 if what was asked cannot be."""
    try:
        code = app(standalone_mode=False)
        if code == _INTERRUPTED:
            sys.stderr.write("paceline: interrupted\n")
    except TyperException as error:
        code = _fail(f"{error.format_message()} (see paceline --help)", 2)
    except WorkersFailed as error:
        code = error.exit_code
    except PacelineError as error:
        code = _fail(str(error), 2 if isinstance(error, InvalidInput) else 1)
    except Exception as error:
        code = _fail(f"internal error: {error!r} (--debug shows where)", 1)
    sys.exit(code)


def _fail(message: str, code: int) -> int:
    if "--debug" in sys.argv:
        traceback.print_exc()
    sys.stderr.write(f"paceline: {message}\n")
    return code
