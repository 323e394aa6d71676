"""HTML elements whose text is always escaped."""

from collections.abc import Iterable, Sequence
from html import escape

from paceline.report.format import Quantity


class Html(str):
    """Markup, as opposed to text that still has to be escaped."""

    __slots__ = ()


def element(tag: str, *children: str, **attributes: str) -> Html:
    """Return an element; children that are no `Html` are escaped.

    A trailing underscore of an attribute's name is dropped, as in `class_`; others are hyphens.
    """
    named = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(value)}"'
        for name, value in attributes.items()
        if value
    )
    return Html(f"<{tag}{named}>{join(children)}</{tag}>")


def join(children: Iterable[str]) -> Html:
    """Return the children one after another, escaped where they are text."""
    return Html("".join(c if isinstance(c, Html) else escape(c) for c in children))


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], text_columns: Sequence[int] = (0,)
) -> Html:
    """Return a table. All columns hold numbers, aligned to the right, but the `text_columns`.

    A column of quantities of one unit is copied as exact numbers, below that unit.
    """
    body = [tuple(row) for row in rows]
    kinds = ["text" if i in text_columns else "number" for i in range(len(head))]
    columns = list(zip(*body, strict=True)) or [()] * len(head)
    units = [_unit(cells) for cells in columns]

    def row(cells: Sequence[str]) -> Html:
        drawn = zip(cells, kinds, units, strict=True)
        return element("tr", *(_cell(cell, kind, unit) for cell, kind, unit in drawn))

    titles = zip(head, kinds, units, strict=True)
    top = (element("th", name, class_=kind, data_unit=unit or "") for name, kind, unit in titles)
    whole = element(
        "table", element("thead", element("tr", *top)), element("tbody", *map(row, body))
    )
    return element("div", whole, class_="scroll")


def _unit(cells: Iterable[str]) -> str | None:
    """Return the unit of all quantities of a column; None if they differ, or there are none."""
    units = {cell.unit for cell in cells if isinstance(cell, Quantity)}
    return units.pop() if len(units) == 1 else None


def _cell(cell: str, kind: str, unit: str | None) -> Html:
    known = unit is not None and isinstance(cell, Quantity)
    exact = f"{cell.value:.12g}" if known and isinstance(cell, Quantity) else ""
    return element("td", cell, class_=kind, data_value=exact)


def fact_table(facts: Iterable[tuple[str, str]]) -> Html:
    """Return a table of names and what they stand for, without a head."""
    rows = (element("tr", element("th", name, scope="row"), element("td", v)) for name, v in facts)
    whole = element("table", element("tbody", *rows), class_="facts")
    return element("div", whole, class_="scroll")
