"""The sections of the page, each from a part of the result or from the timelines."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import plotly.graph_objects as go
from plotly.io import to_json
from pydantic import BaseModel

from paceline.core.timeline import Timeline
from paceline.report.excerpt import excerpt
from paceline.report.figures import learning_curves, step_parts, steps_in_time
from paceline.report.format import duration, nbytes, number, share
from paceline.report.markup import Html, element, fact_table, table
from paceline.report.palette import KINDS, PARTS, Fill
from paceline.result import (
    ComparisonRow,
    ComparisonTable,
    EpochRow,
    RehearsalResult,
    Result,
)
from paceline.subbatch_result import SplitRow

_MOST_FAULTS = 20
_UNBROKEN = "\N{NO-BREAK SPACE}"
_NO_SCRIPTS = "This figure needs JavaScript."
_CONFIG = {
    "displayModeBar": False,
    "displaylogo": False,
    "responsive": True,
    "modeBarButtons": [["zoomIn2d", "zoomOut2d", "pan2d", "zoom2d", "resetScale2d"]],
}


def plans(result: Result) -> Html:
    """Return what the strategies were predicted to take."""
    chosen = (result.strategy, result.settings.workers)
    head = ("strategy", "workers", "predicted step", "predicted samples/s", "wire per step", "why")
    rows = [
        (
            _strategy(
                f"{plan.strategy}, {plan.codec}" if plan.codec else plan.strategy,
                (plan.strategy, plan.workers) == chosen,
            ),
            str(plan.workers),
            duration(plan.step_s),
            number(plan.samples_per_s),
            nbytes(plan.wire_nbytes_per_step),
            plan.why,
        )
        for plan in result.plans
    ]
    note = (
        "Predicted before the training, best first. Wire: bytes that a step sends over the "
        "busiest link, in one direction."
    )
    decisions = [element("p", decision) for decision in result.decisions]
    drawn = element("div", table(head, rows, text_columns=(0, 5)), class_="wide plan")
    return section("Plan", note, drawn, *decisions)


def _strategy(name: str, chosen: bool) -> str:
    if not chosen:
        return name
    return element("span", element("b", name), element("span", "this run", class_="chip"))


def learning(epochs: Sequence[EpochRow], score: str = "accuracy") -> Html:
    """Return loss and accuracy over the epochs, as a figure and as a table.

    `score` is what the accuracy is called.
    """
    rows = [
        (
            str(epoch.number + 1),
            f"{epoch.train_loss:.4f}",
            f"{epoch.test_loss:.4f}",
            share(epoch.accuracy, 2),
            duration(epoch.seconds),
        )
        for epoch in epochs
    ]
    head = ("epoch", "train loss", "test loss", f"test {score}", "time")
    details = element("details", element("summary", "The same in numbers"), table(head, rows))
    drawn = figure_of(learning_curves(epochs, score), "learning")
    return section(f"Loss and {score}", "", drawn, details)


def parts(comparison: ComparisonTable) -> Html:
    """Return where a step goes, on both sides."""
    note = (
        f"A step as {comparison.left} and as {comparison.right}, on average over the devices "
        "and over the typical steps: the middle half by duration. "
        f"What is {comparison.right} here are the traced steps, which recording makes a little "
        "slower. Hidden communication runs beside the computation and adds nothing to the step; "
        "exposed communication does."
    )
    head = ("per step", comparison.left, comparison.right, f"error of {comparison.left}")
    rows = [
        (
            _quantity(row),
            duration(row.left_s),
            duration(row.right_s),
            "-" if row.error is None else share(row.error, signed=True),
        )
        for row in comparison.rows
    ]
    return section(
        "Where a step goes",
        note,
        # The table below names the colours, and wraps as a legend would not.
        figure_of(step_parts(comparison).update_layout(showlegend=False), "parts"),
        table(head, rows),
    )


def _quantity(row: ComparisonRow) -> Html:
    fill = PARTS.get(row.quantity)
    if fill is None:
        return element("b", row.quantity)
    return _swatched(fill)


def _swatched(fill: Fill) -> Html:
    swatch = element("span", class_="swatch", style=fill.css)
    return element("span", swatch, fill.label)


def steps(timelines: Sequence[Timeline]) -> Html:
    """Return two steps of each timeline as a picture."""
    excerpts = [excerpt(timeline) for timeline in timelines if timeline.spans]
    if not excerpts:
        return section("Two steps in time", "trace.json holds no timeline.")
    note = (
        "Consecutive steps from the middle of each timeline, on one scale of time. A task that "
        "holds several resources stands in the row of each; dotted lines are ends of steps. Drag "
        "to zoom, double-click to return; trace.json opens in Perfetto and holds all that was "
        "recorded."
    )
    drawn = steps_in_time(excerpts).update_layout(showlegend=False)
    shown = {bar.name for bar in drawn.data}
    fills = (_swatched(fill) for fill in KINDS.values() if fill.label in shown)
    legend = element("div", *fills, class_="legend")
    return section("Two steps in time", note, legend, figure_of(drawn, "steps", zoomed=True))


def traffic(split: SplitRow) -> Html:
    """Return what was sent for a head that was split, and what it saved."""
    rows = [
        (row.purpose, nbytes(row.planned_nbytes_per_step), nbytes(row.nbytes_per_step))
        for row in split.traffic
    ]
    whole, most = nbytes(split.head_state_nbytes), nbytes(max(split.own_state_nbytes))
    note = (
        f"The head ({', '.join(split.head)}) is split by its outputs. Its parameters, gradients "
        f"and momentum take {whole}; a worker has {most} of them at the most, which saves "
        f"{nbytes(split.saved_nbytes)}. Below, what a worker sends in a step."
    )
    return section("Bytes by purpose", note, table(("purpose", "planned", "counted"), rows))


def trials(result: RehearsalResult) -> Html:
    """Return the chunk sizes that a search has tried, in that order."""
    head = ("layers", "predicted step", "rehearsed step", "")
    rows = [
        (
            str(row.chunk),
            duration(row.predicted_s),
            duration(row.rehearsed_s),
            element("span", "chosen", class_="chip") if row.chunk == result.config["chunk"] else "",
        )
        for row in result.trials
    ]
    note = "Layers that are exchanged together, in the order in which the search tried them."
    return section("Chunk search", note, table(head, rows))


class Ran(Protocol):
    """A result that says how something ran, and on what."""

    @property
    def settings(self) -> BaseModel:
        """What was asked for."""

    @property
    def machine(self) -> dict[str, Any]:
        """The machine, and the versions."""

    @property
    def peak_memory_bytes(self) -> Sequence[int]:
        """The most that each worker held."""


def facts(result: Ran) -> Html:
    """Return the settings of the run, and what it ran on."""
    peaks = [nbytes(peak).replace(" ", _UNBROKEN) for peak in result.peak_memory_bytes]
    machine = [*readable(result.machine), ("peak memory of each worker", ", ".join(peaks))]
    settings = result.settings.model_dump(mode="json")
    columns = (
        element("div", element("h3", "Settings"), fact_table(readable(settings))),
        element("div", element("h3", "Machine and versions"), fact_table(machine)),
    )
    return section("Settings and machine", "", element("div", *columns, class_="pair"))


def conformity(faults: Sequence[str]) -> Html:
    """Return whether the trace did what the plan says, and where it did not."""
    if not faults:
        return section("Conformity", "The trace conforms to the plan.")
    note = f"The trace departs from the plan in {len(faults)} place{'s' * (len(faults) > 1)}:"
    shown = [element("li", fault) for fault in faults[:_MOST_FAULTS]]
    if len(faults) > _MOST_FAULTS:
        shown.append(element("li", f"and {len(faults) - _MOST_FAULTS} more, in result.json"))
    return section("Conformity", note, element("ul", *shown, class_="faults"))


def readable(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield names and values with the units that the names end with."""
    for name, value in facts.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and name.endswith("_bytes"):
            yield _words(name.removesuffix("_bytes")), nbytes(value)
        elif is_number and name.endswith("_s"):
            yield _words(name.removesuffix("_s")), duration(value)
        else:
            yield _words(name), _text(value)


def _words(name: str) -> str:
    return name.replace("_", " ")


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} = {_text(inner)}" for key, inner in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)


def section(title: str, note: str, *content: Html) -> Html:
    """Return a section with its heading, a note where there is one, and its content."""
    notes = (element("p", note, class_="soft"),) if note else ()
    return element("section", element("h2", title), *notes, *content)


def figure_of(figure: go.Figure, name: str, *, zoomed: bool = False) -> Html:
    """Return the room that the figure takes, and what the page's script will draw there.

    One that is to be `zoomed` has buttons for it, which fingers need.
    """
    config = _CONFIG | ({"displayModeBar": True} if zoomed else {})
    described = to_json(figure.to_dict() | {"config": config}, validate=False)
    return element(
        "figure",
        element("div", id=f"figure-{name}", style=f"height:{figure.layout.height}px"),
        element("script", Html(described), type="application/json"),
        element("noscript", _NO_SCRIPTS),
    )


def lost(workers: Sequence[str]) -> Iterator[Html]:
    """Yield the workers that were lost, if any were."""
    if workers:
        yield section("Lost workers", "", element("ul", *(element("li", one) for one in workers)))
