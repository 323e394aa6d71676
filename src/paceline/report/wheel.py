"""The sections of a run of strategy wheel, or a rehearsal: bytes, staleness, who waited."""

from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path

import plotly.graph_objects as go

from paceline.core.timeline import Origin, Timeline
from paceline.record.trace import read_trace
from paceline.report.asynchronous import of_wheel
from paceline.report.figures import styled
from paceline.report.format import duration, nbytes, number, share
from paceline.report.header import Drawn, Tile, header
from paceline.report.insights import insights
from paceline.report.markup import Html, table
from paceline.report.sections import conformity, facts, figure_of, learning, lost, section, steps
from paceline.wheel_result import PurposeRow, WheelRehearsal, WheelResult, read_wheel

_COLOUR = "#0072b2"
_HEIGHT, _LEFT = 290, 60  # pixels
_MOST_MISSED = 30  # bars of the histogram; the last holds all beyond
_Result = WheelResult | WheelRehearsal


def drawn(folder: Path) -> Drawn | None:
    """Return the page of the folder of a run or a rehearsal of wheel; None of another kind."""
    result = read_wheel(folder)
    if result is None:
        return None
    what = "rehearsal" if isinstance(result, WheelRehearsal) else "run"
    title = f"{result.settings.model}, {what} {result.id}"
    return title, _sections(result, read_trace(folder / "trace.json"))


def _sections(result: _Result, timelines: Mapping[Origin, Timeline]) -> Iterator[Html]:
    yield _header(result)
    yield insights(of_wheel(result))
    if isinstance(result, WheelResult):
        yield learning(result.epochs, "accuracy")
    yield purposes(result)
    yield staleness(result)
    if result.idle_shares:
        yield idle(result)
    yield steps(list(timelines.values()))
    yield facts(result)
    yield from lost(result.lost)
    yield conformity(result.faults)


def _header(result: _Result) -> Html:
    settings = result.settings
    lanes = settings.config().lanes
    if isinstance(result, WheelRehearsal):
        what, tiles = f"rehearsed, not trained: {result.devices}", _rehearsed_tiles(result)
    else:
        what, tiles = f"on {result.settings.data}", _tiles(result)
    line = (
        f"{what}, strategy wheel, {settings.workers} workers, {lanes} a device, "
        f"{settings.batch_size} samples a step; the head begins with {result.head}"
    )
    return header(settings.model, line, result.id, tiles)


def _tiles(result: WheelResult) -> tuple[Tile, ...]:
    epochs = len(result.epochs)
    return (
        ("test accuracy", share(result.accuracy, 2), f"after {epochs} epoch{'s' * (epochs != 1)}"),
        ("predicted step", _seconds(result.predicted_step_s), "before training"),
        ("measured step", _seconds(result.measured_step_s), "on average, without tests"),
        ("prediction error", _error(result), "of the step"),
        ("samples/s", number(result.samples_per_s), "measured"),
    )


def _rehearsed_tiles(result: WheelRehearsal) -> tuple[Tile, ...]:
    lower, upper = duration(result.lower_quartile_s), duration(result.upper_quartile_s)
    return (
        ("predicted step", _seconds(result.predicted_step_s), "before the rehearsal"),
        ("rehearsed step", duration(result.rehearsed_step_s), f"half lie in {lower} to {upper}"),
        ("prediction error", _error(result), "predicted against rehearsed"),
        ("samples/s", number(result.samples_per_s), "rehearsed"),
    )


def _error(result: _Result) -> str:
    error = result.prediction_error
    return "-" if error is None else share(error, signed=True)


def _seconds(value: float | None) -> str:
    return "-" if value is None else duration(value)


def purposes(result: _Result) -> Html:
    """Return the bytes of the seven purposes, beside Table 1's formula."""
    head = ("purpose", "where", "bytes", "by the formula", "of an update")
    rows = [_row(row, max(1, result.updates)) for row in result.purposes]
    sent, received = result.wire_nbytes
    note = (
        "Without headers. With them, and with what else hub and workers tell each other, the hub "
        f"sent {nbytes(sent)} and received {nbytes(received)}."
    )
    return section("Bytes by purpose", note, table(head, rows, text_columns=(0, 1)))


def _row(row: PurposeRow, updates: int) -> tuple[str, ...]:
    where = "on the network" if row.travels else "within the hub"
    counted, formula = nbytes(row.nbytes), nbytes(row.formula_nbytes)
    return row.purpose, where, counted, formula, nbytes(row.nbytes / updates)


def staleness(result: _Result) -> Html:
    """Return how many updates missed how many others."""
    bars: dict[int, int] = {}
    for missed, times in result.staleness.items():
        place = min(missed, _MOST_MISSED)
        bars[place] = bars.get(place, 0) + times
    total = sum(bars.values()) or 1
    drawn = go.Figure(
        go.Bar(
            x=list(bars),
            y=[times / total for times in bars.values()],
            marker={"color": _COLOUR},
        )
    )
    drawn.update_xaxes(title_text="updates that the gradients of an update missed")
    drawn.update_yaxes(title_text="share of updates", tickformat=".0~%")
    note = f"{result.mean_staleness:.2f} on average. Bar {_MOST_MISSED} holds all beyond, too."
    return section("Staleness", note, figure_of(styled(drawn, _HEIGHT, _LEFT), "staleness"))


def idle(result: _Result) -> Html:
    """Return the share of the traced steps in which each body's device computed nothing."""
    rows = [
        (escape(device, quote=False), _planned(result, device), share(value))
        for device, value in result.idle_shares.items()
    ]
    happened = "measured" if isinstance(result, WheelResult) else "rehearsed"
    note = f"Of the traced steps, as predicted and as {happened}."
    return section("Idle devices", note, table(("device", "predicted", happened), rows))


def _planned(result: _Result, device: str) -> str:
    planned = result.predicted_idle_shares.get(device)
    return "-" if planned is None else share(planned)
