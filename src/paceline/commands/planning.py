"""The command that predicts: plan."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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

if TYPE_CHECKING:
    from paceline.planner import Ranking
    from paceline.result import RankingRows


def plan(
    model: Model,
    machine: Annotated[
        str | None,
        typer.Option(help="A machine file or its name; without one this machine is profiled."),
    ] = None,
    data: Data = "digits",
    workers: Workers = None,
    batch_size: BatchSize = 64,
    input_shape: InputShape = None,
    profile_s: ProfileSeconds = 4.0,
    port: Port = 0,
    explain: Annotated[
        bool, typer.Option("--explain", help="Draw the best plan's timeline.")
    ] = False,
    sweep: Annotated[
        str | None,
        typer.Option(metavar="bandwidth=FROM:TO", help="Of links, as 100M:10G; or latency=10u:1m."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Where a folder with the plan and its report is made.")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Predict what each strategy would take, best first, and whether a codec pays."""
    if machine is None:
        if input_shape is not None:
            raise InvalidInput("input_shape: the data say it; it is for plans with --machine")
        if explain or sweep:
            raise InvalidInput("explain, sweep: they need a machine that is described; --machine")
        settings = {
            "model": model,
            "data": data,
            "batch_size": batch_size,
            "profile_s": profile_s,
            "port": port,
        }
        settings |= {"output": output} if output else {}
        carry_out("plan", settings | common(None, workers), as_json, debug, keep=output is not None)
        return
    if sweep is None:
        _plan(model, machine, batch_size, shape(input_shape), workers, explain, as_json, output)
    elif output is not None:
        raise InvalidInput("output: keeps one plan, and a sweep makes many; ask for one of them")
    elif explain:
        raise InvalidInput("explain: draws one plan, and a sweep makes many; ask for one of them")
    else:
        _sweep(model, machine, sweep, batch_size, shape(input_shape), workers, as_json)


def _plan(
    model: str,
    machine: str,
    batch_size: int,
    input_shape: tuple[int, ...] | None,
    workers: int | None,
    explain: bool,
    as_json: bool,
    output: Path | None,
) -> None:
    from paceline.api import plan as plan_on
    from paceline.planner.explain import drawing
    from paceline.result import RankingRows
    from paceline.tables import console, show_ranking, written

    ranking = plan_on(model, machine, batch_size, input_shape, workers)
    rows = RankingRows.of(ranking)
    drawn = drawing(ranking[0].timeline, ranking[0].step_s) if explain and ranking else None
    folder = _keep(output, model, machine, input_shape, ranking, rows) if output else None
    if as_json:
        asked = {"model": model, "machine": machine, "batch_size": batch_size}
        more = {"drawing": drawn} if drawn else {}
        more |= {"folder": str(folder)} if folder else {}
        print_json(asked | {"origin": "predicted"} | rows.model_dump() | more)
    else:
        out = console()
        title = f"{model} predicted on {machine}, {batch_size} samples a step"
        show_ranking(out, rows, title)
        if drawn:
            out.print(drawn, soft_wrap=True)
        if folder:
            out.print(written(str(folder)), soft_wrap=True)
    if not ranking:
        raise InvalidInput("nothing can be planned: see why each strategy was refused")


def _keep(
    output: Path,
    model: str,
    machine: str,
    input_shape: tuple[int, ...] | None,
    ranking: "Ranking",
    rows: "RankingRows",
) -> Path:
    """Write the plan into a folder of its own and return it."""
    from paceline import __version__
    from paceline.plan_folder import new_plan_id, write_plan
    from paceline.plan_result import PlanResult

    result = PlanResult(
        id=new_plan_id(model),
        model=model,
        machine=machine,
        batch_size=ranking.batch_size,
        input_shape=input_shape,
        facts={"paceline": __version__},
        ranking=rows,
    )
    return write_plan(output, result, [ranking[0].timeline] if ranking else [])


def _sweep(
    model: str,
    machine: str,
    over: str,
    batch_size: int,
    input_shape: tuple[int, ...] | None,
    workers: int | None,
    as_json: bool,
) -> None:
    from paceline.api import sweep as sweep_on
    from paceline.planner.chart import chart
    from paceline.tables import console

    found = sweep_on(model, machine, over, batch_size, input_shape, workers)
    if as_json:
        asked = {"model": model, "machine": machine, "batch_size": batch_size, "sweep": over}
        print_json(
            asked
            | {
                "origin": "predicted",
                "values": found.range.values,
                "samples_per_s": found.series,
                "best": found.sentences,
            }
        )
        return
    out = console()
    out.print(f"{model} predicted on {machine}, {batch_size} samples a step")
    out.print(chart(found), soft_wrap=True)
    for sentence in found.sentences:
        out.print(sentence, soft_wrap=True)
