"""The tables of result.json, as the README shows them.

    python benchmarks/memory/tables.py

puts them into README.md, between the lines that say so.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from paceline.report.format import nbytes  # noqa: E402
from readme import fill, table  # noqa: E402


def of(network: str, figures: Mapping[str, Any]) -> str:
    """Return the table of a network."""
    lines = [
        (
            batch,
            nbytes(row["features"]),
            nbytes(row["predicted"]),
            nbytes(row["measured"]),
            f"{100 * row['error']:+.1f} %",
        )
        for batch, row in figures.items()
    ]
    first = next(iter(figures.values()))
    image = "x".join(map(str, first["image"]))
    title = f"{network}, images of {image}, {nbytes(first['parameters'])} of parameters"
    head = ("batch", "feature maps", "predicted at most", "measured at most", "error")
    return table(title, head, lines)


if __name__ == "__main__":
    fill(HERE, ["result.json"], of)
