"""Whether a codec pays: times with and without it, computed by hand and bounded by both."""

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from boxes import ExchangeOnly, box, chain, link
from paceline.core.calibration import LinearTime
from paceline.core.collective import codec_times
from paceline.core.machine import CodecSpeed, Machine
from paceline.core.simulate import simulate
from paceline.core.strategy import Window
from paceline.core.wire_format import WIRE_FORMATS, wire_format
from paceline.strategies.allreduce.config import AllReduce
from paceline.strategies.allreduce.plan import plan

MIB = 2**20


def speed(encode: float, decode: float, latency_s: float = 0.0) -> CodecSpeed:
    return CodecSpeed(encode_values_per_s=encode, decode_values_per_s=decode, latency_s=latency_s)


def test_both_ways_are_those_computed_by_hand():
    # Two ranks, 2 Mi values at 100 MB/s: 8 MiB, or 2 Mi codes and 2,048 scales of 4 bytes. Each
    # encodes all, and decodes half to add them and all of the sums.
    found = codec_times(
        8 * MIB, 2, LinearTime(0.002, 1e-8), speed(1e9, 3e9, 1e-4), wire_format("dynamic8")
    )
    assert found.plain_s == pytest.approx(0.002 + 0.08388608)
    wire_s, encode_s, decode_s = 0.002 + 0.02105344, 2 * MIB / 1e9, 3 * MIB / 3e9
    assert found.encoded_s == pytest.approx(wire_s + encode_s + decode_s + 2e-4)
    assert found.encoded_s < found.plain_s


def test_every_piece_pays_all_latencies():
    exchange, fast = LinearTime(0.5, 0.0), speed(inf, inf, 0.25)
    # Nine and a bit pieces of 4 Mi values.
    found = codec_times(4 * (9 * 4 * MIB + 1), 2, exchange, fast, wire_format("half"))
    assert found == (0.5, 10 * (0.5 + 2 * 0.25))
    assert found.encoded_s >= found.plain_s


@pytest.mark.parametrize(
    ("nbytes_per_s", "pays"), [(12.5e6, True), (117e6, True), (1.25e9, True), (8e9, False)]
)
def test_a_codec_that_takes_longer_than_it_saves_does_not_pay(nbytes_per_s, pays):
    # At 1.6 and 5 Gvalue/s, a value costs 0.93 ns and saves three of its four bytes.
    here = speed(1.6e9, 5e9)
    found = codec_times(
        64 * MIB, 2, LinearTime(0.0, 1 / nbytes_per_s), here, wire_format("dynamic8")
    )
    assert (found.encoded_s < found.plain_s) is pays


@pytest.mark.parametrize("world_size", [2, 5])
@pytest.mark.parametrize("name", WIRE_FORMATS)
def test_a_codec_that_costs_nothing_gains_the_ratio_of_bytes(name, world_size):
    known = wire_format(name)
    found = codec_times(2**30, world_size, LinearTime(0.0, 1e3), speed(inf, inf), known)
    # Where no sum is encoded, a rank sends all it has n - 1 times, and not 2 (n - 1) / n times.
    ratio = 4 / known.nbytes_per_value * (1 if known.encodes_sums else 2 / world_size)
    assert found.plain_s / found.encoded_s == pytest.approx(ratio, rel=1e-3)


def test_gradients_of_two_bytes_gain_half_as_much():
    slow, fast = LinearTime(0.0, 1.0), speed(inf, inf)
    of_float32 = codec_times(4 * MIB, 2, slow, fast, wire_format("half"))
    of_half = codec_times(2 * MIB, 2, slow, fast, wire_format("half"), element_size=2)
    assert of_float32.plain_s == 2 * of_float32.encoded_s
    assert of_half.plain_s == of_half.encoded_s == of_float32.encoded_s


def cluster(
    world_size: int, nbytes_per_s: float, latency_s: float, codec: dict, cores: bool
) -> Machine:
    """Return hosts of one core each in a ring."""
    names = [f"h{i}" for i in range(world_size)]
    pairs = zip(names, names[1:] + names[:1], strict=True)
    links = [link(*pair, nbytes_per_s, latency_s, uses_cores=cores) for pair in pairs]
    links = links[:1] if world_size == 2 else links
    device = {"codecs": {"eightbit": codec}}
    return box(*["cpu"] * world_size, hosts=names, links=links, device=device)


rates = st.floats(1e6, 1e11)


@settings(deadline=None)
@given(
    world_size=st.integers(2, 6),
    num_values=st.integers(1, 20 * MIB),
    nbytes_per_s=rates,
    latency_s=st.floats(0, 1e-2),
    codec=st.tuples(rates, rates, st.floats(0, 1e-2)),
    cores=st.booleans(),
)
def test_auto_is_never_slower_than_plain_nor_than_both(
    world_size, num_values, nbytes_per_s, latency_s, codec, cores
):
    encode, decode, codec_latency_s = codec
    facts = {
        "encode_values_per_s": encode,
        "decode_values_per_s": decode,
        "latency_s": codec_latency_s,
    }
    machine = cluster(world_size, nbytes_per_s, latency_s, facts, cores)
    work = chain((0, 4 * num_values))

    def seconds(codec: str | None) -> float:
        tasks = plan(work, machine, AllReduce(workers=world_size, codec=codec), Window(1))
        return simulate(tasks, ExchangeOnly(machine)).makespan_s

    plain_s, encoded_s, auto_s = map(seconds, (None, "dynamic8", "auto"))
    assert auto_s <= plain_s * (1 + 1e-9)
    assert auto_s in (plain_s, encoded_s)
    whole = LinearTime(
        2 * (world_size - 1) * latency_s, 2 * (world_size - 1) / world_size / nbytes_per_s
    )
    own = speed(encode, decode, codec_latency_s)
    found = codec_times(4 * num_values, world_size, whole, own, wire_format("dynamic8"))
    assert found.plain_s == pytest.approx(plain_s)
    assert found.encoded_s >= encoded_s * (1 - 1e-9)  # nothing overlaps there
