"""What all benchmarks share: medians with their spread, and a JSON that says where they hold."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

from paceline.measure.this_machine import facts


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median, the quartiles around it, and the number of values."""
    low, _, high = quantiles(values, n=4)
    return {"median": median(values), "quartile1": low, "quartile3": high, "repeats": len(values)}


def shown(figure: Mapping[str, float], scale: float = 1.0, digits: int = 3) -> str:
    """Return a figure as a table shows it: the median, and its quartiles in brackets."""
    middle, low, high = (scale * figure[key] for key in ("median", "quartile1", "quartile3"))
    return f"{middle:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def write(
    folder: Path, figures: Mapping[str, Any], others: Mapping[str, Any] | None = None
) -> None:
    """Write result.json: the figures, and the machine and versions that they hold for.

    `others` are those of parts that were measured on another machine, or with other versions.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    content: dict[str, Any] = {"machine": facts(device), "figures": figures}
    if others:
        content["other_machines"] = others
    (folder / "result.json").write_text(json.dumps(content, indent=2) + "\n")
