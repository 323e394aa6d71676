"""The batches of a run, and the figures of Ma, Rusu et al. 2020 that are made from a timeline.

The updates of a device are its STEP spans. One of a GPU that shares the model is in the model when
the REDUCE after it ends; one that is still on its way when the timeline ends does not count.
Measured timelines are read as predicted ones are.
"""

import struct
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain, count
from typing import NamedTuple

from paceline.core.cost import compute_lane, exchange_lane
from paceline.core.plan import Kind, Lane, Resource
from paceline.core.timeline import Origin, Span, Timeline
from paceline.strategies.hogbatch.plan import MODEL

_NS = 1e-9
_BATCH = struct.Struct("<iqqqqd7q")
_UPDATE_KINDS = frozenset({Kind.H2D, Kind.FORWARD, Kind.STEP, Kind.REDUCE})
Points = list[tuple[float, int]]  # seconds, and a number


class BatchResult(NamedTuple):
    """The result of a batch: its updates, the sum of its samples' losses, and seven times in ns.

    The model was read from `started_ns` to `read_ns`, and the device began with it at `begun_ns`;
    the update was computed at `stepped_ns`, and in the model at `ended_ns`.
    """

    updates: int = 0
    loss: float = 0.0
    started_ns: int = 0
    read_ns: int = 0
    begun_ns: int = 0
    forward_ns: int = 0
    backward_ns: int = 0
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


class BatchLog:
    """All batches, in the order in which the coordinator received their reports.

    There may be millions, so each is kept as 100 bytes.
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

    def timeline(self, names: Sequence[str]) -> Timeline:
        """Return the phases of all batches; `names` are the workers' devices."""
        numbers: dict[int, Iterator[int]] = defaultdict(count)
        spans = (_spans_of(one, names[one.worker], next(numbers[one.worker])) for one in self)
        return Timeline(chain.from_iterable(spans), Origin.MEASURED)

    def updates(self, names: Sequence[str]) -> dict[str, int]:
        """Return the updates of each device: those of all threads, on cores."""
        counted = dict.fromkeys(names, 0)
        for batch in self:
            counted[names[batch.worker]] += batch.result.updates
        return counted

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


def _spans_of(batch: BatchRecord, device: str, number: int) -> Iterator[Span]:
    times_s = (moment * _NS for moment in batch.result[2:])
    start_s, read_s, begun_s, forward_s, backward_s, stepped_s, end_s = times_s

    def span(kind: Kind, on: Resource, start_s: float, end_s: float, part: str = "") -> Span:
        worker, size = batch.worker, batch.size
        return Span(kind, number, part, worker, (on,), start_s, end_s, num_samples=size)

    on_gpu, lane = device.startswith("gpu"), compute_lane(device)
    if on_gpu:
        yield span(Kind.H2D, Resource(device, Lane.H2D), start_s, read_s, MODEL)
    yield span(Kind.FORWARD, lane, begun_s, forward_s)
    yield span(Kind.BACKWARD, lane, forward_s, backward_s)
    yield span(Kind.STEP, lane, backward_s, stepped_s)
    if on_gpu:
        yield span(Kind.REDUCE, exchange_lane(device), stepped_s, end_s, "update")


class Update(NamedTuple):
    """An update of the shared model: when its worker read the model, and when the model had it.

    A GPU that shares the model reads it by copying it, others where forward begins.
    """

    read_s: float
    end_s: float
    num_samples: int


def updates(timeline: Timeline) -> dict[str, list[Update]]:
    """Return the updates that each device made, one for each of its batches.

    The batches of a GPU overlap: a batch's spans are those of its number.
    """
    spans: dict[str, dict[int, list[Span]]] = defaultdict(lambda: defaultdict(list))
    for span in timeline.spans:
        if span.kind in _UPDATE_KINDS:
            spans[span.on[0].owner][span.step].append(span)
    found: dict[str, list[Update]] = {}
    for device, batches in spans.items():
        pushes = any(span.part == MODEL for own in batches.values() for span in own)
        made = (_update_of(own, pushes) for own in batches.values())
        found[device] = sorted((one for one in made if one is not None), key=lambda one: one.end_s)
    return found


def _update_of(spans: Sequence[Span], pushes: bool) -> Update | None:
    """Return the update of a batch with these spans; None if it is not in the model."""
    last = Kind.REDUCE if pushes else Kind.STEP
    ends = [span.end_s for span in spans if span.kind is last]
    if not ends:
        return None
    step = next(span for span in spans if span.kind is Kind.STEP)
    reading = Kind.H2D if pushes else Kind.FORWARD
    reads = (span.start_s for span in spans if span.kind is reading and span.part != "batch")
    return Update(min(reads, default=step.start_s), ends[0], step.num_samples)


def batch_sizes(timeline: Timeline) -> dict[str, Points]:
    """Return the batches of each device: the seconds of their ends, and their samples."""
    made = updates(timeline)
    return {name: [(one.end_s, one.num_samples) for one in own] for name, own in made.items()}


def changes(points: Points) -> Points:
    """Return the first and the last point, and all whose number is not the one before."""
    last = len(points) - 1
    return [p for i, p in enumerate(points) if i in (0, last) or points[i - 1][1] != p[1]]


def num_samples(timeline: Timeline) -> dict[str, int]:
    """Return the samples that each device trained on."""
    return {device: sum(size for _, size in done) for device, done in batch_sizes(timeline).items()}


def utilisation(timeline: Timeline) -> dict[str, float]:
    """Return the share of the makespan in which each device computes (figure 7)."""
    held = timeline.utilisation
    return {device: held.get(compute_lane(device), 0.0) for device in updates(timeline)}


def staleness(timeline: Timeline) -> dict[str, Counter[int]]:
    """Return for each device how many of its batches missed so many updates of others.

    A batch misses the updates that come in after it read the model and not after its own.
    """

    def num_within(ends: Sequence[float], update: Update) -> int:
        return bisect_right(ends, update.end_s) - bisect_right(ends, update.read_s)

    made = updates(timeline)
    ends = sorted(update.end_s for own in made.values() for update in own)
    missed = {}
    for device, own in made.items():
        own_ends = [update.end_s for update in own]
        missed[device] = Counter(num_within(ends, one) - num_within(own_ends, one) for one in own)
    return missed
