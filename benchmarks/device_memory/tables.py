"""The tables of result.json, as the README shows them."""

from collections.abc import Mapping
from typing import Any

from paceline.report.format import nbytes
from readme import table

_WITHOUT_TREE = (
    "`tree` is not there: it sends from GPU to GPU, for which ranks that share one have only gloo, "
    "which cannot read a GPU's memory."
)


def of(network: str, by_ranks: Mapping[str, Any]) -> str:
    """Return the tables of a network."""
    return "\n\n".join(_table(network, ranks, found) for ranks, found in by_ranks.items())


def _table(network: str, ranks: str, found: Mapping[str, Any]) -> str:
    rows = []
    for name in ("host", "tree"):
        if name not in found:
            continue
        own = found[name]
        devices = [", ".join(map(nbytes, own[kind])) for kind in ("measured", "predicted")]
        rows.append((name, *devices, str(own["largest_batch"]), str(own["predicted_largest"])))
    limit = nbytes(found["limit_nbytes"])
    title = f"{network}, {ranks}, {found['batch_size']} samples a rank; devices of {limit}"
    head = ("", "measured, by rank", "predicted", "largest batch, measured", "predicted")
    drawn = table(title, head, rows)
    return drawn if "tree" in found else f"{drawn}\n\n{_WITHOUT_TREE}"
