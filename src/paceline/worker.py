"""One rank of a run, from joining the others to writing the result.

`python -m paceline.worker` is how the launcher starts a rank; under torchrun every rank calls
`work` itself. Rank 0 speaks for all: tables and results on standard output, progress on standard
error.
"""

import os
import sys
import traceback
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Literal, NoReturn, Self

from pydantic import BaseModel, ConfigDict
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from paceline.core.errors import InvalidInput, PacelineError, WorkersFailed
from paceline.links.cores import share_cores
from paceline.links.group import Group, process_group
from paceline.native import die_with_parent
from paceline.plan_folder import write_plan
from paceline.plan_result import PlanResult
from paceline.planner import Ranking
from paceline.ranking_here import ranking_here
from paceline.rehearsal.steps import num_steps
from paceline.result import PlanRow, RankingRows
from paceline.runs import check_admission, make_folder, write_files
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
    traffic_tables,
    written,
)
from paceline.training.loop import Epoch, traced_epoch
from paceline.training.scalars import Scalars
from paceline.training.this_machine import facts
from paceline.ways import rehearsed_by, way_of

Verb = Literal["train", "plan", "rehearse"]


class Order(BaseModel):
    """What the ranks are to do: train, or only profile and plan, or rehearse.

    Results go to standard output, `as_json` or as tables, unless `quiet`. A plan is written to a
    folder only to `keep` it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    verb: Verb
    settings: TrainSettings | RehearseSettings
    run_id: str
    as_json: bool = False
    quiet: bool = False
    debug: bool = False
    keep: bool = False


def work(order: Order) -> int:
    """Do this rank's part of the order and return the exit code; errors are one line each."""
    if order.verb == "rehearse":  # of which nothing runs on a GPU
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    return as_rank(partial(_carry_out, order), order.settings.deadline_s, order.debug)


def as_rank(carry_out: Callable[[Group], None], deadline_s: float, debug: bool) -> int:
    """Do this as one rank of its group and return the exit code; errors are one line each."""
    rank = os.environ.get("RANK", "0")
    try:
        with process_group(deadline_s) as group:
            share_cores(group.device)  # the threads of the process group exist, and stay free
            carry_out(group)
    except WorkersFailed as error:
        return error.exit_code
    except PacelineError as error:
        return _say(debug, str(error), 2 if isinstance(error, InvalidInput) else 1)
    except SystemExit as error:
        return _say(debug, f"the model or its data ended worker {rank} by sys.exit({error})", 1)
    except Exception as error:
        return _say(debug, f"internal error in worker {rank}: {error!r} (--debug shows where)", 1)
    return 0


def _say(debug: bool, message: str, exit_code: int) -> int:
    if debug:
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
    way = way_of(settings.strategy)
    setup = way.build(settings, group)
    # Made before hours of training, not after them.
    speaks = order.verb == "train" and group.rank == 0
    folder = make_folder(settings, order.run_id) if speaks else None
    board = None
    if speaks and settings.tensorboard is not None:
        board = Scalars(settings.tensorboard / order.run_id)
    err.print(
        f"{settings.model}: {setup.workload.num_parameters:,} parameters in "
        f"{len(setup.workload.layers)} layers; profiling for {settings.profile_s:g} s"
    )
    measured = way.profile(setup)
    forecasts = way.plan(setup, measured)
    title = f"Predicted from a profile, {settings.batch_size} samples a step"
    if order.verb == "plan":
        _show_plan(ranking_here(setup, forecasts, err.print), title, order, group, out)
        return
    rows = [PlanRow.of(forecast) for forecast in forecasts]
    show_plans(err if order.as_json else out, rows, title)
    if settings.balance is not None and not settings.force:
        check_admission(setup, measured, forecasts)

    def report(epoch: Epoch) -> None:
        err.print(epoch_line(epoch, settings.epochs, setup.score))
        if board is not None:
            board.epoch(epoch, len(setup.data.train), setup.score)

    with _Progress("training", setup.num_steps, err) as progress, board or nullcontext():
        trained = way.train(setup, forecasts, report, progress.advance, err.print)
        result = way.result(setup, order.run_id, forecasts, trained)
        if board is not None:
            happened = {row.quantity: row.right_s for row in result.comparison.rows}
            board.step(traced_epoch(settings.epochs), happened)
    way.save(setup, folder)
    if folder is not None:
        write_files(folder, result, (trained.chosen.timeline, trained.timeline))
        tables = [*traffic_tables(result.split), comparison_table(result.comparison)]
        text = summary(result, str(folder))
        _print_result(result, tables, text, order, out)


def _rehearse(order: Order, settings: RehearseSettings, group: Group) -> None:
    out, err = _consoles(order, group)
    way = rehearsed_by(settings.strategy)
    setup = way.build(settings, group)
    folder = make_folder(settings, order.run_id) if group.rank == 0 else None
    err.print(
        f"{settings.model}: {setup.workload.num_parameters:,} parameters in "
        f"{len(setup.workload.layers)} layers, on {settings.workers} workers {setup.devices}; "
        "measuring what will be rehearsed"
    )
    measured = way.measure(setup)
    with _Progress("rehearsing", num_steps(settings), err) as progress:
        done = way.rehearse(setup, measured, order.run_id, progress.advance)
    if folder is not None:
        write_files(folder, done.result, (done.predicted, done.rehearsed))
        tables, text = rehearsal_tables(done.result), rehearsal_summary(done.result, str(folder))
        _print_result(done.result, tables, text, order, out)


def _consoles(order: Order, group: Group) -> tuple[Console, Console]:
    """Return standard output and standard error, on which only rank 0 speaks."""
    silent = group.rank != 0
    return console(quiet=silent or order.quiet), console(stderr=True, quiet=silent)


def _show_plan(ranking: Ranking, title: str, order: Order, group: Group, out: Console) -> None:
    settings = order.settings
    rows = RankingRows.of(ranking)
    folder = None
    if order.keep and group.rank == 0:
        result = PlanResult(
            id=order.run_id,
            model=settings.model,
            machine="this machine",
            batch_size=settings.batch_size,
            facts=facts(group.device),
            ranking=rows,
        )
        folder = str(write_plan(settings.output, result, [ranking[0].timeline]))
    if order.as_json:
        asked = {"model": settings.model, "batch_size": settings.batch_size}
        kept = {"folder": folder} if folder else {}
        out.print_json(data=asked | {"origin": "predicted"} | rows.model_dump() | kept)
        return
    show_ranking(out, rows, title)
    if folder:
        out.print(written(folder), soft_wrap=True)


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
