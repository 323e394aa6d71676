"""Measure the gain of balanced batches if one of two workers is four times slower.

Variants alternate; each is a whole run of `paceline rehearse --slowdown`, in which the slower
worker computes for real and then sleeps.
"""

from collections.abc import Mapping
from functools import partial
from statistics import median
from typing import Any, NamedTuple

from command import paceline
from figures import Part, shown, spread, table

_BASELINE = "DDP, equal batches"  # strategy allreduce uses DDP
_UNEVEN, _AUTO = ("--workers", 2, "--slowdown", "1,4"), ("--balance", "auto")
_VARIANTS: dict[str, tuple[object, ...]] = {
    "the fast worker alone": ("--workers", 1, "--slowdown", 1),
    _BASELINE: (*_UNEVEN, "--strategy", "allreduce"),
    "allreduce, balanced": (*_UNEVEN, *_AUTO, "--strategy", "allreduce"),
    "host, balanced": (*_UNEVEN, *_AUTO, "--strategy", "host"),
}


class Case(NamedTuple):
    """A model, the samples per step, the steps per run, and the runs per variant."""

    title: str
    model: str
    batch_size: int
    num_steps: int
    num_rounds: int


_CASES = {
    "mlp": Case("MLP 64-1024-1024-10 on the digits", "mlp-64-1024-1024-10", 480, 60, 5),
    "alexnet": Case("AlexNet, rehearsed", "alexnet", 64, 6, 2),
}


def measure(case: Case, quick: bool) -> dict[str, Any]:
    """Return the figures of all variants."""
    model, steps = ("lenet5", 3) if quick else (case.model, case.num_steps)
    rates: dict[str, list[float]] = {name: [] for name in _VARIANTS}
    shares: dict[str, list[int]] = {}
    words = ("rehearse", model, "--batch-size", case.batch_size, "--steps", steps)
    for _ in range(1 if quick else case.num_rounds):
        for name, options in _VARIANTS.items():
            result = paceline(*words, "--timeout", 120, *options)
            rates[name].append(result["samples_per_s"])
            shares[name] = list(result["shares"] or ())
    middle = median(rates[_BASELINE])
    rows = {
        name: {"samples_per_s": spread(values), "times": median(values) / middle}
        for name, values in rates.items()
    }
    return {"samples": case.batch_size, "shares": shares, "variants": rows}


def text(case: Case, figures: Mapping[str, Any]) -> str:
    """Return the table of a part."""
    lines = [
        (
            name,
            shown(row["samples_per_s"], digits=1),
            f"{row['times']:.2f}",
            " + ".join(map(str, figures["shares"].get(name, ()))),
        )
        for name, row in figures["variants"].items()
    ]
    head = ("variant", "samples/s, median [quartiles]", "times DDP's", "shares of a batch")
    return table(f"{case.title}, {case.batch_size} samples a step", head, lines)


PARTS = {name: Part(partial(measure, case), partial(text, case)) for name, case in _CASES.items()}
