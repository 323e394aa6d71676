"""Compute the metrics of a scaling study for the rules of `advice`."""

from collections.abc import Callable, Iterable, Sequence
from typing import get_args

from paceline.records.scale import ScaleCell, Scaling, TimedCell, most_real, timed, unrest_of
from paceline.report.advice import Metrics
from paceline.report.format import counted
from paceline.report.metrics import of_rates

_SCALINGS = get_args(Scaling)


def of_study(cells: Sequence[ScaleCell]) -> Metrics:
    """Compute the metrics of the fastest cell; there are none if all cells failed.

    Only cells of the same kind and scaling are compared. The kind is the first available one of
    measured, rehearsed and predicted; the scaling is the first available one of `Scaling`.
    """
    found = Metrics({"unrest": unrest_of(cells)}, {"timed": "repetitions"})
    known = comparable(cells)
    if not known:
        return found
    first = max(known, key=lambda one: one.rate)
    parts, whole_s = first.parts, first.epoch_s
    found.values |= {
        "exposed": parts["the link"] / whole_s,
        "idle": parts["synchronisation"] / whole_s,
        "computing": parts["computation"] / whole_s,
    }
    found.words["exchange_less"] = f"a codec, a faster link or --batch-size {2 * first.batch}"
    if first.capacity_bytes:
        found.values["memory_used"] = first.memory_bytes / first.capacity_bytes
        found.words["holder"] = "a worker"
    same_batch = [one for one in known if one.batch == first.batch]
    _of_methods(same_batch, first, found)
    fastest = fastest_by(same_batch, lambda one: one.workers)
    of_rates({n: one.rate for n, one in fastest.items()}, found)
    return found


def comparable(cells: Iterable[ScaleCell]) -> list[TimedCell]:
    """Return the cells of one kind and one scaling, by the rules in `of_study`."""
    known = most_real(timed(cells))
    first = min((_SCALINGS.index(one.scaling) for one in known), default=0)
    return [one for one in known if one.scaling == _SCALINGS[first]]


def fastest_by(cells: Iterable[TimedCell], key: Callable[[TimedCell], int]) -> dict[int, TimedCell]:
    """Map each value of the key, in ascending order, to the fastest cell with this value."""
    found: dict[int, TimedCell] = {}
    for one in sorted(cells, key=lambda one: (key(one), -one.rate)):
        found.setdefault(key(one), one)
    return found


def _of_methods(cells: Sequence[TimedCell], first: TimedCell, found: Metrics) -> None:
    """Add the time saved by the fastest method over the second, if their spreads do not overlap."""
    workers = max(one.workers for one in cells) if first.workers == 1 else first.workers
    compared = sorted((one for one in cells if one.workers == workers), key=lambda one: one.epoch_s)
    if workers > 1 and len(compared) > 1 and compared[0].differs_from(compared[1]):
        best, second = compared[:2]
        found.values["best_saves"] = 1 - best.epoch_s / second.epoch_s
        each = "" if best.scaling == "strong" else " each"
        where = f"on {counted(workers, 'worker')} with a batch of {best.batch}{each}"
        found.words |= {"best": best.method, "second": second.method, "where": where}
