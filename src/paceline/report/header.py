"""What every page begins with, whatever kind of run it is of."""

from collections.abc import Iterable
from datetime import datetime

from paceline.report.markup import Html, element

Tile = tuple[str, str, str]
"""A label, a value, and a note."""
Drawn = tuple[str, Iterable[Html]]
"""A page's title, and its sections."""


def header(title: str, line: str, run_id: str, tiles: Iterable[Tile]) -> Html:
    """Return the title, what the run was in a line, which run it was and when, and its figures."""
    run = ", ".join(filter(None, (f"Run {run_id}", _date(run_id))))
    return element(
        "header",
        element("h1", title),
        element("div", line),
        element("div", run, class_="soft"),
        element("div", *map(_tile, tiles), class_="tiles"),
    )


def _tile(tile: Tile) -> Html:
    label, value, note = tile
    return element(
        "div", element("span", label), element("b", value), element("small", note), class_="tile"
    )


def _date(run_id: str) -> str:
    """Return when the run was, for an id that begins as those which Paceline gives."""
    try:
        return datetime.strptime(run_id[:15], "%Y%m%d-%H%M%S").strftime("%Y-%m-%d %H:%M:%S")
    except ValueError:
        return ""
