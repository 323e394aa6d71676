"""Measure the device memory of strategies host and tree, and the largest batch with each."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from figures import Part, table
from paceline.report.format import nbytes
from ranks import on_ranks

_HERE = Path(__file__).parent


def measure(network: str, quick: bool) -> dict[str, Any]:
    """Return the figures of a network for each number of ranks."""
    numbers = (2,) if quick else (2, 4)
    return {f"{n} ranks": on_ranks(_HERE, "peaks", n, quick, case=network) for n in numbers}


def text(network: str, by_ranks: Mapping[str, Any]) -> str:
    """Return the tables of a network."""
    return "\n\n".join(_table(network, ranks, found) for ranks, found in by_ranks.items())


def _table(network: str, ranks: str, found: Mapping[str, Any]) -> str:
    rows = []
    for name in ("host", "tree"):
        own = found[name]
        devices = [", ".join(map(nbytes, own[kind])) for kind in ("measured", "predicted")]
        rows.append((name, *devices, str(own["largest_batch"]), str(own["predicted_largest"])))
    limit = nbytes(found["limit_nbytes"])
    title = f"{network}, {ranks}, {found['batch_size']} samples a rank; devices of {limit}"
    head = ("", "measured, by rank", "predicted", "largest batch, measured", "predicted")
    return table(title, head, rows)


PARTS = {name: Part(partial(measure, name), partial(text, name)) for name in ("lenet5", "alexnet")}
