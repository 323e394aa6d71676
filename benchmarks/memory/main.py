"""Compare the predicted memory of a training step with PyTorch's count.

Each cell is a `paceline profile` of one of the five networks of Mojumder et al. 2018, with the
model's default image size.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from command import paceline
from figures import Part, table
from paceline.report.format import nbytes
from paceline.training.models import find

_NETWORKS = ("lenet5", "alexnet", "googlenet", "inception-v3", "resnet50")
_BATCHES, _QUICK_BATCHES = (16, 32, 64), (2,)
_KEPT = ("parameters", "features", "predicted", "measured")


def measure(network: str, quick: bool) -> dict[str, Any]:
    """Return a network's memory in bytes and the prediction error, by batch size."""
    image = list(find(network).input_shape or ())
    rows = {}
    for size in _QUICK_BATCHES if quick else _BATCHES:
        memory = paceline("profile", network, "--batch-size", size, "--steps", 4)["memory"]
        kept = {name: memory[name] for name in _KEPT}
        error = memory["predicted"] / memory["measured"] - 1
        rows[str(size)] = {"image": image, **kept, "error": error}
    return rows


def text(network: str, figures: Mapping[str, Any]) -> str:
    """Return the table of a network."""
    lines = [
        (
            batch,
            *(nbytes(row[name]) for name in ("features", "predicted", "measured")),
            f"{100 * row['error']:+.1f} %",
        )
        for batch, row in figures.items()
    ]
    first = next(iter(figures.values()))
    image = "x".join(map(str, first["image"]))
    title = f"{network}, images of {image}, {nbytes(first['parameters'])} of parameters"
    head = ("batch", "feature maps", "predicted at most", "measured at most", "error")
    return table(title, head, lines)


PARTS = {name: Part(partial(measure, name), partial(text, name)) for name in _NETWORKS}
