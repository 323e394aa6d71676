"""Time training to a target loss: adaptive, fixed equal batches, the fast worker alone."""

from statistics import median
from typing import Any

from cases import Goal, race, seconds_to

RATIOS = (4, 16)
RATES = (0.1, 0.2, 0.5, 1.0, 2.0)
SEEDS = range(5)
ALONE_SIZES, QUICK_SIZES = (4, 16, 64, 256), (16,)
GOAL, QUICK_GOAL = Goal(0.28, 12), Goal(0.6, 4)
BATCH = 64
SPREAD = 4  # maximum over minimum batch size of `adaptive`
TUNED = 100  # seed that selects rates and batch sizes; not in the results


def measure(quick: bool) -> dict[str, Any]:
    """Return each method's seconds by seed, with its best learning rate of the grid.

    Seed `TUNED`, which is not in the results, selects the rates, and the batch size with which the
    fast worker alone needs the least time. This size is the maximum of `adaptive`, and the size of
    fixed equal batches.
    """
    sizes = QUICK_SIZES if quick else ALONE_SIZES
    alone = {size: _way(_equal("cpu:1", size), quick) for size in sizes}
    reached = [size for size in sizes if alone[size]["rate"] is not None]
    most = min(reached, key=lambda size: alone[size]["tuned"]["seconds"])
    least = max(1, most // SPREAD)
    found: dict[str, Any] = {}
    for ratio in RATIOS[:1] if quick else RATIOS:
        both = f"cpu:1,cpu:1@slow={ratio}"
        adaptive = {"policy": "adaptive", "cpu_batch": [least, most]}
        ways = {
            f"adaptive, {least} to {most}": {"workers": both, "options": adaptive},
            f"fixed equal, {most}": _equal(both, most),
        }
        found[f"{ratio}:1"] = own = {name: _way(way, quick) for name, way in ways.items()}
        for way in own.values():
            way["faster"] = _faster(alone[most]["seconds"], way["seconds"])
    return found | {"the fast worker alone": {f"batch {size}": alone[size] for size in sizes}}


def _equal(workers: str, size: int) -> dict[str, Any]:
    return {"workers": workers, "options": {"policy": "cpu_gpu", "cpu_batch": [size, size]}}


def _faster(alone: list[float | None], pair: list[float | None]) -> dict[str, float] | None:
    """Return the pair's speed-up (medians, extremes of seeds); None if a run misses the loss."""
    both = [(a, b) for a, b in zip(alone, pair, strict=True) if a is not None and b is not None]
    if len(both) < len(pair):
        return None
    ratios = [a / b for a, b in both]
    medians = median(a for a, _ in both) / median(b for _, b in both)
    return {"of_medians": medians, "least": min(ratios), "most": max(ratios)}


def _way(way: dict[str, Any], quick: bool) -> dict[str, Any]:
    goal = QUICK_GOAL if quick else GOAL
    rates, seeds = (RATES[2:3], range(1)) if quick else (RATES, SEEDS)

    def run(rate: float, seed: int) -> dict[str, float | None]:
        known = {"learning_rate": rate, "seed": seed, "batch_size": BATCH, "epochs": goal.epochs}
        return seconds_to(goal, race(quick, **known, **way))

    tried = {rate: run(rate, TUNED) for rate in rates}
    reached = {rate: one["seconds"] for rate, one in tried.items() if one["seconds"] is not None}
    if not reached:
        return {"rate": None, "seconds": [None for _ in seeds], "median_s": None, "tuned": None}
    best = min(reached, key=reached.__getitem__)
    took = [run(best, seed)["seconds"] for seed in seeds]
    known = [one for one in took if one is not None]
    middle = median(known) if len(known) == len(took) else None
    return {"rate": best, "seconds": took, "median_s": middle, "tuned": tried[best]}
