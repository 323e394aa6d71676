"""The tables of result.json, as the README shows them."""

from collections.abc import Iterator, Mapping
from typing import Any

from figures import shown
from readme import table


def of(_: str, figures: Mapping[str, Any]) -> str:
    """Return the table of all cases."""
    head = (
        *("run", "page, MB", "written in, s", "window"),
        *("first screen, s, median [quartiles]", "all figures, s", "complaints of the console"),
    )
    return table("Reports of long runs", head, _lines(figures))


def _lines(figures: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for case, row in figures.items():
        for window, found in row["windows"].items():
            yield (
                case,
                f"{row['nbytes'] / 1e6:.2f}",
                f"{row['written_s']:.2f}",
                window,
                shown(found["first_screen_s"]),
                shown(found["all_figures_s"]),
                str(found["complaints"]),
            )
