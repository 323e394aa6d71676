"""Link fit: latency and bandwidth of links on which planned exchanges match measured ones."""

from collections.abc import Iterable, Sequence
from math import inf
from typing import NamedTuple

from paceline.core.machine import CodecSpeed, Machine, Station, place_of
from paceline.core.network import Link
from paceline.core.transfer import Ring, neighbours
from paceline.core.wire_format import wire_format

_PROFILED = "measured by the profile of this run"
_WITHIN_LINKS = CodecSpeed(encode_values_per_s=inf, decode_values_per_s=inf)
_FLOAT32_NBYTES = 4  # what is measured


class ExchangeSample(NamedTuple):
    """An exchange of so many bytes of gradients took so many seconds, from the first to the last.

    All ranks came to it at the same time, and computed nothing meanwhile.
    """

    nbytes: int
    seconds: float


ExchangeSamples = tuple[ExchangeSample, ExchangeSample]  # a small exchange and a large one


class LinearTime(NamedTuple):
    """Seconds of an exchange by its bytes: a latency, and a pace (alpha and beta)."""

    latency_s: float
    seconds_per_byte: float


def line_through(measured: ExchangeSamples) -> LinearTime:
    """Return the line on which a small and a large exchange lie.

    The latency is what remains of the small one when its bytes are paid. Noise can make the large
    one the faster, or the small one too fast; then its own speed is a bound, and the latency zero.
    """
    small, large = measured
    difference_s = max(large.seconds - small.seconds, 0.01 * large.seconds)
    seconds_per_byte = difference_s / (large.nbytes - small.nbytes)
    return LinearTime(max(0.0, small.seconds - seconds_per_byte * small.nbytes), seconds_per_byte)


def linked(machine: Machine, pairs: Iterable[Sequence[Station]], each: LinearTime) -> Machine:
    """Return the machine with equal links, one between the places of each pair of stations.

    A message of n bytes over any of them takes `each.latency_s + n * each.seconds_per_byte`. Where
    there is one host, the cores of its ranks carry its messages.
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


def in_ring(machine: Machine, measured: ExchangeSamples, config: object = None) -> Machine:
    """Return the machine whose devices are joined in a ring as fast as the measured exchanges."""
    return linked_in_ring(machine, machine.devices, line_through(measured))


def linked_in_ring(
    machine: Machine,
    stations: Sequence[Station],
    whole: LinearTime,
    codec: str | None = None,
    *,
    at_once: bool = False,
) -> Machine:
    """Return the machine with equal links on which a ring all-reduce of all stations takes `whole`.

    There are two or more stations. With a codec it takes as long encoded, by which it was measured:
    what encoding and decoding take is within the links then. `at_once`: the plan takes all rings
    that the links form (`Ring.at_once`), here both directions of one.
    """
    pairs = neighbours(stations)
    # On links of one byte a second, the bytes of the busiest are seconds.
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
