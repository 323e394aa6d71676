"""An all-reduce in a plan: one task as it is or, encoded, three sorts of tasks for each piece.

    worker0 compute   [encode 0.0][encode 0.1]           [decode 0.0]           [decode 0.1]
    exchange                      [reduce 0.0           ][reduce 0.1           ]
    worker1 compute   [encode 0.0][encode 0.1]           [decode 0.0]           [decode 0.1]

Of n ranks each encodes the others' shards of a piece, decodes and adds what it gets for its own,
encodes that sum, and decodes the sums of all: a piece is encoded once and decoded 2 - 1 / n times.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paceline.core.advice import both_ways, num_decoded
from paceline.core.calibration import Line
from paceline.core.cost import codec_lanes
from paceline.core.errors import InvalidInput
from paceline.core.machine import CodecSpeed, Station, codec_speed
from paceline.core.plan import Cost, Kind, Resource, Task, task_name
from paceline.core.transfer import Ring, Transfer
from paceline.core.wire_format import AUTO, WireFormat, pieces, wire_format
from paceline.core.workload import Workload


class Coder(NamedTuple):
    """A worker that encodes and decodes, and what it holds meanwhile."""

    worker: int
    encode_on: tuple[Resource, ...]
    decode_on: tuple[Resource, ...]


@dataclass(frozen=True)
class Coding:
    """How exchanges are encoded, and by whom; `chosen` says whether only where that pays."""

    wire_format: WireFormat
    speed: CodecSpeed
    coders: tuple[Coder, ...]
    chosen: bool

    @classmethod
    def by(cls, codec: str, stations: Mapping[int, Station]) -> "Coding":
        """Return the codec as these workers use it, each on the cores or the GPU of its station.

        InvalidInput if the codec's bytes, or a station's speed with it, are not known.
        """
        known = wire_format(codec)
        speeds = [codec_speed(station, known) for station in stations.values()]
        slowest = CodecSpeed(
            encode_values_per_s=min(speed.encode_values_per_s for speed in speeds),
            decode_values_per_s=min(speed.decode_values_per_s for speed in speeds),
            latency_s=max(speed.latency_s for speed in speeds),
        )
        coders = tuple(
            Coder(
                worker,
                codec_lanes(station, known.kernel, Kind.ENCODE),
                codec_lanes(station, known.kernel, Kind.DECODE),
            )
            for worker, station in stations.items()
        )
        return cls(known, slowest, coders, codec == AUTO)

    def encodes(self, ring: Ring, nbytes: int, count: int) -> bool:
        """Return whether `count` gradients of `nbytes` are encoded."""
        if not self.chosen or self.speed.is_within_links:
            return True
        latency_s = ring.seconds(0)
        line = Line(latency_s, (ring.seconds(nbytes) - latency_s) / nbytes)
        num_ranks, element_size = ring.num_ranks, nbytes // count
        return both_ways(nbytes, num_ranks, line, self.speed, self.wire_format, element_size).pays


class Piece(NamedTuple):
    """Values that are exchanged together, and what it costs each coder to encode and decode."""

    part: str
    transfer: Transfer
    encode: Cost
    decode: Cost


@dataclass(frozen=True)
class Collective:
    """An all-reduce of some gradients; without coders they travel as they are."""

    kind: Kind
    pieces: tuple[Piece, ...]
    coders: tuple[Coder, ...]

    @classmethod
    def over(
        cls, ring: Ring, kind: Kind, part: str, nbytes: int, count: int, coding: Coding | None
    ) -> "Collective":
        """Return the all-reduce of `count` gradients of `nbytes`, encoded by `coding` or as is.

        Where links were measured with the codec, the wire takes all the time there is.
        """
        if coding is None or not coding.encodes(ring, nbytes, count):
            return cls(kind, (Piece(part, ring.reduction(nbytes), Cost(), Cost()),), ())
        num_ranks, within_links = ring.num_ranks, coding.speed.is_within_links
        made = []
        for number, size in enumerate([count] if within_links else pieces(count)):
            transfer = ring.reduction(coding.wire_format.sharded_nbytes(size, num_ranks))
            name = part if within_links else f"{part}.{number}"
            encode = Cost(flops=size, num_calls=1)
            decode = Cost(flops=num_decoded(size, num_ranks), num_calls=1)
            made.append(Piece(name, transfer, encode, decode))
        return cls(kind, tuple(made), () if within_links else coding.coders)

    def encodes(self, step: int, number: int, ready: str) -> Iterator[Task]:
        """Yield what the coder of that number encodes, from when `ready` ends.

        They have to stand before what computes then: an encoding thread gets its share of the cores
        at once, and not after the next layer.
        """
        if self.coders:
            coder = self.coders[number]
            for piece in self.pieces:
                name = task_name(step, Kind.ENCODE, piece.part, coder.worker)
                on, cost = coder.encode_on, piece.encode
                yield Task(name, Kind.ENCODE, on, cost, (ready,), piece.part)

    def tasks(self, step: int, ready: Sequence[str], last: tuple[str, ...] = ()) -> Iterator[Task]:
        """Yield the transfers, and what is decoded.

        The first transfer waits for `last`. Each waits for what the ranks encode of its piece or,
        where nothing is encoded, for `ready`.
        """
        before = tuple(dict.fromkeys(ready))
        decoded: tuple[tuple[str, ...], ...] = ((),) * len(self.coders)
        for piece in self.pieces:
            name, (on, cost) = task_name(step, self.kind, piece.part), piece.transfer
            if self.coders:
                before = self._names(step, Kind.ENCODE, piece)
            yield Task(name, self.kind, on, cost, (*last, *before), piece.part)
            last = (name,)
            names = self._names(step, Kind.DECODE, piece)
            for own, coder, earlier in zip(names, self.coders, decoded, strict=True):
                on, cost, after = coder.decode_on, piece.decode, (name, *earlier)
                yield Task(own, Kind.DECODE, on, cost, after, piece.part)
            decoded = tuple((own,) for own in names)

    def _names(self, step: int, kind: Kind, piece: Piece) -> tuple[str, ...]:
        return tuple(task_name(step, kind, piece.part, coder.worker) for coder in self.coders)

    def sent(self, step: int) -> str:
        """Return the name of the last transfer."""
        return task_name(step, self.kind, self.pieces[-1].part)

    def result(self, step: int, number: int) -> str:
        """Return the name of the task after which the ring's rank of that number has the result."""
        if not self.coders:
            return self.sent(step)
        return task_name(step, Kind.DECODE, self.pieces[-1].part, self.coders[number].worker)


def check_encodable(workload: Workload, element_sizes: Collection[int]) -> None:
    """Raise InvalidInput for gradients of other sizes than these bytes, which are not encoded."""
    for layer in workload.layers:
        for parameter in layer.parameters:
            if parameter.element_size not in element_sizes:
                raise InvalidInput(
                    f"codec: gradients of {8 * parameter.element_size} bits, as those of "
                    f"{layer.name}, are not encoded here; train in float32, or without a codec"
                )
