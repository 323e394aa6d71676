"""The tables of result.json, as the README shows them.

    python benchmarks/device_memory/tables.py

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


if __name__ == "__main__":
    fill(HERE, ["result.json"], of)
