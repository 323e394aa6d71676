"""Compare predicted with measured step times, configuration by configuration.

Layers sleep for a GPU's times, or train for real. Exchanges are real, over loopback or between two
hosts (which requires root). Each run makes its prediction before it starts.
"""

import sys
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from statistics import mean
from typing import Any

from cases import CASES, Configuration
from hosts import TwoHosts

from command import paceline
from figures import Part, table

_DEADLINE_S = 400.0
_WITHIN = 1.03  # times the best step: counts as a good choice
_TITLES = {
    "loopback": "Rehearsed, two and four workers of one machine",
    "1gbit": "Rehearsed, two hosts at 1 Gbit/s",
    "100mbit": "Rehearsed, two hosts at 100 Mbit/s",
    "trained": "Measured, two workers of one machine",
}


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
    shown = f"{1e3 * row['predicted_s']:9.2f} {1e3 * row['step_s']:9.2f} {_error(row):+7.1%}"
    print(f"{shown}  {row['case']}: {row['way']}", file=sys.stderr, flush=True)
    return row


def of(part: str, rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of a part, with a summary of its predictions and choices."""
    lines = [
        (
            row["case"],
            row["way"],
            f"{1e3 * row['predicted_s']:.2f} ±{row['range_share']:.0%}",
            _with_quartiles(row),
            f"{_error(row):+.1%}",
        )
        for row in rows
    ]
    head = ("case", "way", "predicted ms", f"{rows[0]['kind']} ms [quartiles]", "error")
    return f"{table(_TITLES[part], head, lines)}\n\n{summary(rows)}"


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Return a sentence with the prediction errors and the number of good choices."""
    errors = [abs(_error(row)) for row in rows]
    cases = [list(rivals) for _, rivals in groupby(rows, key=lambda row: row["case"])]
    good = [_loss(rivals) <= _WITHIN for rivals in cases]
    within = sum(abs(one["step_s"] / one["predicted_s"] - 1) <= one["range_share"] for one in rows)
    return (
        f"{len(rows)} configurations, mean absolute error {mean(errors):.1%}, worst "
        f"{max(errors):.1%}; {within} steps lie within the range of their "
        f"prediction; the choice is within 3 % of the best in {sum(good)} of {len(good)} cases"
    )


def _error(row: dict[str, Any]) -> float:
    return row["predicted_s"] / row["step_s"] - 1


def _loss(rivals: Sequence[dict[str, Any]]) -> float:
    """Return the step time of the predicted best, relative to the measured best."""
    chosen = min(rivals, key=lambda row: row["predicted_s"])
    return chosen["step_s"] / min(row["step_s"] for row in rivals)


def _with_quartiles(row: dict[str, Any]) -> str:
    low, high = row["quartiles_s"]
    middle = f"{1e3 * row['step_s']:.2f}"
    return middle if low is None else f"{middle} [{1e3 * low:.2f}, {1e3 * high:.2f}]"


PARTS = {name: Part(partial(measure, name), partial(of, name)) for name in CASES}
