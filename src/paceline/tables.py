"""The tables that a terminal shows."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from paceline.core.timeline import Origin
from paceline.report.format import duration, nbytes, share
from paceline.result import ComparisonTable, PlanRow, RehearsalResult, Result
from paceline.tune.chunk import Trial


def console(*, quiet: bool = False, stderr: bool = False) -> Console:
    """Return a console that takes names of models and files for no markup, and no emoji."""
    return Console(quiet=quiet, stderr=stderr, markup=False, emoji=False, highlight=False)


def plan_table(rows: Sequence[PlanRow], title: str) -> Table:
    """Return the ranked plans, best first; of codecs only the fastest of each strategy."""
    table = Table(title=title, title_justify="left")
    table.add_column("strategy")
    for column in ("workers", "predicted step", "samples/s", "wire/step"):
        table.add_column(column, justify="right")
    table.add_column("why", overflow="fold")
    for row in _fastest_of_codecs(rows):
        table.add_row(
            f"{row.strategy}\n+ {row.codec}" if row.codec else row.strategy,
            str(row.workers),
            duration(row.step_s),
            f"{row.samples_per_s:,.0f}" if row.samples_per_s >= 100 else f"{row.samples_per_s:.2f}",
            nbytes(row.wire_nbytes_per_step),
            row.why,
        )
    return table


def _fastest_of_codecs(rows: Sequence[PlanRow]) -> list[PlanRow]:
    first: dict[tuple[str, int, bool], PlanRow] = {}
    for row in rows:
        first.setdefault((row.strategy, row.workers, row.codec is None), row)
    return list(first.values())


def comparison_table(comparison: ComparisonTable) -> Table:
    """Return two timelines side by side, per step."""
    table = Table(title="Seconds per step", title_justify="left")
    table.add_column("")
    for column in (comparison.left, comparison.right, "error"):
        table.add_column(column, justify="right")
    for row in comparison.rows:
        error = "" if row.error is None else f"{row.error:+.1%}"
        table.add_row(row.quantity, duration(row.left_s), duration(row.right_s), error)
    return table


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


def summary(result: Result, folder: str) -> str:
    """Return what a run achieved, in a few lines."""
    return "\n".join(
        (
            f"accuracy   {share(result.accuracy)} of the test samples",
            f"step       predicted {duration(result.predicted_step_s)}, "
            f"measured {duration(result.measured_step_s)} ({result.prediction_error:+.1%})",
            f"throughput {result.samples_per_s:,.0f} samples/s with "
            f"{result.settings.workers} workers",
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
    return "\n".join(
        (
            f"rehearsed  no training: {settings.workers} workers {result.devices}",
            f"step       predicted {duration(result.predicted_step_s)}, "
            f"rehearsed {duration(result.rehearsed_step_s)} ({result.prediction_error:+.1%})",
            f"quartiles  {duration(result.lower_quartile_s)} and "
            f"{duration(result.upper_quartile_s)}, of {settings.steps} steps",
            f"throughput {result.samples_per_s:,.0f} samples/s rehearsed with strategy "
            f"{settings.strategy}",
            f"plan       the trace {conforms}",
            f"written    {folder}/result.json, trace.json, report.html",
        )
    )
