"""The page that compares runs: losses in one figure, updates and utilisation as bars."""

from collections.abc import Mapping

from paceline.report.figures import (
    COLOURS,
    Described,
    Panel,
    escaped,
    figure_of,
    share_bars,
    whole_numbers,
)
from paceline.report.page import Page
from paceline.report.side_by_side import (
    SideBySide,
    epochs_table,
    normalised,
    summary_table,
    times_table,
)

_HEIGHT = 360  # pixels
_DASHES = ("solid", "dash", "dot", "dashdot")


def page_of(sides: SideBySide) -> Page:
    """Build the page that compares the runs."""
    updates, utilisation = _field(sides, "update_shares"), _field(sides, "utilisation")
    content = {
        "sides": sides,
        "runs": summary_table(sides),
        "losses": _curves(sides),
        "by_time": times_table(sides),
        "by_epoch": epochs_table(sides),
        "updates": _bars(updates) if updates else None,
        "utilisation": _bars(utilisation) if utilisation else None,
    }
    return Page(f"{len(sides.runs)} runs beside each other", "side_by_side.html", content)


def _curves(sides: SideBySide) -> Described:
    by_time: list[Described] = []
    by_epoch: list[Described] = []
    for i, run in enumerate(sides.runs):
        dash = _DASHES[i // len(COLOURS) % len(_DASHES)]
        curve: Described = {"type": "scatter", "mode": "lines+markers", "name": escaped(run.name)}
        curve |= {"line": {"color": COLOURS[i % len(COLOURS)], "dash": dash}}
        curve |= {"legendgroup": str(i), "y": [normalised(one.loss, sides) for one in run.points]}
        by_time.append(curve | {"x": [point.seconds for point in run.points]})
        by_epoch.append(curve | {"x": [one.epoch for one in run.points], "showlegend": False})
    last = max(point.epoch for run in sides.runs for point in run.points)
    seconds = {"title": "seconds of training", "rangemode": "tozero"}
    epochs = {"title": "epoch", "rangemode": "tozero"} | whole_numbers(last)
    left = Panel(by_time, seconds, {"title": f"{sides.loss} / lowest"}, "Against time")
    shared = {"matches": "y", "showticklabels": False}
    return figure_of([left, Panel(by_epoch, epochs, shared, "Against epochs")], _HEIGHT, gap=0.05)


def _field(sides: SideBySide, name: str) -> dict[str, Mapping[str, float]]:
    """Return a field by worker for each run that has it."""
    values = {run.name: getattr(run, name) for run in sides.runs}
    return {run: own for run, own in values.items() if own}


def _bars(values: Mapping[str, Mapping[str, float]]) -> Described:
    """Draw a row for each run with a bar for each worker."""
    workers = dict.fromkeys(worker for own in values.values() for worker in own)
    groups = {name: {run: own.get(name) for run, own in values.items()} for name in workers}
    return share_bars(groups, COLOURS, 24 * len(values) * (1 + len(workers)), is_downward=True)
