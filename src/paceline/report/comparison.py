"""Compare runs: settings, machines and results of two runs, or losses of any number of runs.

The HTML page has the content of figures 5 to 8 of Ma, Rusu et al. 2020: losses against seconds of
training and against epochs, each worker's share of the updates, and the fraction of the time in
which each device computed. As in the paper, curves show losses divided by the lowest of all runs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from pydantic import Field
from rich.table import Table as TerminalTable

from paceline.core.compare import Comparison
from paceline.core.errors import InvalidInput
from paceline.core.outcome import Finding
from paceline.core.settings import Record
from paceline.records.result import RunResult, read_run
from paceline.report import advice, figures
from paceline.report.figures import PARTS, Described, Panel, figure_of, share_bars
from paceline.report.format import Quantity, change_text, duration, loss_text, nbytes, number, share
from paceline.report.page import Page
from paceline.report.tables import Rows, Table
from paceline.report.terminal import shown

_INDIFFERENT = {"output", "tensorboard"}  # settings that do not affect results
_ALIKE = ("model", "batch_size", "data")  # if these differ, seconds per step are not comparable
_NUM_TIMES = 6  # rows in the table of losses by time
_MOST_EPOCHS = 12  # maximum rows in the table of losses by epoch
_HEIGHT = 360  # height of the figure of losses, in pixels
_SHOWN: dict[str, Callable[[float], Quantity]] = {
    "s": duration,
    "bytes": nbytes,
    "share": partial(share, decimals=2),
    "": number,
}


class Difference(Record):
    """A setting or machine fact that differs between two runs; None in a run that lacks it."""

    name: str
    left: Any
    right: Any


class Figure(Record):
    """A number that both runs measured, such as samples/s, with its value in each run.

    `unit` of both values: "s", "bytes", "share" for a fraction, or "" for other numbers.
    """

    name: str
    unit: str
    left: float
    right: float

    @property
    def shown(self) -> tuple[Quantity, Quantity]:
        """Both values, formatted with their unit."""
        return _SHOWN[self.unit](self.left), _SHOWN[self.unit](self.right)

    @property
    def change(self) -> float | None:
        """Relative change from left to right; None if the left value is zero."""
        return self.right / self.left - 1 if self.left else None


class Differences(Record):
    """All differences between two runs, and findings that summarize them."""

    figures: tuple[Figure, ...]
    settings: tuple[Difference, ...]
    machine: tuple[Difference, ...]
    findings: tuple[Finding, ...]


def differences(left: RunResult, right: RunResult, table: Comparison) -> Differences:
    """Compare the results, settings and machines of two runs.

    `table`: comparison of the runs' typical steps, from which findings are derived.
    """
    one, other = _figures(left), _figures(right)
    figures = tuple(
        Figure(name=name, unit=unit, left=value, right=other[name, unit])
        for (name, unit), value in one.items()
        if (name, unit) in other
    )
    settings = _different(settings_of(left), settings_of(right))
    machine = _different(left.machine, right.machine)
    found = advice.findings(_metrics(figures, settings, machine, table))
    return Differences(figures=figures, settings=settings, machine=machine, findings=found)


def _figures(result: RunResult) -> dict[tuple[str, str], float]:
    epochs = result.epochs
    last = epochs[-1] if epochs else None
    values = {
        (f"test {result.score}", "share"): result.accuracy,
        (f"test {result.score}", ""): last.score if last and result.accuracy is None else None,
        ("test loss", ""): last.test_loss if last else None,
        ("training loss", ""): last.train_loss if last else None,
        ("all epochs, without tests", "s"): sum(one.seconds for one in epochs) if last else None,
        ("step, untraced", "s"): result.step_s,
        ("samples/s", ""): result.samples_per_s,
        ("prediction error", "share"): result.prediction_error,
        ("peak memory of the fullest worker", "bytes"): max(result.peak_memory_bytes, default=None),
    }
    return {key: value for key, value in values.items() if value is not None}


def settings_of(result: RunResult) -> dict[str, Any]:
    """Return a run's settings by name, without settings that do not affect results.

    Each option of the strategy is a separate entry. The entry "strategy in the end" is the strategy
    that the run used.
    """
    settings = result.settings.model_dump(mode="json", exclude=_INDIFFERENT)
    options = settings.pop("options", {})
    settings |= {f"{name} (of the strategy)": value for name, value in options.items()}
    return settings | {"strategy in the end": result.strategy}


def _different(left: Mapping[str, Any], right: Mapping[str, Any]) -> tuple[Difference, ...]:
    return tuple(
        Difference(name=name, left=left.get(name), right=right.get(name))
        for name in _unlike([left, right])
    )


def _unlike(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of settings or machine facts whose values differ between runs."""
    names = dict.fromkeys(name for own in runs for name in own)
    return [name for name in names if any(own.get(name) != runs[0].get(name) for own in runs)]


def _metrics(
    figures: tuple[Figure, ...],
    settings: tuple[Difference, ...],
    machine: tuple[Difference, ...],
    table: Comparison,
) -> advice.Metrics:
    rates = next(figure for figure in figures if figure.name == "samples/s")
    step, *parts = table.rows
    by_s = step.right_s - step.left_s
    changes = {row.quantity: row.right_s - row.left_s for row in parts if row.quantity != "hidden"}
    part = max(changes, key=lambda quantity: abs(changes[quantity]), default="step")
    change_s = changes.get(part, by_s)
    unlike = [one.name.replace("_", " ") for one in settings if one.name in _ALIKE]
    ratio = rates.right / rates.left if rates.left else 0.0
    values = {
        "times_the_rate": ratio,
        "unlike_settings": float(len(unlike)),
        "step_changed": abs(by_s) / step.left_s if step.left_s else 0.0,
        "same_setup": float(not settings and not machine),
    }
    words = dict(zip(("left_rate", "right_rate"), map(str, rates.shown), strict=True))
    words |= {"left": table.left, "right": table.right, "ratio": f"{ratio:.2f}"}
    words |= {"unlike": " and ".join(unlike), "part": PARTS[part].label if part in PARTS else part}
    words |= {"by": duration(abs(by_s)), "longer": "longer" if by_s > 0 else "shorter"}
    words["change"] = f"{'+' if change_s > 0 else ''}{duration(change_s)}"
    return advice.Metrics(values, words)


class Point(Record):
    """The loss after an epoch, and the seconds of training until the end of the epoch."""

    epoch: int
    seconds: float
    loss: float


class Side(Record):
    """One of the compared runs.

    `differs`: text with the run's values of those settings that differ between the runs.
    `points`: the loss after each epoch. `reached_s`: seconds of training until the run reached the
    loss `SideBySide.reached`. `update_shares`, `utilisation`: each worker's share of the updates,
    and the fraction of the time in which its device computed; empty if not recorded.
    """

    name: str
    differs: str
    points: tuple[Point, ...]
    samples_per_s: float
    reached_s: float | None
    num_updates: int | None
    update_shares: dict[str, float] = Field({})
    utilisation: dict[str, float] = Field({})

    @property
    def lowest(self) -> float:
        """The run's lowest loss."""
        return min(point.loss for point in self.points)

    def loss_at(self, seconds: float) -> float | None:
        """Return the loss of the last epoch ended by `seconds`; None if none had ended."""
        losses = [point.loss for point in self.points if point.seconds <= seconds]
        return losses[-1] if losses else None


class SideBySide(Record):
    """The compared runs.

    `loss`: "test loss", or "train loss" if a run has no test loss. `lowest`: lowest loss of all
    runs. `reached`: lowest loss that every run has reached.
    """

    loss: str
    lowest: float
    reached: float
    runs: tuple[Side, ...]


def side_by_side(folders: Sequence[Path]) -> SideBySide:
    """Read the runs in `folders` for a comparison; raises InvalidInput for a run without epochs."""
    results = [read_run(folder) for folder in folders]
    for folder, result in zip(folders, results, strict=True):
        if not result.epochs:
            raise InvalidInput(str(folder), "has no epochs, so it has no losses to compare")
    is_tested = all(one.test_loss is not None for each in results for one in each.epochs)
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    curves = [_points(result, is_tested) for result in results]
    lows = [min(point.loss for point in curve) for curve in curves]
    known = zip(names, _differing(results), results, curves, strict=True)
    return SideBySide(
        loss="test loss" if is_tested else "train loss",
        lowest=min(lows),
        reached=max(lows),
        runs=tuple(_side(*each, max(lows)) for each in known),
    )


def _differing(results: Sequence[RunResult]) -> list[str]:
    """Return a text for each run, with the run's values of settings that differ between runs."""
    settings = [settings_of(result) for result in results]
    unlike = _unlike(settings)
    written = {name: name.removesuffix(" (of the strategy)").replace("_", " ") for name in unlike}
    return [
        ", ".join(f"{written[name]} {own[name]}" for name in unlike if own.get(name) is not None)
        for own in settings
    ]


def _points(result: RunResult, is_tested: bool) -> tuple[Point, ...]:
    ends = accumulate(epoch.seconds for epoch in result.epochs)
    losses = (one.test_loss if is_tested else one.train_loss for one in result.epochs)
    return tuple(
        Point(epoch=epoch.number + 1, seconds=end_s, loss=loss)
        for epoch, end_s, loss in zip(result.epochs, ends, losses, strict=True)
        if loss is not None
    )


def _side(
    name: str, text: str, result: RunResult, points: tuple[Point, ...], reached: float
) -> Side:
    made = result.updates.by_worker if result.updates is not None else {}
    total = sum(made.values())
    return Side(
        name=name,
        differs=text,
        points=points,
        samples_per_s=result.samples_per_s,
        reached_s=next((one.seconds for one in points if one.loss <= reached), None),
        num_updates=result.updates.count if result.updates is not None else None,
        update_shares={worker: count / total for worker, count in made.items()} if total else {},
        utilisation=result.utilisation,
    )


def summary_table(sides: SideBySide) -> Table:
    """Return a table with a row for each run: settings, lowest loss, throughput and updates."""
    head = ("run", "differs in", f"lowest {sides.loss}", f"to {sides.reached:.4f}", "samples/s")
    rows: Rows = [
        (
            run.name,
            run.differs,
            loss_text(run.lowest),
            "-" if run.reached_s is None else duration(run.reached_s),
            number(run.samples_per_s),
            "-" if run.num_updates is None else f"{run.num_updates:,}",
            _listed(run.update_shares),
            _listed(run.utilisation),
        )
        for run in sides.runs
    ]
    return Table((*head, "updates", "share of each worker", "busy"), rows, (0, 1, 6, 7))


def _listed(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {share(value)}" for name, value in shares.items()) or "-"


def times_table(sides: SideBySide) -> Table:
    """Return a table of `normalised` losses until the shortest run ends, with a column per run."""
    end_s = min(run.points[-1].seconds for run in sides.runs)
    rows: Rows = [
        (duration(at_s), *(_divided(run.loss_at(at_s), sides) for run in sides.runs))
        for at_s in (end_s * number / _NUM_TIMES for number in range(1, _NUM_TIMES + 1))
    ]
    return Table(("after", *(run.name for run in sides.runs)), rows)


def epochs_table(sides: SideBySide) -> Table:
    """Return a table of `normalised` losses after each epoch: a column for each run."""
    losses = [{point.epoch: point.loss for point in run.points} for run in sides.runs]
    epochs = sorted(set().union(*losses))
    every = -(-len(epochs) // _MOST_EPOCHS)
    rows: Rows = [
        (str(epoch), *(_divided(own.get(epoch), sides) for own in losses))
        for epoch in epochs[every - 1 :: every]
    ]
    return Table(("epoch", *(run.name for run in sides.runs)), rows)


def _divided(loss: float | None, sides: SideBySide) -> str:
    return "-" if loss is None else f"{normalised(loss, sides):.3f}"


def normalised(loss: float, sides: SideBySide) -> float:
    """Divide a loss by the lowest loss of all runs; return the loss if the lowest is zero."""
    return loss / sides.lowest if sides.lowest else loss


def page_of(sides: SideBySide) -> Page:
    """Build the HTML page that compares the losses and updates of runs."""
    content = {
        "sides": sides,
        "runs": summary_table(sides),
        "losses": _curves(sides),
        "by_time": times_table(sides),
        "by_epoch": epochs_table(sides),
        "updates": _bars(sides, "update_shares"),
        "utilisation": _bars(sides, "utilisation"),
    }
    return Page(f"{len(sides.runs)} runs compared", "side_by_side.html", content)


def _curves(sides: SideBySide) -> Described:
    by_time, by_epoch = [], []
    for i, run in enumerate(sides.runs):
        ends_s = [point.seconds for point in run.points]
        losses = [normalised(point.loss, sides) for point in run.points]
        curve = figures.line(i, run.name, ends_s, losses, mode="lines+markers", legendgroup=str(i))
        by_time.append(curve)
        by_epoch.append(curve | {"x": [one.epoch for one in run.points], "showlegend": False})
    last = max(point.epoch for run in sides.runs for point in run.points)
    seconds = {"title": "seconds of training", "rangemode": "tozero"}
    epochs = {"title": "epoch", "rangemode": "tozero"} | figures.whole_numbers(last)
    left = Panel(by_time, seconds, {"title": f"{sides.loss} / lowest"}, "Against time")
    shared = {"matches": "y", "showticklabels": False}
    return figure_of([left, Panel(by_epoch, epochs, shared, "Against epochs")], _HEIGHT, gap=0.05)


def _bars(sides: SideBySide, field: str) -> Described | None:
    """Draw a row for each run, with a bar for each worker's fraction.

    `field`: the field of `Side` with the fractions. Returns None if they are empty in all runs.
    """
    values = {run.name: own for run in sides.runs if (own := getattr(run, field))}
    if not values:
        return None
    workers = dict.fromkeys(worker for own in values.values() for worker in own)
    groups = {name: {run: own.get(name) for run, own in values.items()} for name in workers}
    return share_bars(groups)


def difference_tables(changed: Differences, sides: Comparison) -> Iterator[TerminalTable]:
    """Yield terminal tables of two runs: results, then settings and machine facts that differ."""
    rows: Rows = []
    for figure in changed.figures:
        text = "" if figure.change is None else change_text(figure.change)
        if figure.unit == "share":  # show the difference: a ratio of percentages would mislead
            text = f"{100 * (figure.right - figure.left):+.2f} points"
        rows.append((figure.name, *figure.shown, text))
    yield shown("Results", Table(("", sides.left, sides.right, "change"), rows))
    for what, found in (("Settings", changed.settings), ("Machine and versions", changed.machine)):
        rows = []
        for one in found:
            values = ("-" if value is None else str(value) for value in (one.left, one.right))
            rows.append((one.name.replace("_", " "), *values))
        if rows:
            content = Table(("", sides.left, sides.right), rows, (0, 1, 2))
            yield shown(f"{what} that differ", content)


def side_by_side_tables(sides: SideBySide) -> Iterator[TerminalTable]:
    """Yield terminal tables: a summary of the runs, losses by time, and losses by epoch."""
    note = f"Runs; the tables below have the {sides.loss}, divided by the lowest of all runs"
    yield shown(note, summary_table(sides))
    yield shown("By time", times_table(sides))
    yield shown("By epoch", epochs_table(sides))
