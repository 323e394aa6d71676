"""The log of a run's batches, and statistics of their updates (Ma, Rusu et al. 2020)."""

import struct
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

_NS = 1e-9
_BATCH = struct.Struct("<iqqqqd4q")
Points = list[tuple[float, int]]  # points of a curve: (seconds, value)


class BatchRecord(NamedTuple):
    """A completed batch of a worker; for `updates` and the following fields see `BatchResult`.

    Times count only training, without pauses such as the tests between epochs. If the worker died
    before it reported the batch, all times are the time when the coordinator noticed the death.
    """

    worker: int
    epoch: int
    first: int
    size: int
    updates: int
    loss: float
    started_ns: int
    begun_ns: int
    stepped_ns: int
    ended_ns: int


class Update(NamedTuple):
    """An update of the shared model by one batch.

    `read_s`: the time when the worker read the model. A GPU reads the model when it copies the
    model, a CPU at the start of forward. `end_s`: the time when the model contained the update.
    """

    read_s: float
    end_s: float
    num_samples: int
    num_updates: int = 1  # on a CPU worker, the number of threads that got samples
    busy_s: float = 0.0  # seconds of compute


Made = dict[str, list[Update]]  # the updates of each device, one per batch


class BatchLog:
    """The log of all batches, in the order of their reports.

    A batch takes 76 bytes, because a run may have millions of batches.
    """

    def __init__(self, packed: bytes = b"") -> None:
        self._packed = bytearray(packed)

    @property
    def packed(self) -> bytearray:
        """A copy of the log as bytes, from which the constructor restores the log."""
        return bytearray(self._packed)

    def append(self, batch: BatchRecord) -> None:
        """Append a batch to the log."""
        self._packed += _BATCH.pack(*batch)

    def __len__(self) -> int:
        return len(self._packed) // _BATCH.size

    def __iter__(self) -> Iterator[BatchRecord]:
        return map(BatchRecord._make, _BATCH.iter_unpack(self._packed))

    def made(self, names: Sequence[str]) -> Made:
        """Return the updates of each device; `names`: the devices' names by worker number."""
        found: Made = {name: [] for name in names}
        for one in self:
            times_s = one.started_ns * _NS, one.ended_ns * _NS
            busy_s = (one.stepped_ns - one.begun_ns) * _NS
            found[names[one.worker]].append(Update(*times_s, one.size, one.updates, busy_s))
        return found

    def gaps(self, num_workers: int, most: int) -> Points:
        """Return at most `most` points (seconds, gap); [] for one worker.

        The gap is the largest minus the smallest number of updates of a worker up to that time.
        """
        if num_workers < 2:
            return []
        counted = [0] * num_workers
        found = []
        every = max(1, -(-len(self) // most))
        for number, batch in enumerate(self, 1):
            counted[batch.worker] += batch.updates
            if number % every == 0:
                found.append((batch.ended_ns * _NS, max(counted) - min(counted)))
        return found


def utilisation(made: Mapping[str, Sequence[Update]]) -> dict[str, float]:
    """Return the fraction of the run's time in which each device computes (figure 7)."""
    updates = [update for own in made.values() for update in own]
    first_s = min((one.read_s for one in updates), default=0.0)
    whole_s = max((one.end_s for one in updates), default=0.0) - first_s
    return {name: sum(one.busy_s for one in own) / max(_NS, whole_s) for name, own in made.items()}


def changes(points: Points) -> Points:
    """Return the first point, the last point, and all points where the value changes."""
    last = len(points) - 1
    return [p for i, p in enumerate(points) if i in (0, last) or points[i - 1][1] != p[1]]


def staleness(made: Mapping[str, Sequence[Update]]) -> dict[str, Counter[int]]:
    """Count each device's batches by staleness.

    A batch reads the model and later updates the model. The batch's staleness is the number of
    other devices' batches that update the model between these two times.
    """

    def num_within(ends: Sequence[float], update: Update) -> int:
        return bisect_right(ends, update.end_s) - bisect_right(ends, update.read_s)

    ends = sorted(update.end_s for own in made.values() for update in own)
    missed = {}
    for device, own in made.items():
        own_ends = [update.end_s for update in own]
        missed[device] = Counter(num_within(ends, one) - num_within(own_ends, one) for one in own)
    return missed
