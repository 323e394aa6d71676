"""The tables of result.json, as the README shows them."""

from collections.abc import Mapping
from typing import Any

from paceline.report.format import nbytes
from readme import table


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
