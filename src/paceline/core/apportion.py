"""Splitting a batch among workers of different speed, in whole samples."""

from collections.abc import Sequence
from fractions import Fraction
from math import isfinite


def apportion(
    num_samples: int, speeds: Sequence[float], most: Sequence[int | None] | None = None
) -> tuple[int, ...]:
    """Return how many samples each worker takes, so that the last one is done as early as can be.

    `speeds` are in proportion to samples a second; `most` bounds what a worker can take (None: it
    is not bounded). The parts sum to `num_samples`. Each is the worker's proportion, rounded: to
    the divisors of D'Hondt, because the largest remainder would give the hundredth part of a
    hundred samples to a worker that needs longer for it than all others for the rest. A faster
    worker never gets less than a slower one with the same bound. ValueError if speeds are negative
    or not finite, or if the workers cannot take so many.
    """
    if not all(isfinite(speed) and speed >= 0 for speed in speeds):
        raise ValueError(f"speeds: must be finite and 0 or more, not {list(speeds)}")
    exact = [Fraction(speed) for speed in speeds]
    room = [num_samples if bound is None else bound for bound in most or [None] * len(exact)]
    able = [
        min(bound, num_samples) if speed else 0 for speed, bound in zip(exact, room, strict=True)
    ]
    if sum(able) < num_samples:
        raise ValueError(f"most: {num_samples} samples are more than workers take: {able}")
    parts = _whole(num_samples, exact, able)
    for _ in range(num_samples - sum(parts)):
        left = [rank for rank, part in enumerate(parts) if part < able[rank]]
        parts[min(left, key=lambda rank: (parts[rank] + 1) / exact[rank])] += 1
    return tuple(parts)


def _whole(num_samples: int, speeds: Sequence[Fraction], able: Sequence[int]) -> list[int]:
    """Return the proportions rounded down; who cannot take his, takes what he can."""
    full: set[int] = set()
    while True:
        others = [rank for rank, speed in enumerate(speeds) if speed and rank not in full]
        left = num_samples - sum(able[rank] for rank in full)
        total = sum((speeds[rank] for rank in others), Fraction())
        over = {rank for rank in others if left * speeds[rank] > able[rank] * total}
        if not over:
            break
        full |= over
    parts = [able[rank] if rank in full else 0 for rank in range(len(speeds))]
    for rank in others:
        parts[rank] = int(left * speeds[rank] / total)
    return parts
