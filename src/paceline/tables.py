"""The tables that a terminal shows."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from paceline.core.timeline import Origin
from paceline.report.differences import Differences
from paceline.report.format import duration, nbytes, share
from paceline.report.format import number as plain
from paceline.result import (
    ComparisonTable,
    PlanRow,
    RankingRows,
    RehearsalResult,
    Result,
)
from paceline.subbatch_result import SplitRow
from paceline.tune.chunk import Trial
from paceline.uneven_result import UnevenResult

if TYPE_CHECKING:
    from paceline.training.loop import Epoch  # needs torch, which tables of old runs do without

_MOST_PLANS = 12


def console(*, quiet: bool = False, stderr: bool = False) -> Console:
    """Return a console that takes names of models and files for no markup, and no emoji."""
    return Console(quiet=quiet, stderr=stderr, markup=False, emoji=False, highlight=False)


def show_plans(out: Console, rows: Sequence[PlanRow], title: str) -> None:
    """Print the best ranked plans, and why each takes as long; of codecs the fastest alone."""
    fastest = _fastest(rows)
    shown = fastest[:_MOST_PLANS]
    out.print(_plan_table(shown, title))
    for number, row in enumerate(shown, 1):
        out.print(f"{number:>2}: {row.why}", soft_wrap=True)
    if len(fastest) > len(shown):
        out.print(f"    and {len(fastest) - len(shown)} slower plans; --json has them all")


def show_ranking(out: Console, rows: RankingRows, title: str) -> None:
    """Print the plans, and what is to be said of them."""
    show_plans(out, rows.plans, title)
    for sentence in rows.sentences:
        out.print(sentence, soft_wrap=True)


def written(folder: str) -> str:
    """Return what a terminal says of a plan that was kept."""
    return f"written    {folder}/result.json, trace.json, report.html"


def _plan_table(rows: Sequence[PlanRow], title: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    table.add_column("", justify="right", min_width=2)
    table.add_column("strategy", no_wrap=True)
    for column in ("workers", "step", "samples/s", "eff.", "exposed", "wire/step", "memory"):
        table.add_column(column, justify="right", no_wrap=True)
    for number, row in enumerate(rows, 1):
        table.add_row(
            str(number),
            _named(row),
            str(row.workers),
            duration(row.step_s),
            f"{row.samples_per_s:,.0f}" if row.samples_per_s >= 100 else f"{row.samples_per_s:.2f}",
            "" if row.efficiency is None else share(row.efficiency, 0),
            duration(row.exposed_s),
            nbytes(row.wire_nbytes_per_step),
            nbytes(max(row.memory_nbytes.values(), default=0)),
        )
    return table


def _named(row: PlanRow) -> str:
    lines = [row.strategy]
    lines += [f"+ {row.codec}"] if row.codec else []
    lines += [f"({row.placement})"] if row.placement != "as listed" else []
    return "\n".join(lines)


def _fastest(rows: Sequence[PlanRow]) -> list[PlanRow]:
    first: dict[tuple[str, int, bool], PlanRow] = {}
    for row in rows:
        first.setdefault((row.strategy, row.workers, row.codec is None), row)
    return list(first.values())


def comparison_table(comparison: ComparisonTable, *, two_runs: bool = False) -> Table:
    """Return two timelines side by side, per step.

    With the error of the left one, a prediction of the right one; or, of two runs, with the change
    from the left to the right.
    """
    table = Table(title="Seconds per step", title_justify="left")
    table.add_column("")
    for column in (comparison.left, comparison.right, "change" if two_runs else "error"):
        table.add_column(column, justify="right")
    for row in comparison.rows:
        off = row.error
        if two_runs:
            off = row.right_s / row.left_s - 1 if row.left_s else None
        text = "" if off is None else share(off, signed=True)
        table.add_row(row.quantity, duration(row.left_s), duration(row.right_s), text)
    return table


def difference_tables(changed: Differences, sides: ComparisonTable) -> Iterator[Table]:
    """Yield what both of two runs measured, and the settings and facts that differ, if any do."""
    measured = Table(title="What came of it", title_justify="left")
    measured.add_column("")
    for column in (sides.left, sides.right, "change"):
        measured.add_column(column, justify="right")
    for figure in changed.figures:
        change = figure.change
        text = "" if change is None else share(change, signed=True)
        if figure.unit == "share":  # of which a share would say nothing
            text = f"{100 * (figure.right - figure.left):+.2f} points"
        measured.add_row(figure.name, *figure.shown, text)
    yield measured
    for title, found in (
        ("Settings that differ", changed.settings),
        ("Machine and versions that differ", changed.machine),
    ):
        if not found:
            continue
        table = Table(title=title, title_justify="left")
        for column in ("", sides.left, sides.right):
            table.add_column(column)
        for one in found:
            sides_of_it = ("-" if value is None else str(value) for value in (one.left, one.right))
            table.add_row(one.name.replace("_", " "), *sides_of_it)
        yield table


def chunk_table(trials: Sequence[Trial], chosen: int, origin: Origin = "measured") -> Table:
    """Return the chunk sizes that a search has tried, in that order, and which one it chose.

    `origin` is that of the trials' times.
    """
    table = Table(title="Chunk sizes tried, seconds per step", title_justify="left")
    for column in ("layers", "predicted", origin):
        table.add_column(column, justify="right")
    table.add_column("")
    for trial in trials:
        table.add_row(
            str(trial.chunk),
            "" if trial.predicted_s is None else duration(trial.predicted_s),
            duration(trial.measured_s),
            "chosen" if trial.chunk == chosen else "",
        )
    return table


def traffic_tables(split: SplitRow | None) -> Iterator[Table]:
    """Yield what a rank sent in a step, by purpose, if a head was split."""
    if split is None:
        return
    table = Table(title="Sent by a worker in a step", title_justify="left")
    table.add_column("")
    for column in ("planned", "counted"):
        table.add_column(column, justify="right")
    for row in split.traffic:
        table.add_row(row.purpose, nbytes(row.planned_nbytes_per_step), nbytes(row.nbytes_per_step))
    yield table


def epoch_line(epoch: "Epoch", epochs: int, score: str) -> str:
    """Return what an epoch of so many achieved; `score` is what its accuracy is called."""
    return (
        f"epoch {epoch.number + 1}/{epochs}: train loss {epoch.train_loss:.4f}, "
        f"test loss {epoch.test_loss:.4f}, {score} {epoch.accuracy:.2%}"
    )


def _scored(result: Result | UnevenResult) -> str:
    return f"{result.score:<10} {share(result.accuracy)} of the test samples"


def summary(result: Result, folder: str) -> str:
    """Return what a run achieved, in a few lines."""
    return "\n".join(
        (
            _scored(result),
            f"step       predicted {duration(result.predicted_step_s)}, "
            f"measured {duration(result.measured_step_s)} ({result.prediction_error:+.1%})",
            f"throughput {result.samples_per_s:,.0f} samples/s with "
            f"{result.settings.workers} workers",
            *_saved(result.split),
            f"written    {folder}/result.json, trace.json, report.html, model.safetensors",
        )
    )


def _saved(split: SplitRow | None) -> Iterator[str]:
    """Yield what a split head saved, if there was one."""
    if split is not None:
        whole, own = nbytes(split.head_state_nbytes), nbytes(max(split.own_state_nbytes))
        yield f"head       {own} of {whole} on a worker: parameters, gradients, momentum"


def workers_table(result: UnevenResult) -> Table:
    """Return what each worker of a run on uneven ones did."""
    table = Table(title="Workers", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in ("worker", "asked for", "samples", "updates", "share", "predicted", "busy"):
        table.add_column(column, justify="left" if column in ("worker", "asked for") else "right")
    for row in result.workers:
        predicted = row.predicted_share
        table.add_row(
            row.name,
            row.spec,
            f"{row.samples:,}",
            f"{result.updates[row.name]:,}",
            share(row.updates_share),
            "" if predicted is None else share(predicted),
            share(result.utilisation.get(row.name, 0.0)),
        )
    return table


def uneven_summary(result: UnevenResult, folder: str) -> str:
    """Return what a run on uneven workers achieved, in a few lines."""
    return "\n".join(
        (
            f"{_scored(result)}, loss {result.loss:.4f}",
            f"throughput {plain(result.samples_per_s)} samples/s",
            f"written    {folder}/result.json, trace.json, report.html, model.safetensors",
        )
    )


def rehearsal_tables(result: RehearsalResult) -> list[Table]:
    """Return what a search has tried, if there was one, and the step as predicted and rehearsed."""
    tables = [comparison_table(result.comparison)]
    if result.trials:
        trials = [Trial(row.chunk, row.predicted_s, row.rehearsed_s) for row in result.trials]
        tables.insert(0, chunk_table(trials, result.config["chunk"], "rehearsed"))
    return tables


def rehearsal_summary(result: RehearsalResult, folder: str) -> str:
    """Return what a rehearsal showed, in a few lines."""
    settings = result.settings
    faults = len(result.faults)
    conforms = f"departs from it in {faults} places" if faults else "conforms to it"
    shares = [f"shares     {' + '.join(map(str, result.shares))} samples"] if result.shares else []
    return "\n".join(
        (
            f"rehearsed  no training: {settings.workers} workers {result.devices}",
            f"step       predicted {duration(result.predicted_step_s)}, "
            f"rehearsed {duration(result.rehearsed_step_s)} ({result.prediction_error:+.1%})",
            *shares,
            f"quartiles  {duration(result.lower_quartile_s)} and "
            f"{duration(result.upper_quartile_s)}, of {settings.steps} steps",
            f"throughput {result.samples_per_s:,.0f} samples/s rehearsed with strategy "
            f"{settings.strategy}",
            f"plan       the trace {conforms}",
            f"written    {folder}/result.json, trace.json, report.html",
        )
    )
