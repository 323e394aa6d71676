"""Measure accuracy per epoch of wheel and synchronous SGD on digits (Du et al. 2017, figure 7).

Both methods have four workers and the same batches. Each has the learning rate of one grid that
reaches the target in the fewest epochs, on a seed that is not in the results.
"""

from pathlib import Path
from statistics import mean
from typing import Any

from command import CommandFailed, paceline
from figures import table

_TARGET, _WORKERS, _BATCH_SIZE, _EPOCHS = 0.97, 4, 64, 30
_RATES = (0.025, 0.05, 0.1, 0.2, 0.4)
_TRIED, _SEEDS = 100, range(5)
_WAYS = {
    "synchronous SGD": ("--strategy", "allreduce", "--profile-s", "0.2"),
    "wheel": ("--strategy", "wheel", "--profile-s", "0"),
}
_DIVERGED = "paceline: learning_rate: "  # the error of a rate that is too large


def measure(quick: bool) -> dict[str, Any]:
    """Return each method's best learning rate, and its accuracies per epoch by seed."""
    epochs = 2 if quick else _EPOCHS
    rates, seeds = (_RATES[:1], _SEEDS[:2]) if quick else (_RATES, _SEEDS)
    ways = {}
    for name in _WAYS:
        tried = {rate: _accuracies(name, rate, _TRIED, epochs) for rate in rates}
        rate = min(
            tried,
            key=lambda rate: (_reached(tried[rate]) or epochs + 1, -max(tried[rate], default=0)),
        )
        ways[name] = {
            "learning_rate": rate,
            "accuracies": [_accuracies(name, rate, seed, epochs) for seed in seeds],
        }
    return {"epochs": epochs, "ways": ways}


def _accuracies(way: str, rate: float, seed: int, epochs: int) -> list[float]:
    """Train, and return the test accuracy of each epoch; none if the rate is too large."""
    # `rate` is per update; `--learning-rate` is per step of all workers.
    of_step = rate * _WORKERS if way == "wheel" else rate
    words = ("train", "networks:digits", *_WAYS[way], "--workers", _WORKERS, "--seed", seed)
    learning = ("--batch-size", _BATCH_SIZE, "--learning-rate", of_step, "--momentum", 0)
    try:
        result = paceline(*words, *learning, "--epochs", epochs, cwd=Path(__file__).parent)
    except CommandFailed as failed:
        if _DIVERGED in str(failed):
            return []
        raise
    return [epoch["score"] for epoch in result["epochs"]]


def _reached(accuracies: list[float]) -> int | None:
    """Return the number of epochs until the target; None if it was not reached."""
    return next((n + 1 for n, one in enumerate(accuracies) if one >= _TARGET), None)


def text(figures: dict[str, Any]) -> str:
    """Return the table."""
    lines = []
    for name, way in figures["ways"].items():
        found = [_reached(own) for own in way["accuracies"]]
        known = [one for one in found if one is not None]
        middle = f"{mean(known):.1f}" if len(known) == len(found) else ""
        last = mean(own[-1] if own else 0.0 for own in way["accuracies"])
        each = (str(one or "never") for one in found)
        lines.append((name, f"{way['learning_rate']:g}", *each, middle, f"{last:.2%}"))
    seeds = [f"seed {seed}" for seed in range(len(lines[0]) - 4)]
    head = ("", "learning rate", *seeds, "mean", f"accuracy after {figures['epochs']}")
    title = f"Digits, {_WORKERS} workers: epochs until {_TARGET:.0%} of the test samples"
    return table(title, head, lines)
