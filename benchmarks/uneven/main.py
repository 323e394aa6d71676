"""What balanced batches gain where one of two workers is four times slower.

The slower worker is stretched: real arithmetic, and then it waits.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import alexnet

from figures import Part, shown, table
from ranks import on_ranks


def mlp(quick: bool) -> dict[str, Any]:
    """Return the figures of the digits MLP, in a user's own loop."""
    return on_ranks(Path(__file__).parent, "mlp", 2, quick)


def text(title: str, figures: Mapping[str, Any]) -> str:
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
    return table(title, head, lines)


_MLP = "MLP 64-1024-1024-10 on the digits, 480 samples a step"
_ALEXNET = "AlexNet, rehearsed, 20 samples a step"
PARTS = {
    "mlp": Part(mlp, partial(text, _MLP)),
    "alexnet": Part(alexnet.measure, partial(text, _ALEXNET)),
}
