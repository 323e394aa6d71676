"""Format the results as tables for the README."""

from collections.abc import Sequence
from itertools import groupby
from statistics import mean
from typing import Any

from figures import table

_WITHIN = 1.03  # times the best step: counts as a good choice
_TITLES = {
    "loopback": "Rehearsed, two and four workers of one machine",
    "1gbit": "Rehearsed, two hosts at 1 Gbit/s",
    "100mbit": "Rehearsed, two hosts at 100 Mbit/s",
    "trained": "Measured, two workers of one machine",
}


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
