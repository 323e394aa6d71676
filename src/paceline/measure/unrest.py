"""How restless steps are, and rounds of them that are taken longer where they are.

Other programs beside a measurement make some of its steps longer than others.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from paceline.core.losses import BUSY, unrest_between
from paceline.core.plan import COMPUTE
from paceline.core.timeline import Span, quartiles
from paceline.links.group import Group

Rounds = list[list[float]]  # of one rank: in each round the seconds of its step, and of what else


def rounds_of_all(take: Callable[[], Rounds], group: Group) -> list[Rounds]:
    """Return the rounds of all ranks, and twice as many if the steps of the first are restless.

    `take` takes rounds on this rank, as many as on the others. All ranks call it together, and see
    the same unrest.
    """
    rows: list[Rounds] = group.gather(take())
    if unrest_of(rows) <= BUSY:
        return rows
    return [first + more for first, more in zip(rows, group.gather(take()), strict=True)]


def unrest_of(rows: Sequence[Sequence[Sequence[float]]]) -> float:
    """Return how far the quartiles of the slowest rank's steps lie from their median, over that.

    `rows`: of each rank, for each round, the seconds of its step first.
    """
    return _unrest([max(row[0] for row in one) for one in zip(*rows, strict=True)])


def unrest_of_traced(spans: Iterable[Span]) -> float:
    """Return the unrest of traced steps: of what the slowest device computes in each."""
    seconds: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for span in spans:
        if span.kind in COMPUTE:
            seconds[span.step][span.on[0].owner] += span.duration_s
    return _unrest([max(own.values()) for own in seconds.values()])


def _unrest(steps: Sequence[float]) -> float:
    lower, middle, upper = quartiles(steps)
    return unrest_between(lower, middle, upper)
