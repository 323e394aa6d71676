"""Time training to a target loss: adaptive, fixed equal batches, the fast worker alone."""

from statistics import median
from typing import Any

from cases import seconds_to_loss

from figures import table

_RATIOS, _RATES, _SEEDS = (4, 16), (0.1, 0.2, 0.5, 1.0, 2.0), range(5)
_ALONE_SIZES, _QUICK_SIZES = (4, 16, 64, 256), (16,)
_BATCH = 64
_SPREAD = 4  # maximum over minimum batch size of `adaptive`
_TUNED = 100  # seed that selects rates and batch sizes; not in the results


def measure(quick: bool) -> dict[str, Any]:
    """Return each method's seconds by seed, with its best learning rate of the grid.

    A seed that is not in the results selects the rates, and the batch size with which the fast
    worker alone needs the least time. This size is the maximum of `adaptive`, and the size of fixed
    equal batches.
    """
    sizes = _QUICK_SIZES if quick else _ALONE_SIZES
    alone = {size: _way(_equal("cpu:1", size), quick) for size in sizes}
    reached = [size for size in sizes if alone[size]["rate"] is not None]
    most = min(reached, key=lambda size: alone[size]["tuned"]["seconds"])
    least = max(1, most // _SPREAD)
    found: dict[str, Any] = {}
    for ratio in _RATIOS[:1] if quick else _RATIOS:
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
    rates, seeds = (_RATES[2:3], range(1)) if quick else (_RATES, _SEEDS)

    def run(rate: float, seed: int) -> dict[str, float | None]:
        return seconds_to_loss(quick, learning_rate=rate, seed=seed, batch_size=_BATCH, **way)

    tried = {rate: run(rate, _TUNED) for rate in rates}
    reached = {rate: one["seconds"] for rate, one in tried.items() if one["seconds"] is not None}
    if not reached:
        return {"rate": None, "seconds": [None for _ in seeds], "median_s": None, "tuned": None}
    best = min(reached, key=reached.__getitem__)
    took = [run(best, seed)["seconds"] for seed in seeds]
    known = [one for one in took if one is not None]
    middle = median(known) if len(known) == len(took) else None
    return {"rate": best, "seconds": took, "median_s": middle, "tuned": tried[best]}


def text(figures: dict[str, Any]) -> str:
    """Return the table."""
    rows = [
        (
            *(ratio, way, shown(row["rate"]), shown(row["median_s"])),
            *(", ".join(map(shown, row["seconds"])), _times(row.get("faster"))),
        )
        for ratio, ways in figures.items()
        for way, row in ways.items()
    ]
    head = ("speeds", "way", "learning rate", "median s", "s of each seed", "times as fast")
    return table("Time to the target loss", head, rows)


def _times(faster: dict[str, float] | None) -> str:
    """Format the speed-up over the fast worker alone: of the medians, and its range."""
    if faster is None:
        return "-"
    return f"{faster['of_medians']:.2f} ({faster['least']:.2f} to {faster['most']:.2f})"


def shown(value: float | None) -> str:
    """Format seconds or a rate for a table."""
    return "not reached" if value is None else f"{value:.3g}"
