"""Time training to a target loss: adaptive, fixed equal batches, the fast worker alone."""

from statistics import median
from typing import Any

from cases import Goal, race, seconds_to

RATIOS = (4, 16)
RATES = (0.1, 0.2, 0.5, 1.0, 2.0)
SEEDS = range(5)
ALONE_SIZES = (4, 16, 64, 256)
QUICK_SIZES = (16,)
GOAL, QUICK_GOAL = Goal(0.28, 12), Goal(0.6, 4)
BATCH = 64
_SPREAD = 4  # maximum over minimum batch size of `adaptive`
_TUNED = 100  # seed that selects rates and batch sizes; not in the results


def measure(quick: bool) -> dict[str, Any]:
    """Return each method's seconds by seed, with its best learning rate of the grid.

    Seed `_TUNED`, which is not in the results, selects the rates, and the batch size with which the
    fast worker alone needs the least time (samples to the loss / samples per second). This size is
    the maximum of `adaptive`, and the size of fixed equal batches.
    """
    alone = _all(_alone(quick), quick)
    most = _fastest_size(alone)
    ratios = RATIOS[:1] if quick else RATIOS
    found = {f"{ratio}:1": _all(_ways(ratio, most), quick) for ratio in ratios}
    best = alone[_name(most)]["seconds"]
    for ways in found.values():
        for way in ways.values():
            way["faster"] = _faster(best, way["seconds"])
    return found | {"the fast worker alone": alone}


def _ways(ratio: int, most: int) -> dict[str, dict[str, Any]]:
    both = f"cpu:1,cpu:1@slow={ratio}"
    least = max(1, most // _SPREAD)
    equal = {"policy": "cpu_gpu", "cpu_batch": [most, most]}
    return {
        f"adaptive, {least} to {most}": {
            "workers": both,
            "options": {"policy": "adaptive", "cpu_batch": [least, most]},
        },
        f"fixed equal, {most}": {"workers": both, "options": equal},
    }


def _alone(quick: bool) -> dict[str, dict[str, Any]]:
    return {
        _name(size): {
            "workers": "cpu:1",
            "options": {"policy": "cpu_gpu", "cpu_batch": [size, size]},
        }
        for size in (QUICK_SIZES if quick else ALONE_SIZES)
    }


def _name(size: int) -> str:
    return f"batch {size}"


def _fastest_size(alone: dict[str, Any]) -> int:
    """Return the batch size with the shortest time to the loss: samples / samples per s."""
    sizes = {int(name.split()[1]): row for name, row in alone.items()}
    known = {size: row for size, row in sizes.items() if row["tuned"]["seconds"] is not None}
    return min(
        known,
        key=lambda size: known[size]["tuned"]["samples"] / known[size]["tuned"]["samples_per_s"],
    )


def _faster(alone: list[float | None], pair: list[float | None]) -> dict[str, float] | None:
    """Return the pair's speed-up (medians, extremes of seeds); None if a run misses the loss."""
    both = [(a, b) for a, b in zip(alone, pair, strict=True) if a is not None and b is not None]
    if len(both) < len(pair) or not both:
        return None
    ratios = [a / b for a, b in both]
    medians = median(a for a, _ in both) / median(b for _, b in both)
    return {"of_medians": medians, "least": min(ratios), "most": max(ratios)}


def _all(ways: dict[str, dict[str, Any]], quick: bool) -> dict[str, Any]:
    return {name: _way(way, quick) for name, way in ways.items()}


def _way(way: dict[str, Any], quick: bool) -> dict[str, Any]:
    goal = QUICK_GOAL if quick else GOAL
    rates, seeds = (RATES[2:3], range(1)) if quick else (RATES, SEEDS)

    def run(rate: float, seed: int) -> dict[str, float | None]:
        wanted = race(
            quick, learning_rate=rate, seed=seed, batch_size=BATCH, epochs=goal.epochs, **way
        )
        return seconds_to(goal, wanted)

    tried = {rate: run(rate, _TUNED) for rate in rates}
    reached = {rate: one["seconds"] for rate, one in tried.items() if one["seconds"] is not None}
    if not reached:
        none = {"seconds": None, "samples": None, "samples_per_s": None}
        return {"rate": None, "seconds": [None for _ in seeds], "median_s": None, "tuned": none}
    best = min(reached, key=reached.__getitem__)
    took = [run(best, seed)["seconds"] for seed in seeds]
    known = [one for one in took if one is not None]
    middle = median(known) if len(known) == len(took) else None
    return {"rate": best, "seconds": took, "median_s": middle, "tuned": tried[best]}
