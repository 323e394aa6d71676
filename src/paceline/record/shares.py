"""Which layer each moment of a phase belongs to, from the marks that its hooks left."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from paceline.core.timeline import Span


def before(copies: Sequence[Span], start: float, end: float) -> float:
    """Return when a layer's own work ended: what its gradient's hook copied came after it."""
    inside = [copy.start_s for copy in copies if start <= copy.start_s and copy.end_s <= end]
    return min(inside, default=end)


def between_copies(
    copies: Sequence[Span], start: float, end: float
) -> Iterator[tuple[str, float, float]]:
    """Yield what a phase without known layers computed before, between and after its copies.

    Each piece has the name of the copy that follows it; the last one has none.
    """
    for copy in sorted(copies, key=lambda span: span.start_s):
        if start <= copy.start_s and copy.end_s <= end:
            yield copy.part, start, copy.start_s
            start = copy.end_s
    yield "", start, end


def end_of_run(parts: Sequence[str], times: Sequence[float], moment: float) -> float:
    """Return the time of the last mark that follows the moment without another part's between."""
    last = bisect_right(times, moment)
    while 0 < last < len(parts) and parts[last] == parts[last - 1]:
        moment, last = times[last], last + 1
    return moment


def between_entries(
    borders: Sequence[tuple[str, float]], start: float, end: float, layers: Sequence[str]
) -> list[tuple[str, float, float]]:
    """Give each layer the time from its first entry to the first entry of the next.

    One that is never entered follows the one registered before it.
    """
    first: dict[str, float] = {} if borders else {layers[0]: start}
    for part, time in borders:
        first.setdefault(part, time)
    starts = [start, *list(first.values())[1:]]
    shares = list(zip(first, starts, [*starts[1:], end], strict=False))
    for i, layer in enumerate(layers):
        if layer not in first:
            parts = [part for part, _, _ in shares]
            at = parts.index(layers[i - 1]) + 1 if i else 0
            time = shares[at - 1][2] if at else start
            shares.insert(at, (layer, time, time))
    return shares


def up_to_last(
    borders: Sequence[tuple[str, float]], start: float, layers: Sequence[str]
) -> list[tuple[str, float, float]]:
    """Give each layer the time until the last of its gradients is ready, the others nothing."""
    last: dict[str, float] = {}
    for part, time in borders:
        last.pop(part, None)
        last[part] = time
    ends = list(last.values())
    end = ends[-1] if ends else start
    never = [(layer, end, end) for layer in layers if layer not in last]
    return [*zip(last, [start, *ends[:-1]], ends, strict=False), *never]
