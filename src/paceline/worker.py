"""One rank of a run, from joining the others to writing the result.

`python -m paceline.worker` is how the launcher starts a rank; under torchrun every rank calls
`work` itself. Rank 0 speaks for all: tables and results on standard output, progress on standard
error.
"""

import os
import sys
import traceback
from collections.abc import Iterable, Sequence
from typing import Literal, NoReturn, Self

from pydantic import BaseModel, ConfigDict
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from paceline.core.errors import InvalidInput, PacelineError, WorkersFailed
from paceline.links.cores import share_cores
from paceline.links.group import Group, process_group
from paceline.native import die_with_parent
from paceline.planner import Forecast, Ranking
from paceline.rehearsal.prediction import measure
from paceline.rehearsal.setup import build as stand_in
from paceline.rehearsal.steps import num_steps, rehearse
from paceline.result import PlanRow, RankingRows
from paceline.runs import (
    build,
    check_admission,
    make_folder,
    plan_here,
    profile_here,
    result_of,
    train_here,
    write,
    write_files,
)
from paceline.settings import RehearseSettings, TrainSettings
from paceline.tables import (
    comparison_table,
    console,
    epoch_line,
    rehearsal_summary,
    rehearsal_tables,
    show_plans,
    show_ranking,
    summary,
)
from paceline.training.loop import Epoch

Verb = Literal["train", "plan", "rehearse"]


class Order(BaseModel):
    """What the ranks are to do: train, or only profile and plan, or rehearse.

    Results go to standard output, `as_json` or as tables, unless `quiet`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    verb: Verb
    settings: TrainSettings | RehearseSettings
    run_id: str
    as_json: bool = False
    quiet: bool = False
    debug: bool = False


def work(order: Order) -> int:
    """Do this rank's part of the order and return the exit code; errors are one line each."""
    try:
        if order.verb == "rehearse":  # of which nothing runs on a GPU
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        with process_group(order.settings.deadline_s) as group:
            share_cores(group.device)  # the threads of the process group exist, and stay free
            _carry_out(order, group)
    except WorkersFailed as error:
        return error.exit_code
    except PacelineError as error:
        return _say(order, str(error), 2 if isinstance(error, InvalidInput) else 1)
    except SystemExit as error:
        return _say(order, f"the model or its data ended worker {_rank()} by sys.exit({error})", 1)
    except Exception as error:
        return _say(
            order, f"internal error in worker {_rank()}: {error!r} (--debug shows where)", 1
        )
    return 0


def _rank() -> str:
    return os.environ.get("RANK", "0")


def _say(order: Order, message: str, exit_code: int) -> int:
    if order.debug:
        traceback.print_exc()
    sys.stderr.write(f"paceline: {message}\n")
    return exit_code


def _carry_out(order: Order, group: Group) -> None:
    if isinstance(order.settings, RehearseSettings):
        _rehearse(order, order.settings, group)
    else:
        _train_or_plan(order, order.settings, group)


def _train_or_plan(order: Order, settings: TrainSettings, group: Group) -> None:
    out, err = _consoles(order, group)
    setup = build(settings, group)
    # Made before hours of training, not after them.
    speaks = order.verb == "train" and group.rank == 0
    folder = make_folder(settings, order.run_id) if speaks else None
    err.print(
        f"{settings.model}: {setup.workload.num_parameters:,} parameters in "
        f"{len(setup.workload.layers)} layers; profiling for {settings.profile_s:g} s"
    )
    measured = profile_here(setup)
    forecasts = plan_here(setup, measured)
    title = f"Predicted from a profile, {settings.batch_size} samples a step"
    if order.verb == "plan":
        _print_plan(forecasts, title, order, out)
        return
    rows = [PlanRow.of(forecast) for forecast in forecasts]
    show_plans(err if order.as_json else out, rows, title)
    if settings.balance is not None and not settings.force:
        check_admission(setup, measured, forecasts)

    def report(epoch: Epoch) -> None:
        err.print(epoch_line(epoch, settings.epochs, setup.score))

    with _Progress("training", setup.num_steps, err) as progress:
        trained = train_here(setup, forecasts, report, progress.advance, err.print)
    result = result_of(setup, order.run_id, forecasts, trained)
    if folder is not None:
        write(folder, setup.model, result, (trained.chosen.timeline, trained.timeline))
        tables, text = [comparison_table(result.comparison)], summary(result, str(folder))
        _print_result(result, tables, text, order, out)


def _rehearse(order: Order, settings: RehearseSettings, group: Group) -> None:
    out, err = _consoles(order, group)
    setup = stand_in(settings, group)
    folder = make_folder(settings, order.run_id) if group.rank == 0 else None
    err.print(
        f"{settings.model}: {setup.workload.num_parameters:,} parameters in "
        f"{len(setup.workload.layers)} layers, on {settings.workers} workers {setup.devices}; "
        "measuring what will be rehearsed"
    )
    measured = measure(setup)
    with _Progress("rehearsing", num_steps(settings), err) as progress:
        done = rehearse(setup, measured, order.run_id, progress.advance)
    if folder is not None:
        write_files(folder, done.result, (done.predicted, done.rehearsed))
        tables, text = rehearsal_tables(done.result), rehearsal_summary(done.result, str(folder))
        _print_result(done.result, tables, text, order, out)


def _consoles(order: Order, group: Group) -> tuple[Console, Console]:
    """Return standard output and standard error, on which only rank 0 speaks."""
    silent = group.rank != 0
    return console(quiet=silent or order.quiet), console(stderr=True, quiet=silent)


def _print_plan(forecasts: Sequence[Forecast], title: str, order: Order, out: Console) -> None:
    rows = RankingRows.of(Ranking(tuple(forecasts), (), order.settings.batch_size))
    if order.as_json:
        asked = {"model": order.settings.model, "batch_size": order.settings.batch_size}
        out.print_json(data=asked | {"origin": "predicted"} | rows.model_dump())
    else:
        show_ranking(out, rows, title)


def _print_result(
    result: BaseModel, tables: Iterable[Table], text: str, order: Order, out: Console
) -> None:
    if order.as_json:
        out.print_json(result.model_dump_json())
        return
    for table in tables:
        out.print(table)
    out.print(text)


class _Progress:
    """A bar in a terminal."""

    def __init__(self, doing: str, num_steps: int, console: Console) -> None:
        self._bar = Progress(
            TextColumn(doing),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("steps"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._shown = console.is_terminal and not console.quiet
        self._steps = self._bar.add_task("", total=num_steps)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def advance(self) -> None:
        """Count a step."""
        if self._shown:  # where there is nothing to see, even a lock would be too dear
            self._bar.advance(self._steps)


def leave(code: int) -> NoReturn:
    """End this rank at once.

    Not by sys.exit: threads of the process group may wait for a dead peer for ever, and now and
    then they abort even a process whose work is done.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    """Carry out the order that the launcher gave as the only argument."""
    die_with_parent(int(os.environ["PACELINE_LAUNCHER"]))
    leave(work(Order.model_validate_json(sys.argv[1])))


if __name__ == "__main__":
    main()
