"""Terminal output: log messages, tables of runs and of differences."""

import logging
from collections.abc import Iterator, Sequence
from typing import Literal

from rich.console import Console
from rich.table import Table

from paceline.core.compare import Comparison
from paceline.core.outcome import Epoch, Traffic, is_share
from paceline.records.result import RunResult
from paceline.report import advice, tables
from paceline.report.comparison import (
    Differences,
    SideBySide,
    epochs_table,
    summary_table,
    times_table,
)
from paceline.report.format import change_text, counted, duration, nbytes, score_text
from paceline.report.format import number as plain
from paceline.report.metrics import speedup

_JUSTIFY: dict[str, Literal["left", "right"]] = {"text": "left", "number": "right"}


def console(*, quiet: bool = False, stderr: bool = False) -> Console:
    """Return a console that does not interpret names of models and files as markup or emoji."""
    return Console(quiet=quiet, stderr=stderr, markup=False, emoji=False, highlight=False)


class _PlainLines(logging.Handler):
    """Prints log messages through a console, so that they do not break a progress bar."""

    def __init__(self) -> None:
        super().__init__()
        self._console = console(stderr=True)

    def emit(self, record: logging.LogRecord) -> None:
        self._console.print(self.format(record), soft_wrap=True)


def log_to_stderr(*, quiet: bool = False) -> None:
    """Print the package's log messages to standard error; only warnings if `quiet`.

    Further calls only change the level of the messages.
    """
    root = logging.getLogger("paceline")
    for handler in root.handlers[:]:
        if isinstance(handler, _PlainLines):
            root.removeHandler(handler)
    root.addHandler(_PlainLines())
    root.setLevel(logging.WARNING if quiet else logging.INFO)


def shown(title: str, content: tables.Table, *, gap: int | None = None) -> Table:
    """Convert a table for the terminal: boxed, or with `gap` spaces between columns."""
    style = {} if gap is None else {"box": None, "padding": (0, gap, 0, 0)}
    grid = Table(title=title, title_justify="left", **style)  # type: ignore[arg-type]
    for column in content.columns:
        grid.add_column(column.name, justify=_JUSTIFY[column.kind])
    for row in content.rows:
        grid.add_row(*row)
    return grid


def comparison_table(comparison: Comparison, *, two_runs: bool = False) -> Table:
    """Return a table that compares the traced steps of two timelines."""
    content = tables.comparison_table(comparison, two_runs=two_runs)
    return shown("Seconds per traced step (tracing slows short steps)", content)


def difference_tables(changed: Differences, sides: Comparison) -> Iterator[Table]:
    """Yield tables of the results, differing settings and differing machine facts of two runs."""
    rows: tables.Rows = []
    for figure in changed.figures:
        text = "" if figure.change is None else change_text(figure.change)
        if figure.unit == "share":  # a relative change of a share would be misleading
            text = f"{100 * (figure.right - figure.left):+.2f} points"
        rows.append((figure.name, *figure.shown, text))
    yield shown("Results", tables.Table(("", sides.left, sides.right, "change"), rows))
    for what, found in (("Settings", changed.settings), ("Machine and versions", changed.machine)):
        rows = []
        for one in found:
            values = ("-" if value is None else str(value) for value in (one.left, one.right))
            rows.append((one.name.replace("_", " "), *values))
        if rows:
            content = tables.Table(("", sides.left, sides.right), rows, (0, 1, 2))
            yield shown(f"{what} that differ", content)


def side_by_side_tables(sides: SideBySide) -> Iterator[Table]:
    """Yield tables of runs, and of their losses by time and by epoch."""
    note = f"Runs compared; below, the {sides.loss} divided by the lowest of all runs"
    yield shown(note, summary_table(sides))
    yield shown("By time", times_table(sides))
    yield shown("By epoch", epochs_table(sides))


def epoch_line(epoch: Epoch, epochs: int | None, score: str) -> str:
    """Format an epoch's losses; `epochs`: number of epochs, if known; `score`: the score's name."""
    of = "" if epochs is None else f"/{epochs}"
    line = f"epoch {epoch.number + 1}{of}: train loss {epoch.train_loss:.4f}"
    return line + tested(epoch.test_loss, epoch.score, score)


def tested(test_loss: float | None, score: float | None, name: str) -> str:
    """Format test results as the end of a comma-separated list; "" without a test."""
    loss = "" if test_loss is None else f", test loss {test_loss:.4f}"
    if score is None:
        return loss
    shown = f"{score:.2%}" if is_share(name) else f"{score:.4g}"
    return f"{loss}, {name} {shown}"


def result_tables(result: RunResult, folder: str) -> Iterator[Table | str]:
    """Yield the tables of a run or rehearsal, and a summary of its results."""
    if result.trials:
        yield shown("Chunk sizes tried, seconds per step", tables.trials_table(result))
    if result.workers:
        yield shown("Workers", tables.workers_table(result), gap=2)
    if result.traffic:
        yield traffic_table(result.traffic)
    if result.comparison is not None:
        yield comparison_table(result.comparison)
    yield "\n".join(f"{name:<10} {text}" for name, text in _lines(result, folder))


def _learnt(last: Epoch, score: str) -> tuple[str, str]:
    """Return the name and value of the last epoch's score, or of its loss."""
    loss = tested(last.test_loss, None, score)
    if last.score is not None:
        return score, f"{score_text(score, last.score, 1)} of the test samples{loss}"
    return "loss", f"{last.train_loss:.4f} in training{loss}"


def _lines(result: RunResult, folder: str) -> Iterator[tuple[str, str]]:
    settings, files = result.settings, "result.json, trace.json, report.html"
    workers = counted(result.num_workers, "worker")
    how = f"with {workers}"
    if result.is_rehearsal:
        yield "rehearsed", f"no training: {workers} {result.devices}"
        how = f"rehearsed with strategy {result.strategy}"
    elif result.epochs:
        yield _learnt(result.epochs[-1], result.score)
        files += ", model.safetensors"
    if result.step_s is not None:
        happened = f"{result.origin} {duration(result.step_s)}"
        if result.predicted_step_s is not None and result.prediction_error is not None:
            predicted = f"predicted {duration(result.predicted_step_s)}"
            if (within := result.predicted_range_s) is not None:
                predicted += f" ({duration(within[0])} to {duration(within[1])})"
            happened = f"{predicted}, {happened} ({change_text(result.prediction_error)})"
        yield "step", f"{happened}, median of the untraced steps"
        if settings.kind == "rehearse" and result.lower_quartile_s and result.upper_quartile_s:
            lower, upper = duration(result.lower_quartile_s), duration(result.upper_quartile_s)
            yield "quartiles", f"{lower} and {upper}, of {settings.steps} steps"
    yield from _exchanged(result)
    tokens = result.tokens_per_s
    of_tokens = "" if tokens is None else f", {plain(tokens)} tokens/s,"
    yield "throughput", f"{plain(result.samples_per_s)} samples/s{of_tokens} {how}"
    if (times := speedup(result)) is not None:
        yield "workers", f"{plain(times)} times as fast as one worker with the whole batch"
    if result.head is not None:
        whole, own = nbytes(result.head.state_nbytes), nbytes(max(result.head.own_state_nbytes))
        yield "head", f"{own} of {whole} per worker: parameters, gradients, optimizer"
    if result.is_rehearsal and result.faults is not None:
        faults = counted(len(result.faults), "place")
        departs = f"departs from the plan in {faults}" if result.faults else "follows the plan"
        yield "trace", departs
    yield from (("advice", message) for message in advice.shown(result.findings))
    yield "written", f"{folder}/{files}"


def _exchanged(result: RunResult) -> Iterator[tuple[str, str]]:
    if result.updates is not None:
        stale, count = result.updates.mean_staleness, result.updates.count
        yield "staleness", f"{stale:.2f} on average, of {count:,} updates"
    if result.sent_share is not None and result.sent_share.warning:
        yield "codec", result.sent_share.warning
    if result.shares is not None:
        yield "shares", f"{' + '.join(map(str, result.shares))} samples"


def traffic_table(rows: Sequence[Traffic], title: str = "Bytes by purpose") -> Table:
    """Return a table of planned and counted bytes by purpose."""
    return shown(title, tables.traffic_table(rows), gap=2)
