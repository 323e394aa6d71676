"""What each batch of a run was, and the timeline of all of them."""

import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from paceline.core.cost import compute_lane, exchange_lane, h2d_lane
from paceline.core.plan import Kind, task_name
from paceline.core.timeline import Span, Timeline
from paceline.strategies.hogbatch.work import MODEL

_NS = 1e-9
_BATCH = struct.Struct("<iqqqqd6q")


class Batch(NamedTuple):
    """A batch that was used. Times are nanoseconds of training, without what lies between epochs.

    Of a worker that died right after its update is only known that it was made, and by when.
    """

    worker: int
    epoch: int
    first: int
    size: int
    updates: int
    loss: float
    started_ns: int
    read_ns: int
    forward_ns: int
    backward_ns: int
    stepped_ns: int
    ended_ns: int


class History:
    """All batches, in the order in which the coordinator heard of them.

    There may be millions, so each is kept as a few bytes.
    """

    def __init__(self) -> None:
        self._packed = bytearray()

    def add(self, batch: Batch) -> None:
        """Note a batch."""
        self._packed += _BATCH.pack(*batch)

    def __len__(self) -> int:
        return len(self._packed) // _BATCH.size

    def __iter__(self) -> Iterator[Batch]:
        return map(Batch._make, _BATCH.iter_unpack(self._packed))

    def timeline(self, names: Sequence[str]) -> Timeline:
        """Return the phases of all batches; `names` are the workers' devices."""
        return Timeline(self._spans(names), "measured")

    def _spans(self, names: Sequence[str]) -> Iterator[Span]:
        numbers: Counter[int] = Counter()
        for batch in self:
            yield from _spans_of(batch, names[batch.worker], numbers[batch.worker])
            numbers[batch.worker] += 1

    def updates(self, names: Sequence[str]) -> dict[str, int]:
        """Return how many updates each worker has made: on cores, each thread makes its own."""
        counted = dict.fromkeys(names, 0)
        for batch in self:
            counted[names[batch.worker]] += batch.updates
        return counted

    def gaps(self, names: Sequence[str], most: int) -> list[tuple[float, int]]:
        """Return at most so many times, and by how many updates the first was ahead of the last."""
        if len(names) < 2:
            return []
        counted = [0] * len(names)
        found = []
        every = max(1, -(-len(self) // most))
        for number, batch in enumerate(self, 1):
            counted[batch.worker] += batch.updates
            if number % every == 0:
                found.append((batch.ended_ns * _NS, max(counted) - min(counted)))
        return found


def _spans_of(batch: Batch, device: str, number: int) -> Iterator[Span]:
    lane = (compute_lane(device),)
    start_s, read_s, forward_s, backward_s, stepped_s, end_s = (
        moment * _NS for moment in batch[-6:]
    )

    def name(kind: Kind) -> str:
        return task_name(number, kind, "", batch.worker)

    on_gpu = device.startswith("gpu")
    if on_gpu:
        on = (h2d_lane(device),)
        yield Span(name(Kind.H2D), Kind.H2D, on, start_s, read_s, MODEL)
    yield Span(name(Kind.FORWARD), Kind.FORWARD, lane, read_s, forward_s)
    yield Span(name(Kind.BACKWARD), Kind.BACKWARD, lane, forward_s, backward_s)
    yield Span(name(Kind.STEP), Kind.STEP, lane, backward_s, stepped_s, str(batch.size))
    if on_gpu:
        on = (exchange_lane(device),)
        yield Span(name(Kind.REDUCE), Kind.REDUCE, on, stepped_s, end_s, "update")


def changes(sizes: Mapping[str, Sequence[tuple[float, int]]]) -> dict[str, list[tuple[float, int]]]:
    """Return of each device's batch sizes over time the first, the last, and all that change."""
    return {
        device: [
            point
            for i, point in enumerate(points)
            if i in (0, len(points) - 1) or points[i - 1][1] != point[1]
        ]
        for device, points in sizes.items()
    }
