"""The tables of result.json, as the README shows them."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from paceline.report.format import duration
from readme import table


def of(network: str, figures: Mapping[str, Any]) -> str:
    """Return the table of a network."""
    rows = {
        "recorded steps longer than plain ones": figures["cost"],
        "sum of the stages against the steps by the clock": figures["stages_error"],
    }
    rows |= {
        f"{phase} ({duration(found['seconds'])}): our spans against torch.profiler": found["error"]
        for phase, found in figures["phases"].items()
    }
    title = (
        f"{network}, 16 images of {figures['images']}, {duration(figures['step_s'])} a step, "
        f"{figures['steps']} steps of each kind a run"
    )
    head = ("", "median of the runs", "least, most")
    return table(title, head, [(name, *_shown(values)) for name, values in rows.items()])


def _shown(values: Sequence[float]) -> tuple[str, str]:
    return f"{median(values):+.2%}", f"{min(values):+.2%}, {max(values):+.2%}"
