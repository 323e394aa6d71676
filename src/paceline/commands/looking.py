"""Commands that look at machine files and at finished runs: plan, compare, report."""

from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.commands.options import (
    BatchSize,
    Data,
    Debug,
    InputShape,
    Json,
    Model,
    Port,
    ProfileSeconds,
    Workers,
    common,
    print_json,
    shape,
)
from paceline.commands.running import carry_out
from paceline.core.errors import InvalidInput
from paceline.core.timeline import Timeline


def plan(
    model: Model,
    machine: Annotated[
        Path | None, typer.Option(help="A machine file; without one this machine is profiled.")
    ] = None,
    data: Data = "digits",
    workers: Workers = None,
    batch_size: BatchSize = 64,
    input_shape: InputShape = None,
    profile_s: ProfileSeconds = 4.0,
    port: Port = 0,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Predict what each strategy would take, best first, and whether a codec pays."""
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
        carry_out("plan", settings | common(None, workers), as_json, debug)
        return
    from paceline.api import plan as plan_on

    forecasts = plan_on(model, machine, batch_size, shape(input_shape), workers)
    _print_plans(forecasts, model, str(machine), batch_size, as_json)


def _print_plans(
    forecasts: list[Any], model: str, machine: str, batch_size: int, as_json: bool
) -> None:
    from paceline.planner import advise
    from paceline.result import AdviceRow, PlanRow
    from paceline.tables import console, plan_table

    rows = [PlanRow.of(forecast) for forecast in forecasts]
    advice = advise(forecasts)
    if as_json:
        plans = [row.model_dump() for row in rows]
        print_json(
            {
                "model": model,
                "machine": machine,
                "batch_size": batch_size,
                "origin": "predicted",
                "plans": plans,
                "advice": AdviceRow.of(advice).model_dump() if advice else None,
            }
        )
    else:
        title = f"{model} predicted on {machine}, {batch_size} samples a step"
        console().print(plan_table(rows, title))
        if advice:
            console().print(advice.sentence)


def compare(
    first: Annotated[Path, typer.Argument(help="The folder of a run.")],
    second: Annotated[
        Path | None, typer.Argument(help="Another run; without it, as it was predicted.")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Lay the timelines of a run, or of two runs, side by side."""
    from paceline.core.compare import compare as compare_timelines
    from paceline.record.trace import read_timeline
    from paceline.result import ComparisonTable
    from paceline.tables import comparison_table, console

    left = _happened(first) if second else read_timeline(first / "trace.json", "predicted")
    right = _happened(second or first)
    try:
        table = ComparisonTable.of(compare_timelines(left, right))
    except ValueError as error:
        folders = " or ".join(str(folder) for folder in (first, second) if folder)
        raise InvalidInput(f"{folders}: {error}") from None
    if second is not None:
        names = {"left": _name(first, left), "right": _name(second, right)}
        table = table.model_copy(update=names)
    if as_json:
        print_json(table.model_dump())
    else:
        console().print(comparison_table(table))


def _happened(folder: Path) -> Timeline:
    """Return what was measured or, of a rehearsal, rehearsed."""
    from paceline.record.trace import read_timeline, read_trace

    path = folder / "trace.json"
    rehearsed = read_trace(path).get("rehearsed")
    return rehearsed or read_timeline(path, "measured")


def _name(folder: Path, timeline: Timeline) -> str:
    return f"{folder.name} (rehearsed)" if timeline.origin == "rehearsed" else folder.name


def report(
    folder: Annotated[Path, typer.Argument(help="The folder of a run.")],
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Write a run's report.html anew, from its result.json and trace.json."""
    from paceline.report import write_report

    path = write_report(folder)
    if as_json:
        print_json({"report": str(path)})
    else:
        typer.echo(path)
