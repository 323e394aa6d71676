"""HTML elements whose text is always escaped, and what every page is made of."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from html import escape
from typing import Any

from pydantic import BaseModel

from paceline.core.outcome import Insight, Topic
from paceline.report.format import Quantity, duration, nbytes

_TOPICS: dict[Topic, str] = {"limit": "what limits", "change": "what next"}  # or as they are


class Html(str):
    """Markup, as opposed to text that still has to be escaped."""

    __slots__ = ()


Drawn = tuple[str, Iterable[Html]]
"""A page's title, and its sections."""


def element(tag: str, *children: str, **attributes: str) -> Html:
    """Return an element; children that are no `Html` are escaped.

    A trailing underscore of an attribute's name is dropped, as in `class_`; others are hyphens.
    """
    named = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(value)}"'
        for name, value in attributes.items()
        if value
    )
    inside = "".join(c if isinstance(c, Html) else escape(c) for c in children)
    return Html(f"<{tag}{named}>{inside}</{tag}>")


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    text_columns: Sequence[int] = (0,),
    class_: str = "",
) -> Html:
    """Return a table. All columns hold numbers, aligned to the right, but the `text_columns`.

    A column of quantities of one unit is copied as exact numbers, below that unit.
    """
    body = [tuple(row) for row in rows]
    kinds = ["text" if i in text_columns else "number" for i in range(len(head))]
    columns = list(zip(*body, strict=True)) or [()] * len(head)
    # One unit for a column, unless its quantities have several, or it has none.
    found = [{cell.unit for cell in cells if isinstance(cell, Quantity)} for cells in columns]
    units = [each.pop() if len(each) == 1 else None for each in found]
    titles = zip(head, kinds, units, strict=True)
    top = (element("th", name, class_=kind, data_unit=unit or "") for name, kind, unit in titles)
    drawn = []
    for row in body:
        cells = []
        for cell, kind, unit in zip(row, kinds, units, strict=True):
            exact = ""
            if unit is not None and isinstance(cell, Quantity):  # the unit is copied with the head
                exact = f"{cell.value:.12g}"
            cells.append(element("td", cell, class_=kind, data_value=exact))
        drawn.append(element("tr", *cells))
    whole = element("table", element("thead", element("tr", *top)), element("tbody", *drawn))
    scrolled = element("div", whole, class_="scroll")
    return element("div", scrolled, class_=class_) if class_ else scrolled


def section(title: str, note: str, *content: Html) -> Html:
    """Return a section with its heading, a note where there is one, and its content."""
    notes = (element("p", note, class_="soft"),) if note else ()
    return element("section", element("h2", title), *notes, *content)


def folded(summary: str, content: Html) -> Html:
    """Return content that is shown once its summary is clicked."""
    return element("details", element("summary", summary), content)


def listed(items: Iterable[str], class_: str = "") -> Html:
    """Return a list, an item for each text."""
    return element("ul", *(element("li", item) for item in items), class_=class_)


def header(title: str, line: str, run_id: str, tiles: Iterable[tuple[str, str, str]]) -> Html:
    """Return the title, what the run was in a line, which run it was and when, and its figures.

    `tiles` are labels, values and notes.
    """
    run = f"Run {run_id}"
    with suppress(ValueError):  # an id begins with the time if Paceline gave it
        run += datetime.strptime(run_id[:15], "%Y%m%d-%H%M%S").strftime(", %Y-%m-%d %H:%M:%S")
    shown = []
    for label, value, note in tiles:
        lines = element("span", label), element("b", value), element("small", note)
        shown.append(element("div", *lines, class_="tile"))
    return element(
        "header",
        element("h1", title),
        element("div", line),
        element("div", run, class_="soft"),
        element("div", *shown, class_="tiles"),
    )


def insights(rows: Iterable[Insight]) -> Html:
    """Return the first section of a page: what was found, each with the figures it rests on.

    What is found about one topic stands together, where the first of it would.
    """
    found: dict[str, list[Html]] = {}
    for row in rows:
        figures = (element("span", f"{name} ", element("b", value)) for name, value in row.figures)
        rests = element("div", *figures, class_="rests soft")
        said = element("div", element("span", row.sentence), rests)
        found.setdefault(_TOPICS.get(row.topic, row.topic), []).append(said)
    items = (
        element("li", element("span", topic, class_="topic"), element("div", *said))
        for topic, said in found.items()
    )
    nothing = element("p", "Too little is known of it to say anything.")
    return section("What it says", "", element("ul", *items, class_="says") if found else nothing)


def facts(
    settings: BaseModel, machine: Mapping[str, Any], peaks: Sequence[int] | None = None
) -> Html:
    """Return the last section: settings that have a value, and what it ran on.

    `peaks` is memory by worker.
    """
    known = dict(machine)
    if peaks is not None:
        unbroken = (nbytes(peak).replace(" ", "\N{NO-BREAK SPACE}") for peak in peaks)
        known["peak memory of each worker"] = ", ".join(unbroken)
    given = {
        name: value
        for name, value in settings.model_dump(mode="json").items()
        if value not in (None, {}, [])
    }
    columns = {"Settings": given, "Machine and versions": known}
    return columns_of("Settings and machine", columns)


def columns_of(title: str, columns: Mapping[str, Mapping[str, Any]]) -> Html:
    """Return a section with columns of names and values, below the columns' titles."""
    shown = []
    for name, values in columns.items():
        rows = (
            element("tr", element("th", name, scope="row"), element("td", text))
            for name, text in _readable(values)
        )
        whole = element("table", element("tbody", *rows), class_="facts")
        shown.append(element("div", element("h3", name), element("div", whole, class_="scroll")))
    return section(title, "", element("div", *shown, class_="pair"))


def _readable(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield names and values with the units that the names end with."""
    for name, value in values.items():
        shown, text = name, _text(value)
        if isinstance(value, int | float) and not isinstance(value, bool):
            for ending, written in (("_bytes", nbytes), ("_s", duration)):
                if name.endswith(ending):
                    shown, text = name.removesuffix(ending), written(value)
        yield shown.replace("_", " "), text


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} = {_text(inner)}" for key, inner in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)
