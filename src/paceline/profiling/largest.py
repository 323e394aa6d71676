"""The search for the largest batch that fits: pure, whatever an attempt is."""

from collections.abc import Callable

_FINENESS = 16  # the search ends where the next attempt would be less than 1/16 larger


class GaveUp(Exception):
    """An attempt took too long to say whether the batch fits."""


def largest(fits: Callable[[int], bool], first: int, most: int) -> tuple[int, bool]:
    """Return the largest batch from 1 to `most` that was seen to fit, to a 16th; 0 if none does.

    Begins at `first`, doubles it while it fits or halves it until it does, and then halves the gap.
    What fits is taken to fit in any smaller size, too. The second value is false where an attempt
    raised GaveUp, so that a larger batch may fit.
    """
    low, high = 0, most + 1
    size = min(max(1, first), most)
    try:
        while high - low > 1 + low // _FINENESS:
            if fits(size):
                low = size
            else:
                high = size
            size = _next(low, high, most)
    except GaveUp:
        return low, False
    return low, True


def _next(low: int, high: int, most: int) -> int:
    if high > most:  # nothing too large is known yet
        return min(2 * low, most) if low < most else most
    return high // 2 if low == 0 else (low + high) // 2
