"""The sections of the page, each from a part of the result or from the timelines."""

from collections.abc import Iterator, Sequence
from typing import Any

import plotly.graph_objects as go

from paceline.core.timeline import Timeline
from paceline.report.excerpt import excerpt
from paceline.report.figures import learning_curves, step_parts, steps_in_time
from paceline.report.format import duration, nbytes, number, share
from paceline.report.markup import Html, element, fact_table, table
from paceline.report.palette import PARTS
from paceline.result import ComparisonRow, ComparisonTable, EpochRow, RehearsalResult, Result
from paceline.uneven_result import UnevenResult
from paceline.wheel_result import WheelRehearsal, WheelResult

_MOST_FAULTS = 20
_UNBROKEN = "\N{NO-BREAK SPACE}"
_NO_SCRIPTS = "This figure needs JavaScript."


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
    drawn = figure_of(learning_curves(epochs, score), "learning", first=True)
    return section(f"Loss and {score}", "", drawn, details)


def parts(comparison: ComparisonTable, *, first: bool = False) -> Html:
    """Return where a step goes, on both sides; it may be the first figure of the page."""
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
        figure_of(step_parts(comparison), "parts", first=first),
        table(head, rows),
    )


def _quantity(row: ComparisonRow) -> Html:
    fill = PARTS.get(row.quantity)
    if fill is None:
        return element("b", row.quantity)
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
        "to zoom, double-click to return; trace.json opens in Perfetto and holds all steps."
    )
    return section("Two steps in time", note, figure_of(steps_in_time(excerpts), "steps"))


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


def facts(
    result: Result | RehearsalResult | UnevenResult | WheelResult | WheelRehearsal,
) -> Html:
    """Return the settings of the run, and what it ran on."""
    peaks = [nbytes(peak).replace(" ", _UNBROKEN) for peak in result.peak_memory_bytes]
    machine = [*_readable(result.machine), ("peak memory of each worker", ", ".join(peaks))]
    settings = result.settings.model_dump(mode="json")
    columns = (
        element("div", element("h3", "Settings"), fact_table(_readable(settings))),
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


def _readable(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
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


def figure_of(figure: go.Figure, name: str, *, first: bool = False) -> Html:
    """Return the figure; the first of the page brings plotly's code along."""
    drawn = figure.to_html(
        full_html=False,
        include_plotlyjs=first,
        config={"displayModeBar": False, "displaylogo": False, "responsive": True},
        div_id=f"figure-{name}",
    )
    return element("figure", Html(drawn), element("noscript", _NO_SCRIPTS))
