"""Time training to a target loss: adaptive, fixed equal batches, the fast worker alone.

The learning rates, and the batch size with which the fast worker alone needs the least time, are
those with the least median of three seeds. Other seeds then time each method in turns.
"""

from statistics import median
from typing import Any, NamedTuple

from cases import seconds_to_loss

from figures import shown, spread, table

_RATIO, _RATES, _SEEDS = 4, (0.1, 0.2, 0.5, 1.0, 2.0), range(15)
_ALONE_SIZES, _QUICK_SIZES = (4, 16, 64, 256), (16,)
_BATCH = 64
_SPREAD = 4  # maximum over minimum batch size of `adaptive`
_TUNED = range(100, 103)  # seeds that select rates and batch sizes; not in the results
_ALONE = "the fast worker alone"
Method = dict[str, Any]


class _Tuned(NamedTuple):
    """The least median of seconds to the loss, and the learning rate that reaches it."""

    seconds: float
    rate: float


def measure(quick: bool) -> dict[str, Any]:
    """Return each method's seconds by seed, its samples/s, and its best learning rate of the grid.

    The fast worker's best batch size is the maximum of `adaptive`, and the size of fixed equal
    batches.
    """
    sizes = _QUICK_SIZES if quick else _ALONE_SIZES
    alone = {size: _tuned(_equal("cpu:1", size), quick) for size in sizes}
    most = min(sizes, key=alone.__getitem__)
    least, both = max(1, most // _SPREAD), f"cpu:1,cpu:1@slow={_RATIO}"
    adaptive = {"policy": "adaptive", "cpu_batch": [least, most]}
    pairs = {
        f"adaptive, {least} to {most}": {"workers": both, "options": adaptive},
        f"fixed equal, {most}": _equal(both, most),
    }
    rates = {name: _tuned(pair, quick).rate for name, pair in pairs.items()}
    methods = {_ALONE: _equal("cpu:1", most)} | pairs
    rates[_ALONE] = alone[most].rate
    turns = [
        {name: _run(method, quick, rates[name], seed) for name, method in methods.items()}
        for seed in (_SEEDS[:1] if quick else _SEEDS)
    ]
    found = {
        name: {
            "rate": rates[name],
            "seconds": spread([turn[name]["seconds"] for turn in turns]),
            "samples_per_s": median(turn[name]["samples_per_s"] for turn in turns),
            "faster": spread([turn[_ALONE]["seconds"] / turn[name]["seconds"] for turn in turns]),
        }
        for name in methods
    }
    return {"alone": {size: one._asdict() for size, one in alone.items()}, "methods": found}


def _equal(workers: str, size: int) -> Method:
    return {"workers": workers, "options": {"policy": "cpu_gpu", "cpu_batch": [size, size]}}


def _tuned(method: Method, quick: bool) -> _Tuned:
    rates, seeds = (_RATES[2:3], _TUNED[:1]) if quick else (_RATES, _TUNED)

    def seconds(rate: float) -> float:
        return median(_run(method, quick, rate, seed)["seconds"] for seed in seeds)

    return min(_Tuned(seconds(rate), rate) for rate in rates)


def _run(method: Method, quick: bool, rate: float, seed: int) -> dict[str, float]:
    return seconds_to_loss(quick, learning_rate=rate, seed=seed, batch_size=_BATCH, **method)


def text(figures: dict[str, Any]) -> str:
    """Return the table of the methods, and the fast worker's time by batch size."""
    rows = [
        (
            *(name, f"{row['rate']:g}", shown(row["seconds"], 1, 2), shown(row["faster"], 1, 2)),
            f"{row['samples_per_s']:,.0f}",
        )
        for name, row in figures["methods"].items()
    ]
    head = ("method", "learning rate", "s, median [quartiles]", "times as fast", "samples/s")
    sizes = ", ".join(
        f"{one['seconds']:.2f} s with batch {size}" for size, one in figures["alone"].items()
    )
    title = f"Time to the target loss, the second worker {_RATIO} times slower"
    return f"{table(title, head, rows)}\n\nWhile tuning, {_ALONE} takes {sizes}."
