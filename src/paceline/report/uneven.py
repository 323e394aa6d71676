"""The sections of a run on uneven workers: figures 5 to 8 of Ma, Rusu et al. 2020, for this run."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from itertools import accumulate
from pathlib import Path

import plotly.graph_objects as go

from paceline.core.timeline import Origin, Timeline
from paceline.record.trace import read_trace
from paceline.report.asynchronous import of_uneven
from paceline.report.figures import styled
from paceline.report.format import duration, number, share
from paceline.report.header import Drawn, header
from paceline.report.insights import insights
from paceline.report.markup import Html, table
from paceline.report.palette import TEST, TRAIN
from paceline.report.sections import conformity, facts, figure_of, learning, lost, section, steps
from paceline.uneven_result import UnevenResult, WorkerRow, read_uneven

_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_HEIGHT, _LEFT = 290, 60  # pixels
_MOST_MISSED = 30  # bars of the histogram; the last holds all beyond


def drawn(folder: Path) -> Drawn | None:
    """Return the page of the folder of such a run; None if it is one of another kind."""
    result = read_uneven(folder)
    if result is None:
        return None
    title = f"{result.settings.model}, run {result.id}"
    return title, _sections(result, read_trace(folder / "trace.json"))


def _sections(result: UnevenResult, timelines: Mapping[Origin, Timeline]) -> Iterator[Html]:
    yield _header(result)
    yield insights(of_uneven(result))
    yield learning(result.epochs, result.score)
    yield loss_in_time(result)
    yield updates(result)
    yield sizes(result)
    yield staleness(result)
    yield utilisation(result)
    yield steps(list(timelines.values()))
    yield facts(result)
    yield from lost(result.lost)
    yield conformity(result.faults)


def _header(result: UnevenResult) -> Html:
    settings = result.settings
    policy = settings.options.get("policy", "adaptive")
    line = f"on {settings.data}, strategy {result.strategy}, policy {policy}: {settings.workers}"
    epochs = len(result.epochs)
    tiles = (
        (
            f"test {result.score}",
            share(result.accuracy, 2),
            f"after {epochs} epoch{'s' * (epochs != 1)}",
        ),
        ("test loss", f"{result.loss:.4f}", "at the end"),
        ("training", duration(result.trained_s), "without the tests between epochs"),
        ("samples/s", number(result.samples_per_s), "measured"),
    )
    return header(settings.model, line, result.id, tiles)


def loss_in_time(result: UnevenResult) -> Html:
    """Return the losses against the seconds of training."""
    seconds = list(accumulate(epoch.seconds for epoch in result.epochs))
    figure = go.Figure()
    for name, losses, style in (
        ("train loss", [epoch.train_loss for epoch in result.epochs], TRAIN),
        ("test loss", [epoch.test_loss for epoch in result.epochs], TEST),
    ):
        figure.add_trace(go.Scatter(x=seconds, y=losses, name=name, mode="lines+markers", **style))
    figure.update_xaxes(title_text="seconds of training", rangemode="tozero")
    note = "The training loss is the mean over an epoch, each batch on the model as it was then."
    drawn = figure_of(styled(figure, _HEIGHT, _LEFT), "loss-in-time")
    return section("Loss against time", note, drawn)


def updates(result: UnevenResult) -> Html:
    """Return the updates of each worker, and the gap between the first and the last."""
    head = ("worker", "asked for", "tried", "samples", "updates", "share", "predicted")
    rows = [_row(row, result) for row in result.workers]
    drawn = table(head, rows, text_columns=(0, 1))
    note = "Updates of the shared model. Tried: samples/s on the batch size, before the training."
    if not result.update_gaps:
        return section("Updates", note, drawn)
    times, gaps = zip(*result.update_gaps, strict=True)
    figure = go.Figure(go.Scatter(x=times, y=gaps, mode="lines", line={"color": _COLOURS[0]}))
    figure.update_xaxes(title_text="seconds of training", rangemode="tozero")
    figure.update_yaxes(title_text="updates ahead of the last", rangemode="tozero")
    return section("Updates", note, drawn, figure_of(styled(figure, _HEIGHT, _LEFT), "gaps"))


def _row(row: WorkerRow, result: UnevenResult) -> Sequence[str]:
    tried, predicted = row.tried_samples_per_s, row.predicted_share
    return (
        row.name,
        row.spec,
        "-" if tried is None else number(tried),
        f"{row.samples:,}",
        f"{result.updates[row.name]:,}",
        share(row.updates_share),
        "-" if predicted is None else share(predicted),
    )


def sizes(result: UnevenResult) -> Html:
    """Return each worker's batch size over time."""
    figure = _lines(result.batch_sizes.items())
    figure.update_xaxes(title_text="seconds of training", rangemode="tozero")
    figure.update_yaxes(title_text="samples", type="log")
    drawn = figure_of(styled(figure, _HEIGHT, _LEFT), "sizes")
    return section("Batch size", "At the end of each batch; the policy decides.", drawn)


def _lines(points: Iterable[tuple[str, Sequence[tuple[float, int]]]]) -> go.Figure:
    figure = go.Figure()
    for i, (name, pairs) in enumerate(points):
        figure.add_trace(
            go.Scatter(
                x=[time for time, _ in pairs],
                y=[value for _, value in pairs],
                name=escape(name, quote=False),
                mode="lines",
                line={
                    "shape": "hv",
                    "color": _COLOURS[i % len(_COLOURS)],
                    "dash": _DASHES[i % len(_DASHES)],
                },
            )
        )
    return figure


def staleness(result: UnevenResult) -> Html:
    """Return how many of its batches missed how many updates, for each worker."""
    figure = go.Figure()
    for i, (name, counted) in enumerate(result.staleness.items()):
        bars: dict[int, int] = {}
        for missed, times in counted.items():
            bars[min(missed, _MOST_MISSED)] = bars.get(min(missed, _MOST_MISSED), 0) + times
        total = sum(bars.values()) or 1
        figure.add_trace(
            go.Bar(
                x=list(bars),
                y=[times / total for times in bars.values()],
                name=escape(name, quote=False),
                marker={"color": _COLOURS[i % len(_COLOURS)]},
            )
        )
    figure.update_xaxes(title_text="updates of others that a batch missed")
    figure.update_yaxes(title_text="share of batches", tickformat=".0~%")
    note = f"Bar {_MOST_MISSED} holds all that missed so many or more."
    drawn = figure_of(styled(figure, _HEIGHT, _LEFT), "staleness")
    return section("Staleness", note, drawn)


def utilisation(result: UnevenResult) -> Html:
    """Return the share of the time of training in which each worker computed."""
    names = [escape(name, quote=False) for name in result.utilisation]
    values = list(result.utilisation.values())
    bars = go.Bar(
        x=values,
        y=names,
        orientation="h",
        text=[share(value) for value in values],
        marker={"color": _COLOURS[0]},
    )
    figure = go.Figure(bars)
    figure.update_xaxes(range=[0, 1.05], tickformat=".0~%")
    drawn = figure_of(styled(figure, 100 + 40 * len(names), _LEFT), "utilisation")
    return section("Utilisation", "", drawn)
