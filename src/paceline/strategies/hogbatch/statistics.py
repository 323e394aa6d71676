"""The log of a run's batches, and statistics of their updates (Ma, Rusu et al. 2020)."""

import struct
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from paceline.core.outcome import Points, Updates
from paceline.core.plan import Kind
from paceline.core.timeline import Span

_BATCH = struct.Struct("<iqqqqd4d")
_MOST_POINTS = 500


class BatchRecord(NamedTuple):
    """A completed batch of a worker; for `loss` and the following fields see `BatchResult`.

    Times exclude pauses such as the tests between epochs. If the worker died before it reported the
    batch, all times are the time when the coordinator noticed the death.
    """

    worker: int
    epoch: int
    first: int
    size: int
    updates: int
    loss: float
    started_s: float
    begun_s: float
    stepped_s: float
    ended_s: float


Made = dict[str, list[BatchRecord]]  # batches by the device's name


class BatchLog:
    """The log of all batches in the order of reports; `packed`: 76 bytes per batch."""

    def __init__(self, packed: bytes = b"") -> None:
        self.packed = bytearray(packed)

    def append(self, batch: BatchRecord) -> None:
        """Append a batch to the log."""
        self.packed += _BATCH.pack(*batch)

    def __len__(self) -> int:
        return len(self.packed) // _BATCH.size

    def __iter__(self) -> Iterator[BatchRecord]:
        return map(BatchRecord._make, _BATCH.iter_unpack(self.packed))

    def made(self, names: Sequence[str]) -> Made:
        """Return the batches of each device; `names`: the devices' names by worker number."""
        found: Made = {name: [] for name in names}
        for batch in self:
            found[names[batch.worker]].append(batch)
        return found


def count_updates(log: BatchLog, made: Made) -> Updates:
    """Count the updates in a log; `made`: the log's batches by device."""
    missed = staleness(made)
    together = sum(missed.values(), Counter[int]())
    by_worker = {name: sum(one.updates for one in own) for name, own in made.items()}
    return Updates(
        count=sum(by_worker.values()),
        by_worker=by_worker,
        staleness={name: dict(own) for name, own in missed.items()},
        mean_staleness=sum(n * times for n, times in together.items()) / max(1, together.total()),
        gaps=_gaps(log, len(made)),
    )


def _gaps(log: BatchLog, num_workers: int) -> Points:
    """Return up to `_MOST_POINTS` points (seconds, gap); () for one worker.

    The gap is the largest minus the smallest number of updates of a worker up to that time.
    """
    counted, found = [0] * num_workers, []
    every = max(1, -(-len(log) // _MOST_POINTS))
    for number, batch in enumerate(log, 1):
        counted[batch.worker] += batch.updates
        if number % every == 0:
            found.append((batch.ended_s, max(counted) - min(counted)))
    return tuple(found) if num_workers > 1 else ()


def utilisation(made: Mapping[str, Sequence[BatchRecord]]) -> dict[str, float]:
    """Return the fraction of the run's time in which each device computes."""
    batches = [batch for own in made.values() for batch in own]
    first_s = min((one.started_s for one in batches), default=0.0)
    whole_s = max((one.ended_s for one in batches), default=0.0) - first_s
    busy_s = {name: sum(one.stepped_s - one.begun_s for one in own) for name, own in made.items()}
    return {name: own_s / max(1e-9, whole_s) for name, own_s in busy_s.items()}


def traced_sizes(spans: Iterable[Span]) -> dict[int, list[int]]:
    """Return each worker's traced batch sizes, in order of time, from the STEP spans."""
    found: dict[int, list[int]] = {}
    for span in sorted(spans, key=lambda span: span.start_s):
        if span.kind is Kind.STEP and span.worker is not None:
            found.setdefault(span.worker, []).append(span.num_samples)
    return found


def changes(points: Points) -> Points:
    """Return the first point, the last point, and all points where the value changes."""
    last = len(points) - 1
    return tuple(p for i, p in enumerate(points) if i in (0, last) or points[i - 1][1] != p[1])


def staleness(made: Mapping[str, Sequence[BatchRecord]]) -> dict[str, Counter[int]]:
    """Count each device's batches by staleness.

    A batch's staleness is the number of other devices' batches that end between its start, when it
    reads the model, and its end, when it has updated the model.
    """

    def num_within(ends: Sequence[float], batch: BatchRecord) -> int:
        return bisect_right(ends, batch.ended_s) - bisect_right(ends, batch.started_s)

    ends = sorted(batch.ended_s for own in made.values() for batch in own)
    missed = {}
    for device, own in made.items():
        own_ends = [batch.ended_s for batch in own]
        missed[device] = Counter(num_within(ends, one) - num_within(own_ends, one) for one in own)
    return missed
