"""The tables of result.json, as the README shows them."""

from collections.abc import Iterator, Mapping
from statistics import fmean
from typing import Any

from paceline.report.format import duration
from readme import table

_Cells = list[dict[str, Any]]


def of(part: str, figures: Mapping[str, Any]) -> str:
    """Return the table of a network, and how far predictions were off."""
    cells: _Cells = figures["cells"]
    methods = list(dict.fromkeys(cell["method"] for cell in cells))
    head = ("scaling", "batch", "workers", *methods)
    title = f"{part}, images of {figures['images']}: an epoch of 262,144 samples"
    return "\n\n".join([table(title, head, _lines(cells, methods)), *_errors(cells)])


def _lines(cells: _Cells, methods: list[str]) -> Iterator[tuple[str, ...]]:
    measured = [cell for cell in cells if cell["kind"] == "measured"]
    rows: dict[tuple[str, int, int], dict[str, dict[str, Any]]] = {}
    for cell in measured:
        key = (cell["scaling"], cell["batch"], cell["workers"])
        rows.setdefault(key, {})[cell["method"]] = cell
    for (scaling, batch, workers), found in sorted(rows.items()):
        yield scaling, str(batch), str(workers), *(_shown(found[name]) for name in methods)


def _shown(cell: dict[str, Any]) -> str:
    if cell["error"] is not None:
        return cell["error"]
    lower, upper = map(duration, cell["spread"])
    return f"{duration(cell['epoch_s'])} [{lower}, {upper}]"


def _errors(cells: _Cells) -> Iterator[str]:
    """Yield how far the predictions were off, if any cell has both."""
    keys = ("method", "workers", "batch", "scaling")
    found = {
        (cell["kind"], *(cell[key] for key in keys)): cell["epoch_s"]
        for cell in cells
        if cell["error"] is None
    }
    errors = [
        abs(found["predicted", *key] / epoch_s - 1)
        for (kind, *key), epoch_s in found.items()
        if kind == "measured" and ("predicted", *key) in found
    ]
    if errors:
        yield f"Predicted epochs are off by {100 * fmean(errors):.1f} % on average."
