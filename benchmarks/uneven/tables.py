"""The tables of result.json, as the README shows them."""

from collections.abc import Mapping
from typing import Any

from figures import shown
from readme import table

_TITLES = {
    "mlp": "MLP 64-1024-1024-10 on the digits, 480 samples a step",
    "alexnet": "AlexNet, rehearsed, 20 samples a step",
}


def of(part: str, figures: Mapping[str, Any]) -> str:
    """Return the table of a part."""
    lines = [
        (
            name,
            shown(row["samples_per_s"], digits=1),
            f"{row['times']:.2f}",
            " + ".join(map(str, figures["shares"].get(name, ()))),
        )
        for name, row in figures["variants"].items()
    ]
    head = ("variant", "samples/s, median [quartiles]", "times DDP's", "shares of a batch")
    return table(_TITLES[part], head, lines)
