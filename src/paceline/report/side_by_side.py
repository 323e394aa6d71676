"""Compare losses and workers of any number of runs, as figures 5 to 8 of Ma, Rusu et al. 2020.

The page shows loss against seconds of training and against epochs, each worker's share of the
updates, and the share of the time in which each device computed. As in the paper, losses are also
divided by the lowest loss of all runs.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path

from pydantic import Field

from paceline.core.errors import InvalidInput
from paceline.core.settings import Record
from paceline.records.result import RunResult, read_run
from paceline.report.differences import settings_of
from paceline.report.figures import (
    COLOURS,
    Described,
    Panel,
    figure_of,
    line,
    share_bars,
    whole_numbers,
)
from paceline.report.format import duration, loss_text, number, share
from paceline.report.page import Page
from paceline.report.tables import Rows, Table

_NUM_TIMES = 6  # rows in the table of losses by time
_MOST_EPOCHS = 12  # maximum rows in the table of losses by epoch
_HEIGHT = 360  # pixels


class Point(Record):
    """The loss after an epoch, and the seconds of training until then."""

    epoch: int
    seconds: float
    loss: float


class Side(Record):
    """One of the compared runs; `differs` lists its settings that differ between the runs.

    `update_shares` and `utilisation` have a value for each worker, if the result has these data.
    `reached_s`: the time at which the run reached the lowest loss that all runs have reached.
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
        """Return the loss of the last epoch that ended within `seconds`; None if none ended."""
        losses = [point.loss for point in self.points if point.seconds <= seconds]
        return losses[-1] if losses else None


class SideBySide(Record):
    """The compared runs; `loss`: name of the loss; `reached`: lowest loss that all runs reached."""

    loss: str
    lowest: float
    reached: float
    runs: tuple[Side, ...]

    @cached_property
    def times(self) -> tuple[float, ...]:
        """Equally spaced times up to the end of the shortest run."""
        end_s = min(run.points[-1].seconds for run in self.runs)
        return tuple(end_s * number / _NUM_TIMES for number in range(1, _NUM_TIMES + 1))


def side_by_side(folders: Sequence[Path]) -> SideBySide:
    """Read the runs in these folders; InvalidInput for a run without epochs."""
    results = [read_run(folder) for folder in folders]
    for folder, result in zip(folders, results, strict=True):
        if not result.epochs:
            raise InvalidInput(str(folder), "has no epochs, and no losses to compare")
    is_tested = all(one.test_loss is not None for each in results for one in each.epochs)
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    curves = [_points(result, is_tested) for result in results]
    lows = [min(point.loss for point in curve) for curve in curves]
    known = zip(names, _differences(results), results, curves, strict=True)
    return SideBySide(
        loss="test loss" if is_tested else "train loss",
        lowest=min(lows),
        reached=max(lows),
        runs=tuple(_side(*each, max(lows)) for each in known),
    )


def _differences(results: Sequence[RunResult]) -> list[str]:
    """Return, for each run, the settings that differ between the runs."""
    settings = [settings_of(result) for result in results]
    names = dict.fromkeys(name for own in settings for name in own)
    unlike = [name for name in names if len({str(own.get(name)) for own in settings}) > 1]
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
    """Return a table with a row for each run."""
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
    """Return a table of relative losses at equal times: a column for each run."""
    rows: Rows = [
        (duration(at_s), *(_divided(run.loss_at(at_s), sides) for run in sides.runs))
        for at_s in sides.times
    ]
    return Table(("after", *(run.name for run in sides.runs)), rows)


def epochs_table(sides: SideBySide) -> Table:
    """Return a table of relative losses after epochs: a column for each run."""
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
    """Divide a loss by the lowest loss of all runs, unless the lowest loss is zero."""
    return loss / sides.lowest if sides.lowest else loss


def page_of(sides: SideBySide) -> Page:
    """Build the page that compares the runs."""
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
        curve = line(i, run.name, ends_s, losses, mode="lines+markers", legendgroup=str(i))
        by_time.append(curve)
        by_epoch.append(curve | {"x": [one.epoch for one in run.points], "showlegend": False})
    last = max(point.epoch for run in sides.runs for point in run.points)
    seconds = {"title": "seconds of training", "rangemode": "tozero"}
    epochs = {"title": "epoch", "rangemode": "tozero"} | whole_numbers(last)
    left = Panel(by_time, seconds, {"title": f"{sides.loss} / lowest"}, "Against time")
    shared = {"matches": "y", "showticklabels": False}
    return figure_of([left, Panel(by_epoch, epochs, shared, "Against epochs")], _HEIGHT, gap=0.05)


def _bars(sides: SideBySide, field: str) -> Described | None:
    """Draw a row for each run with a bar for each worker; None if no run has the field."""
    values = {run.name: own for run in sides.runs if (own := getattr(run, field))}
    if not values:
        return None
    workers = dict.fromkeys(worker for own in values.values() for worker in own)
    groups = {name: {run: own.get(name) for run, own in values.items()} for name in workers}
    return share_bars(groups, COLOURS, 24 * len(values) * (1 + len(workers)), is_downward=True)
