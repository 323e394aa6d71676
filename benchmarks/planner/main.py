"""Compare predicted with measured step times, configuration by configuration.

Layers sleep for a GPU's times, or train for real. Exchanges are real, over loopback or between two
hosts (which requires root). Each run makes its prediction before it starts.
"""

import sys
from functools import partial
from typing import Any

import pictures
import tables
import terminal
from cases import CASES, Configuration
from hosts import TwoHosts

from command import paceline
from figures import Part, Picture

_DEADLINE_S = 400.0


def measure(part: str, quick: bool) -> list[dict[str, Any]]:
    """Return a row for each configuration of a part."""
    configurations = CASES[part][:2] if quick else CASES[part]
    if configurations[0].place == "loopback":
        return [_row(one, None) for one in configurations]
    with TwoHosts(configurations[0].place) as hosts:
        return [_row(one, hosts) for one in configurations]


def _row(configuration: Configuration, hosts: TwoHosts | None) -> dict[str, Any]:
    result = paceline(*configuration.command, hosts=hosts, deadline_s=_DEADLINE_S)
    (plan, *_) = (one for one in result["plans"] if one["step_s"] == result["predicted_step_s"])
    kind = "measured" if configuration.device is None else "rehearsed"
    row = {
        "case": configuration.case,
        "way": configuration.name,
        "kind": kind,
        "predicted_s": result["predicted_step_s"],
        "step_s": result["step_s"],
        "range_share": plan["range_share"],
        "quartiles_s": [result.get("lower_quartile_s"), result.get("upper_quartile_s")],
    }
    error = row["predicted_s"] / row["step_s"] - 1
    shown = f"{1e3 * row['predicted_s']:9.2f} {1e3 * row['step_s']:9.2f} {error:+7.1%}"
    print(f"{shown}  {row['case']}: {row['way']}", file=sys.stderr, flush=True)
    return row


PARTS = {name: Part(partial(measure, name), partial(tables.of, name)) for name in CASES}
PICTURES = {
    **{
        f"docs/images/plan-{scene.strategy}.svg": Picture(
            lambda _, scene=scene: pictures.drawn(scene)
        )
        for scene in pictures.SCENES
    },
    "docs/images/plan.svg": Picture(lambda _: terminal.drawn()),
}
