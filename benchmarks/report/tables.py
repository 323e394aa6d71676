"""The table of result.json, as the README shows it.

    python benchmarks/report/tables.py

puts it into README.md, between the lines that say so.
"""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from figures import shown  # noqa: E402
from readme import fill, table  # noqa: E402


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


if __name__ == "__main__":
    fill(HERE, ["result.json"], of)
