"""Plan an all-reduce: one transfer or, with a codec, one transfer for each piece of the values.

    worker0 compute   [encode 0.0][encode 0.1]           [decode 0.0]           [decode 0.1]
    exchange                      [reduce 0.0           ][reduce 0.1           ]
    worker1 compute   [encode 0.0][encode 0.1]           [decode 0.0]           [decode 0.1]

Each of n ranks sums one n-th of a piece, its shard. It encodes the other shards for the ranks that
sum them, decodes and adds what it receives for its own shard, encodes the sum, and decodes all
sums. So it encodes as many values as a piece has, and decodes 2 - 1 / n times as many. If a codec
must not encode sums, each rank sends its whole encoded piece to all other ranks, and decodes and
adds the pieces of all n ranks (exchange/encoded_pieces.py).
"""

from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from paceline.core.cost import codec_lanes
from paceline.core.errors import InvalidInput
from paceline.core.machine import CodecSpeed, Station, codec_speed
from paceline.core.plan import Cost, Kind, Resource, Task, TaskId
from paceline.core.transfer import Ring, Transfer
from paceline.core.wire_format import AUTO, WireFormat, pieces, wire_format
from paceline.core.workload import Layer


def num_decoded(count: int, world_size: int, wire_format: WireFormat) -> float:
    """Return how many values each rank decodes in an encoded all-reduce of `count` values.

    If the codec encodes sums, a rank decodes all sums and, for the shard (part) that it sums, the
    other ranks' values. If not, a rank decodes all values of all ranks.
    """
    return (2 - 1 / world_size if wire_format.encodes_sums else world_size) * count


class CodecWorker(NamedTuple):
    """A worker, and the resources that it holds to encode and to decode."""

    worker: int
    encode_on: tuple[Resource, ...]
    decode_on: tuple[Resource, ...]


@dataclass(frozen=True)
class Coding:
    """The codec of an exchange, and its speed on the slowest worker.

    `coders`: the workers that encode. `chosen`: whether the user's codec is "auto"; an exchange
    is then encoded only if that makes it faster.
    """

    wire_format: WireFormat
    speed: CodecSpeed
    coders: tuple[CodecWorker, ...]
    chosen: bool

    @classmethod
    def of(
        cls,
        codec: str | None,
        stations: Mapping[int, Station],
        layers: Iterable[Layer] = (),
        element_sizes: Collection[int] = (),
    ) -> "Coding | None":
        """Return the `Coding` of a codec; None without a codec.

        `stations`: the device or host on which each worker encodes. Raises InvalidInput if the
        codec's encoded size or its speed on a station is unknown. Also raises InvalidInput if an
        element of a gradient of `layers` has a size that is not in `element_sizes`.
        """
        if codec is None:
            return None
        for layer in layers:
            for parameter in layer.parameters:
                if parameter.element_size not in element_sizes:
                    bits = 8 * parameter.element_size
                    problem = f"cannot encode gradients of {bits} bits, as in layer {layer.name}"
                    hint = "train in float32 or without a codec"
                    raise InvalidInput("codec", problem, hint=hint)
        known = wire_format(codec)
        speeds = [codec_speed(station, known) for station in stations.values()]
        slowest = CodecSpeed(
            encode_values_per_s=min(speed.encode_values_per_s for speed in speeds),
            decode_values_per_s=min(speed.decode_values_per_s for speed in speeds),
            latency_s=max(speed.latency_s for speed in speeds),
        )
        kinds = Kind.ENCODE, Kind.DECODE
        coders = tuple(
            CodecWorker(worker, *(codec_lanes(station, known.kernel, kind) for kind in kinds))
            for worker, station in stations.items()
        )
        return cls(known, slowest, coders, codec == AUTO)

    def encodes(self, ring: Ring, nbytes: int, count: int) -> bool:
        """Return whether to encode `count` gradient values, of `nbytes` in total.

        Assumes that encoding does not overlap with messages, because it uses the cores on which
        backward runs.
        """
        if not self.chosen or self.speed.is_within_links:
            return True
        num_ranks, sizes = ring.num_ranks, pieces(count)
        # Codec "auto" is one that encodes sums.
        sent = (self.wire_format.sharded_nbytes(size, num_ranks) for size in sizes)
        encode_s = count / self.speed.encode_values_per_s
        decode_s = num_decoded(count, num_ranks, self.wire_format) / self.speed.decode_values_per_s
        coding_s = 2 * len(sizes) * self.speed.latency_s + encode_s + decode_s
        return sum(map(ring.seconds, sent)) + coding_s < ring.seconds(nbytes)


class CollectivePiece(NamedTuple):
    """One piece of an exchange: its transfer, and a worker's costs to encode and decode."""

    part: str
    transfer: Transfer
    encode: Cost
    decode: Cost


def _agreed(transfer: Transfer) -> Transfer:
    """Add to a transfer two small ones, in which ranks first agree on its size."""
    more = Cost(num_calls=2 * transfer.cost.num_calls)
    return transfer._replace(cost=transfer.cost + more)


@dataclass(frozen=True)
class Collective:
    """A collective of all ranks; `coders`: the workers that encode, none without a codec."""

    kind: Kind
    pieces: tuple[CollectivePiece, ...]
    coders: tuple[CodecWorker, ...]
    sub_batch: int | None = None

    @classmethod
    def over(
        cls, ring: Ring, kind: Kind, part: str, nbytes: int, count: int, coding: Coding | None
    ) -> "Collective":
        """Plan the all-reduce of `count` gradient values of `nbytes` in total.

        `part`: the layer, bucket or chunk in task names. `coding`: the codec; None: no codec. If
        the links were measured with the codec, transfers include encoding and decoding.
        """
        if coding is None or not coding.encodes(ring, nbytes, count):
            return cls(kind, (CollectivePiece(part, ring.reduction(nbytes), Cost(), Cost()),), ())
        known, num_ranks = coding.wire_format, ring.num_ranks
        within_links = coding.speed.is_within_links
        made = []
        for number, size in enumerate([count] if within_links else pieces(count)):
            if known.encodes_sums:
                transfer = ring.reduction(known.sharded_nbytes(size, num_ranks))
            else:
                transfer = ring.gathering(known.nbytes(size))
            if known.share is not None and not within_links:
                transfer = _agreed(transfer)
            name = part if within_links else f"{part}.{number}"
            encode = Cost(flops=size, num_calls=1)
            decode = Cost(flops=num_decoded(size, num_ranks, known), num_calls=1)
            made.append(CollectivePiece(name, transfer, encode, decode))
        return cls(kind, tuple(made), () if within_links else coding.coders)

    def encodes(self, step: int, number: int, ready: TaskId) -> Iterator[Task]:
        """Yield the encoding tasks of `coders[number]`, which start after `ready`.

        Put these tasks into the plan before computation that may run at the same time. A real
        encoding thread gets cores immediately, and does not wait for the next layer.
        """
        if self.coders:
            coder = self.coders[number]
            for piece in self.pieces:
                own = TaskId(step, Kind.ENCODE, piece.part, coder.worker, self.sub_batch)
                yield Task(own, coder.encode_on, piece.encode, (ready,))

    def tasks(
        self, step: int, ready: Sequence[TaskId], last: tuple[TaskId, ...] = ()
    ) -> Generator[Task, None, tuple[TaskId, dict[int, TaskId]]]:
        """Yield the transfers, each followed by its decoding tasks.

        Transfers run one after another; the first waits for the tasks `last`. Each transfer also
        waits until all ranks have encoded its piece or, without a codec, for the tasks `ready`.
        Returns the last transfer, and the last decoding task of each worker in `coders`, by its
        index in `coders`.
        """
        before = tuple(dict.fromkeys(ready))
        decoded = dict[int, TaskId]()
        for piece in self.pieces:
            own = partial(TaskId, step, part=piece.part, sub_batch=self.sub_batch)
            if self.coders:
                before = tuple(own(Kind.ENCODE, worker=coder.worker) for coder in self.coders)
            sent = own(self.kind)
            yield Task(sent, *piece.transfer, (*last, *before))
            last = (sent,)
            for number, coder in enumerate(self.coders):
                earlier = (decoded[number],) if number in decoded else ()
                decoded[number] = own(Kind.DECODE, worker=coder.worker)
                yield Task(decoded[number], coder.decode_on, piece.decode, (sent, *earlier))
        return sent, decoded
