"""Measure a new user's waiting times: clone and demo, a first plan, short commands.

Clones of the last commit and virtual environments are created in a temporary folder. The times
include pip's downloads of torch and other dependencies from its configured index.
"""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from clone import clone, demos
from commands import commands, installed

from figures import Part, shown, table


def _runs(title: str, columns: Mapping[str, str], runs: Sequence[Mapping[str, float]]) -> str:
    """Return a table with each run's seconds by part, their sum, and the median sum."""
    lines = [
        (str(number), *(f"{run[name]:.1f}" for name in columns), f"{_sum(run, columns):.1f}")
        for number, run in enumerate(runs, 1)
    ]
    middle = median(_sum(run, columns) for run in runs)
    lines.append(("median", *("" for _ in columns), f"{middle:.1f}"))
    return table(title, ("run", *columns.values(), "together"), lines)


def _sum(run: Mapping[str, float], columns: Mapping[str, str]) -> float:
    return sum(run[name] for name in columns)


def _clone(figures: dict[str, Any]) -> str:
    columns = {"cloned_s": "git clone", "first_demo_s": "make demo, which installs"}
    runs = figures["runs"]
    again = ", ".join(f"{run['second_demo_s']:.1f}" for run in runs)
    title = "Seconds from `git clone` to the demo's report"
    return f"{_runs(title, columns, runs)}\n\nA second demo takes {again} s."


def _installed(figures: dict[str, Any]) -> str:
    columns = {"installed_s": "pip install", "planned_s": "paceline plan mine:net --data digits"}
    title = "Seconds from `pip install` of the wheel to a plan of one's own module"
    return _runs(title, columns, figures["runs"])


def _commands(figures: dict[str, Any]) -> str:
    columns = ("processor_s", "elapsed_s")
    lines = [(name, *(shown(row[one]) for one in columns)) for name, row in figures.items()]
    return table("Commands that measure nothing, s", ("", "of processors", "elapsed"), lines)


def _demos(figures: dict[str, Any]) -> str:
    lines = []
    for name, runs in figures.items():
        inside = sum(run["least_s"] <= run["measured_s"] <= run["most_s"] for run in runs)
        widths = [run["most_s"] / run["predicted_s"] - 1 for run in runs]
        errors = [abs(run["predicted_s"] / run["measured_s"] - 1) for run in runs]
        narrow = sum(width <= 0.155 for width in widths)
        lines.append(
            (
                name,
                f"{inside} of {len(runs)}",
                f"±{min(widths):.0%} to ±{max(widths):.0%}",
                f"{narrow} of {len(runs)}",
                f"{median(errors):.0%}, at most {max(errors):.0%}",
            )
        )
    head = ("", "median within the range", "range", "at most ±15 %", "off by")
    return table("The demo's prediction beside what it then measured", head, lines)


PARTS = {
    "clone": Part(clone, _clone, "The demo of a clone"),
    "installed": Part(installed, _installed, "A first plan"),
    "commands": Part(commands, _commands, "Commands"),
    "demos": Part(demos, _demos, "Twenty demos"),
}
