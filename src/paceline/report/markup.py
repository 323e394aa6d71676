"""HTML elements whose text is always escaped."""

from collections.abc import Iterable, Sequence
from html import escape


class Html(str):
    """Markup, as opposed to text that still has to be escaped."""

    __slots__ = ()


def element(tag: str, *children: str, **attributes: str) -> Html:
    """Return an element; children that are no `Html` are escaped.

    A trailing underscore of an attribute's name is dropped, as in `class_`.
    """
    named = "".join(
        f' {name.rstrip("_")}="{escape(value)}"' for name, value in attributes.items() if value
    )
    return Html(f"<{tag}{named}>{join(children)}</{tag}>")


def join(children: Iterable[str]) -> Html:
    """Return the children one after another, escaped where they are text."""
    return Html("".join(c if isinstance(c, Html) else escape(c) for c in children))


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], text_columns: Sequence[int] = (0,)
) -> Html:
    """Return a table. All columns hold numbers, aligned to the right, but the `text_columns`."""
    kinds = ["text" if i in text_columns else "number" for i in range(len(head))]

    def row(tag: str, cells: Sequence[str]) -> Html:
        pairs = zip(cells, kinds, strict=True)
        return element("tr", *(element(tag, cell, class_=kind) for cell, kind in pairs))

    body = element("tbody", *(row("td", cells) for cells in rows))
    return element("table", element("thead", row("th", head)), body)


def fact_table(facts: Iterable[tuple[str, str]]) -> Html:
    """Return a table of names and what they stand for, without a head."""
    rows = (element("tr", element("th", name, scope="row"), element("td", v)) for name, v in facts)
    return element("table", element("tbody", *rows), class_="facts")
