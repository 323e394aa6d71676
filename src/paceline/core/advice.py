"""Whether a codec pays for one exchange: seconds with it and without."""

from typing import NamedTuple

from paceline.core.calibration import Line
from paceline.core.machine import CodecSpeed
from paceline.core.wire_format import WireFormat, pieces


class BothWays(NamedTuple):
    """Seconds of an exchange as it is, and encoded."""

    plain_s: float
    encoded_s: float

    @property
    def pays(self) -> bool:
        """Whether the codec makes it faster."""
        return self.encoded_s < self.plain_s


def both_ways(
    nbytes: int,
    world_size: int,
    exchange: Line,
    speed: CodecSpeed,
    wire_format: WireFormat,
    element_size: int = 4,
) -> BothWays:
    """Return what an all-reduce of `nbytes` of gradients takes in each way.

    `exchange` is that of the plain one by its bytes: for a ring of n ranks 2 (n - 1) latencies of
    the link, and 2 (n - 1) / n bytes on it for each. Encoded, every piece pays these latencies and
    those of the codec, and each rank encodes all values and decodes 2 - 1 / n times as many.
    Nothing of that is taken to overlap: beside backward, it is backward that loses what a codec
    takes of the cores.
    """
    sizes = pieces(nbytes // element_size)
    count = sum(sizes)
    sent = sum(wire_format.sharded_nbytes(size, world_size) for size in sizes)
    wire_s = len(sizes) * exchange.latency_s + sent * exchange.seconds_per_byte
    latencies_s = len(sizes) * speed.latency_s
    encode_s = latencies_s + count / speed.encode_values_per_s
    decode_s = latencies_s + num_decoded(count, world_size) / speed.decode_values_per_s
    plain_s = exchange.latency_s + nbytes * exchange.seconds_per_byte
    return BothWays(plain_s, encode_s + wire_s + decode_s)


def num_decoded(count: int, world_size: int) -> float:
    """Return how many values a rank decodes: its shard of all others, and the sums of all."""
    return (2 - 1 / world_size) * count
