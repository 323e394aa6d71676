"""AlexNet, rehearsed: whole rehearsals in turn, as `paceline rehearse` makes them."""

import tempfile
from statistics import median
from typing import Any

import paceline
from figures import spread

BASELINE = "DDP, equal batches"  # which strategy allreduce is
_UNEVEN = {"workers": 2, "stretch": (1.0, 4.0)}
VARIANTS: dict[str, dict[str, Any]] = {
    "the fast worker alone": {"workers": 1, "stretch": 1.0},
    BASELINE: {**_UNEVEN, "strategy": "allreduce"},
    "allreduce, balanced": {**_UNEVEN, "strategy": "allreduce", "balance": "auto"},
    "host, balanced": {**_UNEVEN, "strategy": "host", "balance": "auto"},
}
_BATCH_SIZE, _NUM_ROUNDS, _NUM_STEPS = 20, 2, 4


def measure(quick: bool) -> dict[str, Any]:
    """Return the figures of all variants."""
    model, batch_size = ("lenet5", 64) if quick else ("alexnet", _BATCH_SIZE)
    rates: dict[str, list[float]] = {name: [] for name in VARIANTS}
    shares: dict[str, list[int]] = {}
    for _ in range(2 if quick else _NUM_ROUNDS):
        for name, settings in VARIANTS.items():
            with tempfile.TemporaryDirectory() as folder:
                result = paceline.rehearse(
                    model,
                    batch_size=batch_size,
                    steps=3 if quick else _NUM_STEPS,
                    deadline_s=120.0,
                    output=folder,
                    **settings,
                ).result
            rates[name].append(result.samples_per_s)
            shares[name] = list(result.shares or ())
    middle = median(rates[BASELINE])
    rows = {
        name: {"samples_per_s": spread(values), "times": median(values) / middle}
        for name, values in rates.items()
    }
    return {"samples": batch_size, "shares": shares, "variants": rows}
