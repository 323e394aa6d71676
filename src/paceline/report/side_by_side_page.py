"""The page of runs beside each other: losses in one figure, updates and utilisation in bars."""

from collections.abc import Iterator, Mapping

from paceline.report.figures import (
    COLOURS,
    Described,
    Panel,
    escaped,
    figure_element,
    figure_of,
    share_bars,
    whole_numbers,
)
from paceline.report.markup import Drawn, Html, element, section, table
from paceline.report.side_by_side import (
    SideBySide,
    epoch_rows,
    normalised,
    summary_rows,
    time_rows,
)

_HEIGHT = 360  # pixels
_DASHES = ("solid", "dash", "dot", "dashdot")


def drawn(sides: SideBySide) -> Drawn:
    """Return the page of the runs."""
    return f"{len(sides.runs)} runs beside each other", _sections(sides)


def _sections(sides: SideBySide) -> Iterator[Html]:
    title = f"{len(sides.runs)} runs beside each other"
    yield element("header", element("h1", title), element("div", sides.loss, class_="soft"))
    head, rows = summary_rows(sides)
    note = f"To {sides.reached:.4f}: seconds of training until the loss that all runs have reached."
    yield section("Runs", note, table(head, rows, (0, 1, 6, 7), class_="wide"))
    heads = tuple(run.name for run in sides.runs)
    note = f"The {sides.loss}, divided by the lowest that a run has reached: {sides.lowest:.4f}."
    numbers = (
        table(("after", *heads), time_rows(sides)),
        table(("epoch", *heads), epoch_rows(sides)),
    )
    figure = figure_element(_curves(sides), "losses")
    yield section("Loss against time and against epochs", note, figure, *numbers)
    for title, note, values in (
        ("Updates of each worker", "Share of a run's updates.", _field(sides, "update_shares")),
        (
            "Utilisation",
            "Share of the time in which a device computed.",
            _field(sides, "utilisation"),
        ),
    ):
        if values:
            name = title.split()[0].lower()
            yield section(title, note, figure_element(_bars(values), name))


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
    """Return what the runs have in a field by worker; runs that have nothing are left out."""
    values = {run.name: getattr(run, name) for run in sides.runs}
    return {run: own for run, own in values.items() if own}


def _bars(values: Mapping[str, Mapping[str, float]]) -> Described:
    """Return a row of bars for each run, a bar for each worker."""
    workers = dict.fromkeys(worker for own in values.values() for worker in own)
    groups = {name: {run: own.get(name) for run, own in values.items()} for name in workers}
    return share_bars(groups, COLOURS, 24 * len(values) * (1 + len(workers)), is_downward=True)
