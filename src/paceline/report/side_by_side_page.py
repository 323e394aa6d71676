"""The page of runs beside each other: losses in one figure, updates and utilisation in bars."""

from collections.abc import Iterator, Mapping

import plotly.graph_objects as go

from paceline.report.figures import COLOURS, escaped, figure_of, styled, whole_numbers
from paceline.report.format import share
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
    figure = figure_of(_curves(sides), "losses")
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
            yield section(title, note, figure_of(_bars(values), name))


def _curves(sides: SideBySide) -> go.Figure:
    titles = ("Against time", "Against epochs")
    figure = go.Figure().set_subplots(
        rows=1, cols=2, subplot_titles=titles, shared_yaxes=True, horizontal_spacing=0.05
    )
    for number_of, run in enumerate(sides.runs):
        line = {
            "color": COLOURS[number_of % len(COLOURS)],
            "dash": _DASHES[number_of // len(COLOURS) % len(_DASHES)],
        }
        losses = [normalised(point.loss, sides) for point in run.points]
        for column in (1, 2):
            figure.add_scatter(
                x=[point.seconds if column == 1 else point.epoch for point in run.points],
                y=losses,
                name=escaped(run.name),
                legendgroup=str(number_of),
                showlegend=column == 1,
                mode="lines+markers",
                line=line,
                row=1,
                col=column,
            )
    figure.update_xaxes(title_text="seconds of training", rangemode="tozero", col=1)
    last = max(point.epoch for run in sides.runs for point in run.points)
    figure.update_xaxes(title_text="epoch", rangemode="tozero", col=2, **whole_numbers(last))
    figure.update_yaxes(title_text=f"{sides.loss} / lowest", col=1)
    return styled(figure, _HEIGHT)


def _field(sides: SideBySide, name: str) -> dict[str, Mapping[str, float]]:
    """Return what the runs have in a field by worker; runs that have nothing are left out."""
    values = {run.name: getattr(run, name) for run in sides.runs}
    return {run: own for run, own in values.items() if own}


def _bars(values: Mapping[str, Mapping[str, float]]) -> go.Figure:
    """Return a row of bars for each run, a bar for each worker."""
    workers = dict.fromkeys(worker for own in values.values() for worker in own)
    runs, figure = list(values), go.Figure()
    for number_of, worker in enumerate(workers):
        of_worker = [values[run].get(worker) for run in runs]
        figure.add_bar(
            x=of_worker,
            y=list(map(escaped, runs)),
            name=escaped(worker),
            orientation="h",
            text=[None if one is None else share(one) for one in of_worker],
            marker={"color": COLOURS[number_of % len(COLOURS)]},
        )
    figure.update_xaxes(range=[0, 1.05], tickformat=".0~%")
    figure.update_yaxes(autorange="reversed")
    return styled(figure, 100 + 24 * len(runs) * (1 + len(workers)), left=120)
