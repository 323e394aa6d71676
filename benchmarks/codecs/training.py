"""Whether training with a codec ends as well as with float32: accuracies, and an F-test of them."""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from accuracy import FLOAT32
from scipy.stats import f_oneway

from paceline.codecs.quantization import TABLES
from ranks import on_ranks
from readme import table

NUM_RANKS = 2


def measure(quick: bool) -> dict[str, Any]:
    """Return accuracies and tests of all tasks."""
    return tested(on_ranks(Path(__file__).parent, "accuracy", NUM_RANKS, quick))


def tested(figures: dict[str, Any]) -> dict[str, Any]:
    """Return the accuracies of tasks with tests of them."""
    for task in figures.values():
        accuracies = task["accuracies"]
        exact = accuracies[FLOAT32]
        task["tests"] = {
            codec: _f_test([exact, ours]) for codec, ours in accuracies.items() if codec != FLOAT32
        }
        types = [accuracies[name] for name in TABLES if name in accuracies]
        task["test_of_all_types"] = _f_test([exact, *types]) if types else None
    return figures


def _f_test(groups: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Return a one-way analysis of variance: whether the groups may be of one population."""
    found = f_oneway(*groups)
    num_values = sum(map(len, groups))
    return {
        "f": float(found.statistic),
        "p": float(found.pvalue),
        "degrees": [len(groups) - 1, num_values - len(groups)],
    }


def text(figures: dict[str, Any]) -> str:
    """Return the tables."""
    return "\n\n".join(_of_task(name, task) for name, task in figures.items())


def _of_task(name: str, task: dict[str, Any]) -> str:
    exact = task["accuracies"][FLOAT32]
    head = ["codec", *(f"seed {seed}" for seed in range(len(exact)))]
    head += ["mean", "deviation", "F", "p", "mean within float32's runs"]
    lines = [
        [
            codec,
            *(f"{100 * one:.2f}" for one in accuracies),
            f"{100 * mean(accuracies):.2f}",
            f"{100 * stdev(accuracies):.2f}",
            *_cells(task["tests"].get(codec)),
            "yes" if min(exact) <= mean(accuracies) <= max(exact) else "no",
        ]
        for codec, accuracies in task["accuracies"].items()
    ]
    title = (
        f"{name}: test accuracy in %, {task['num_parameters']:,} parameters, "
        f"{task['epochs']} epochs, batches of {task['batch_size']} on {NUM_RANKS} ranks, learning "
        f"rate {task['learning_rate']}"
    )
    together = task["test_of_all_types"]
    said = (
        f"\n\nfloat32 and the four 8-bit types together: {_written(together)}." if together else ""
    )
    return table(title, head, lines) + said


def _cells(test: dict[str, Any] | None) -> tuple[str, str]:
    return (f"{test['f']:.2f}", f"{test['p']:.2g}") if test else ("", "")


def _written(test: dict[str, Any]) -> str:
    between, within = test["degrees"]
    return f"F({between},{within}) = {test['f']:.2f}, p = {test['p']:.2f}"
