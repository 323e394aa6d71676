"""The batches of a run, and the figures of Ma, Rusu et al. 2020 that are made from updates.

An update of a GPU that shares the model is in the model when the host has added it.
"""

import struct
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

_NS = 1e-9
_BATCH = struct.Struct("<iqqqqd4q")
Points = list[tuple[float, int]]  # seconds, and a number


class BatchResult(NamedTuple):
    """The result of a batch: its updates, the sum of its samples' losses, and four times in ns.

    The model was read from `started_ns` on, and the device computed from `begun_ns` to
    `stepped_ns`; the update was in the model at `ended_ns`.
    """

    updates: int = 0
    loss: float = 0.0
    started_ns: int = 0
    begun_ns: int = 0
    stepped_ns: int = 0
    ended_ns: int = 0


class BatchRecord(NamedTuple):
    """A batch that was used. Times are those of training, without the tests between epochs.

    If a worker died right after its update, all times are those at which its death was seen.
    """

    worker: int
    epoch: int
    first: int
    size: int
    result: BatchResult


class Update(NamedTuple):
    """An update of the shared model: when its worker read the model, and when the model had it.

    A GPU that shares the model reads it by copying it, others where forward begins.
    """

    read_s: float
    end_s: float
    num_samples: int


Made = dict[str, list[Update]]  # the updates that each device made, one for each of its batches


class BatchLog:
    """All batches, in the order in which the coordinator received their reports.

    There may be millions, so each is kept as 76 bytes. `names` are the workers' devices.
    """

    def __init__(self, packed: bytes = b"") -> None:
        self._packed = bytearray(packed)

    @property
    def packed(self) -> bytearray:
        """A copy of all batches as bytes, of which the same log can be made."""
        return bytearray(self._packed)

    def append(self, batch: BatchRecord) -> None:
        """Add a batch."""
        self._packed += _BATCH.pack(*batch[:-1], *batch.result)

    def __len__(self) -> int:
        return len(self._packed) // _BATCH.size

    def __iter__(self) -> Iterator[BatchRecord]:
        for worker, epoch, first, size, *result in _BATCH.iter_unpack(self._packed):
            yield BatchRecord(worker, epoch, first, size, BatchResult._make(result))

    def made(self, names: Sequence[str]) -> Made:
        """Return the updates of all batches."""
        found: Made = {name: [] for name in names}
        for batch in self:
            read_s, end_s = batch.result.started_ns * _NS, batch.result.ended_ns * _NS
            found[names[batch.worker]].append(Update(read_s, end_s, batch.size))
        return found

    def num_updates(self, names: Sequence[str]) -> dict[str, int]:
        """Return how many updates each device made: those of all threads, on cores."""
        counted = dict.fromkeys(names, 0)
        for batch in self:
            counted[names[batch.worker]] += batch.result.updates
        return counted

    def utilisation(self, names: Sequence[str]) -> dict[str, float]:
        """Return the share of the time in which each device computes (figure 7)."""
        busy_ns, results = dict.fromkeys(names, 0), [batch.result for batch in self]
        for batch in self:
            busy_ns[names[batch.worker]] += batch.result.stepped_ns - batch.result.begun_ns
        first_ns = min((one.started_ns for one in results), default=0)
        whole_ns = max((one.ended_ns for one in results), default=0) - first_ns
        return {name: busy / max(1, whole_ns) for name, busy in busy_ns.items()}

    def gaps(self, num_workers: int, most: int) -> Points:
        """Return at most so many times, and by how many updates the first led the last worker."""
        if num_workers < 2:
            return []
        counted = [0] * num_workers
        found = []
        every = max(1, -(-len(self) // most))
        for number, batch in enumerate(self, 1):
            counted[batch.worker] += batch.result.updates
            if number % every == 0:
                found.append((batch.result.ended_ns * _NS, max(counted) - min(counted)))
        return found


def changes(points: Points) -> Points:
    """Return the first and the last point, and all whose number is not the one before."""
    last = len(points) - 1
    return [p for i, p in enumerate(points) if i in (0, last) or points[i - 1][1] != p[1]]


def staleness(made: Mapping[str, Sequence[Update]]) -> dict[str, Counter[int]]:
    """Return for each device how many of its batches missed so many updates of others.

    A batch misses the updates that come in after it read the model and not after its own.
    """

    def num_within(ends: Sequence[float], update: Update) -> int:
        return bisect_right(ends, update.end_s) - bisect_right(ends, update.read_s)

    ends = sorted(update.end_s for own in made.values() for update in own)
    missed = {}
    for device, own in made.items():
        own_ends = [update.end_s for update in own]
        missed[device] = Counter(num_within(ends, one) - num_within(own_ends, one) for one in own)
    return missed
