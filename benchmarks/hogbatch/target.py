"""Time to a target loss: adaptive, fixed equal batches, and the fast worker alone."""

from statistics import median
from typing import Any

from cases import Goal, race, seconds_to

RATIOS = (4, 16)
RATES = (0.05, 0.1, 0.2, 0.5, 1.0)
SEEDS = range(5)
ALONE_SIZES = (16, 64, 256)
GOAL, QUICK_GOAL = Goal(0.28, 12), Goal(0.6, 4)
_BATCH = 64


def measure(quick: bool) -> dict[str, Any]:
    """Return seconds of each way for each seed, with its best learning rate of one grid.

    The rate is the one that is fastest with a seed of its own, which is not counted.
    """
    ratios = RATIOS[1:] if quick else RATIOS
    found = {f"{ratio}:1": _all(_ways(ratio), quick) for ratio in ratios}
    return found | {"the fast worker alone": _all(_alone(), quick)}


def _ways(ratio: int) -> dict[str, dict[str, Any]]:
    both = f"cpu:1,cpu:1@slow={ratio}"
    return {
        "adaptive": {
            "workers": both,
            "options": {"policy": "adaptive", "cpu_batch": [ALONE_SIZES[0], ALONE_SIZES[-1]]},
        },
        "fixed equal": {"workers": both, "options": {"policy": "hogbatch"}},
    }


def _alone() -> dict[str, dict[str, Any]]:
    return {
        f"batch {size}": {
            "workers": "cpu:1",
            "options": {"policy": "cpu_gpu", "cpu_batch": [size, size]},
        }
        for size in ALONE_SIZES
    }


def _all(ways: dict[str, dict[str, Any]], quick: bool) -> dict[str, Any]:
    return {name: _way(way, quick) for name, way in ways.items()}


def _way(way: dict[str, Any], quick: bool) -> dict[str, Any]:
    goal = QUICK_GOAL if quick else GOAL
    rates, seeds = (RATES[2:3], range(1)) if quick else (RATES, SEEDS)

    def seconds(rate: float, seed: int) -> float | None:
        wanted = race(
            quick, learning_rate=rate, seed=seed, batch_size=_BATCH, epochs=goal.epochs, **way
        )
        return seconds_to(goal, wanted)["seconds"]

    tried = {rate: seconds(rate, 100) for rate in rates}
    reached = {rate: took for rate, took in tried.items() if took is not None}
    if not reached:
        return {"rate": None, "seconds": [], "median_s": None}
    best = min(reached, key=reached.__getitem__)
    took = [seconds(best, seed) for seed in seeds]
    known = [one for one in took if one is not None]
    middle = median(known) if len(known) == len(took) else None
    return {"rate": best, "seconds": took, "median_s": middle}
