"""Fit link latency and bandwidth so that planned exchanges match measured ones."""

from collections.abc import Iterable, Sequence
from math import inf
from typing import NamedTuple

from paceline.core.machine import CodecSpeed, Machine, Station, place_of
from paceline.core.network import Link
from paceline.core.transfer import Ring, neighbours
from paceline.core.wire_format import wire_format

_PROFILED = "measured by the profile of this run"  # source of the fitted links
_WITHIN_LINKS = CodecSpeed(encode_values_per_s=inf, decode_values_per_s=inf)
_FLOAT32_NBYTES = 4


class ExchangeSample(NamedTuple):
    """A measured exchange: bytes of gradients, and seconds until the last rank was done.

    All ranks started together, and did not compute during the exchange.
    """

    nbytes: int
    seconds: float


ExchangeSamples = tuple[ExchangeSample, ExchangeSample]  # a small and a large exchange


class LinearTime(NamedTuple):
    """Seconds of an exchange: a latency (alpha) plus a time for each byte (beta)."""

    latency_s: float
    seconds_per_byte: float


def line_through(measured: ExchangeSamples) -> LinearTime:
    """Fit latency and seconds per byte to the times of a small and a large exchange.

    The latency is the time of the small exchange minus the time of its bytes, but at least zero. If
    noise makes the large exchange seem as fast as the small exchange, or faster, the difference is
    assumed to be 1 % of the large exchange's time.
    """
    small, large = measured
    difference_s = max(large.seconds - small.seconds, 0.01 * large.seconds)
    seconds_per_byte = difference_s / (large.nbytes - small.nbytes)
    return LinearTime(max(0.0, small.seconds - seconds_per_byte * small.nbytes), seconds_per_byte)


def linked(machine: Machine, pairs: Iterable[Sequence[Station]], each: LinearTime) -> Machine:
    """Return the machine with equal links, one for each pair of devices or hosts.

    `each`: latency and seconds per byte of each link. If the machine has only one host, messages
    between its CPU devices also use their cores.
    """
    places = ([place_of(end) for end in pair] for pair in pairs)
    links = tuple(
        Link(
            between=(one, other),
            bandwidth_bytes_per_s=1 / each.seconds_per_byte,
            latency_s=each.latency_s,
            uses_cores=one == other and len(machine.hosts) == 1,
            source=_PROFILED,
        )
        for one, other in dict.fromkeys((min(pair), max(pair)) for pair in places)
    )
    return machine.model_copy(update={"links": links})


def in_ring(
    machine: Machine, measured: ExchangeSamples, config: object = None, *, at_once: bool = False
) -> Machine:
    """Return the machine with a ring of links, fitted to the times of measured all-reduces.

    `config`: options of the measured strategy; its `codec`, if any, encoded the values.
    `at_once`: see `linked_in_ring`.
    """
    codec = getattr(config, "codec", None)
    return linked_in_ring(machine, machine.devices, line_through(measured), codec, at_once=at_once)


def linked_in_ring(
    machine: Machine,
    stations: Sequence[Station],
    whole: LinearTime,
    codec: str | None = None,
    *,
    at_once: bool = False,
) -> Machine:
    """Return the machine with equal links, on which a ring all-reduce takes the time `whole`.

    `stations`: two or more devices or hosts. `codec`: the codec with which `whole` was measured;
    the links' times then include encoding and decoding. `at_once`: whether GPUs send in both
    directions of the ring concurrently (see `Ring.at_once`).
    """
    pairs = neighbours(stations)
    # `unit`: cost of an exchange of one byte: its messages, and its bytes on the busiest link.
    unit_machine = linked(machine, pairs, LinearTime(0.0, 1.0))
    ring = (Ring.at_once if at_once else Ring.over)(unit_machine, stations, ())
    known = None if codec is None else wire_format(codec)
    in_shards = known is None or known.encodes_sums
    unit = (ring.reduction(1.0) if in_shards else ring.gathering(1.0)).cost
    each = LinearTime(whole.latency_s / unit.num_calls, whole.seconds_per_byte / unit.nbytes)
    if known is None:
        return linked(machine, pairs, each)
    longer = _FLOAT32_NBYTES / known.nbytes_per_value
    encoded = linked(machine, pairs, LinearTime(each.latency_s, longer * each.seconds_per_byte))
    codecs = {known.kernel: _WITHIN_LINKS}
    return encoded.with_each("hosts", codecs=codecs).with_each("devices", codecs=codecs)
