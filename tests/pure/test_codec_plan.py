"""Plans with encoded gradients: tasks, durations, and whether encoding pays."""

import pytest

from boxes import (
    WithoutUpdate,
    after,
    box,
    chain,
    codec_speed,
    exchange_s,
    link,
    named,
    ring,
)
from paceline.core.cost import Roofline
from paceline.core.machine import Machine
from paceline.core.plan import Plan
from paceline.core.simulate import simulate
from paceline.core.strategy import Window
from paceline.core.wire_format import PIECE
from paceline.core.workload import Cost, Layer, Parameter, Workload
from paceline.strategies.allreduce.config import AllReduce
from paceline.strategies.allreduce.plan import plan
from paceline.strategies.host.config import HostReduce
from paceline.strategies.host.plan import plan as plan_host
from refusals import refused

ENCODE, DECODE, LATENCY_S = 1e9, 4e9, 1e-3
SPEED = codec_speed(ENCODE, DECODE, LATENCY_S)
CODECS = {"codecs": dict.fromkeys(("eightbit", "fourbit", "threshold"), SPEED)}
WIRE = 1e8
NBYTES = 4 * 102_400
CODES = 1 + 4 / 1024  # bytes per value: a code of 8 bits, and a part of the block's scale


def hosts(world_size: int = 2, *devices: dict) -> Machine:
    """Return a ring of hosts with a CPU worker each; `devices`: codecs of the last ones."""
    names = "abcde"[:world_size]
    links = ring(names, WIRE, 0.01)
    machine = box(*["cpu"] * world_size, hosts=names, links=links, device=CODECS).model_dump()
    for device, codecs in zip(reversed(machine["devices"]), devices, strict=False):
        device["codecs"] = codecs
    return Machine.model_validate(machine)


def all_reduced(work: Workload, machine: Machine, **config) -> Plan:
    return plan(work, machine, AllReduce(workers=len(machine.devices), **config), Window(1))


def reduced_s(machine: Machine, num_values: int, **config) -> float:
    return exchange_s(all_reduced(chain((0, 4 * num_values)), machine, **config), machine)


@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize(
    ("codec", "share"),
    [
        ("dynamic8", None),
        ("e3m0", None),
        ("threshold:0.1@0.05", 0.05),
        ("threshold:0.1@1.0", 1.0),
    ],
)
def test_a_bucket_takes_the_sum_of_encoding_transfer_and_decoding(world_size, codec, share):
    shard, others = 1024 * 60, world_size - 1  # whole blocks
    num_values = world_size * shard
    # Each rank encodes the shards of other ranks and the sum of its own shard. It decodes its
    # own shard from each other rank, and all shards of the sum.
    num_messages, num_decoded = 2 * others, (2 - 1 / world_size) * num_values
    sent = num_messages * shard * CODES
    if codec == "e3m0":
        # Each rank encodes all its values once, and decodes those of all ranks, itself included.
        num_messages, num_decoded = others, world_size * num_values
        sent = others * num_values * (1 / 2 + 4 / 1024)
    elif share is not None:
        # A message has tau, and a word for each sent value of a shard. Before each half, a small
        # all-reduce finds the longest payload.
        sent = num_messages * (4 + 4 * share * shard)
        num_messages *= 3
    coding_s = 2 * LATENCY_S + num_values / ENCODE + num_decoded / DECODE
    expected = coding_s + sent / WIRE + num_messages * 0.01
    found_s = reduced_s(hosts(world_size), num_values, codec=codec)
    assert found_s == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("world_size", [2, 4])
def test_partial_blocks_of_a_shard_have_a_whole_scale(world_size):
    num_values = 1000 * world_size - 1
    tasks = all_reduced(chain((0, 4 * num_values)), hosts(world_size), codec="dynamic8")
    per_rank = 2 * (world_size - 1) * (1000 + 4)
    assert tasks["s0/reduce[0.0]"].cost == Cost(nbytes=per_rank, num_calls=2 * (world_size - 1))


def test_pieces_of_a_bucket_follow_one_another_and_overlap():
    tasks = all_reduced(chain((0, 4 * (2 * PIECE + 5))), hosts(), codec="dynamic8")
    own = {"load", "forward[l0]", "backward[l0]", "step"}
    own |= {f"{kind}[0.{i}]" for kind in ("encode", "decode") for i in range(3)}
    shared = {f"reduce[0.{i}]" for i in range(3)}
    assert named(tasks) == shared | {f"{name}@worker{w}" for name in own for w in (0, 1)}
    assert after(tasks["s0/encode[0.1]@worker1"]) == ("s0/backward[l0]@worker1",)
    encoded = {f"s0/encode[0.1]@worker{w}" for w in (0, 1)}
    assert set(after(tasks["s0/reduce[0.1]"])) == {"s0/reduce[0.0]"} | encoded
    decoding = {"s0/reduce[0.1]", "s0/decode[0.0]@worker0"}
    assert set(after(tasks["s0/decode[0.1]@worker0"])) == decoding
    assert "s0/decode[0.2]@worker1" in after(tasks["s0/step@worker1"])
    # The link never waits for the coding of the second and third piece.
    rest_s = 0.02 + LATENCY_S  # the last piece has five values
    expected = LATENCY_S + PIECE / ENCODE + 2 * (PIECE * CODES / WIRE + 0.02) + rest_s
    assert exchange_s(tasks, hosts()) == pytest.approx(expected, rel=1e-5)


def test_encoding_delays_backward():
    # Backward takes 1 s, and encoding a bucket of 0.5 Gvalues takes 0.5 s on the same core.
    free = {"codecs": {"eightbit": codec_speed(ENCODE, 1e18)}}
    fast = box("cpu", "cpu", hosts="ab", links=[link("a", "b", 1e18)], device=free)
    tasks = all_reduced(chain((1.0, 4), (0.0, 4 * 500_000_000)), fast, codec="dynamic8")
    assert simulate(tasks, WithoutUpdate(fast)).makespan_s == pytest.approx(1.5, rel=1e-6)


def test_auto_encodes_large_buckets_and_leaves_small_ones():
    # A message takes 10 ms and the codec 2 ms: 4 million values gain time, 16 do not.
    work = chain((0, 4 * 16), (0, 4 * 4_000_000))
    tasks = all_reduced(work, hosts(), codec="auto")
    assert {"reduce[0.0]", "encode[0.0]@worker0", "reduce[1]"} <= named(tasks)
    assert not {name for name in named(tasks) if name.startswith(("encode[1", "decode[1"))}
    assert set(after(tasks["s0/step@worker1"])) >= {"s0/reduce[1]", "s0/decode[0.0]@worker1"}


SAVED_S = (4 - CODES) * 100_000 / WIRE  # 100,000 values: each of two hosts sends its bytes once


@pytest.mark.parametrize(
    ("encode", "decode", "latency_s"),
    [
        (100_000 / SAVED_S, 1e18, 0.0),
        (1e18, 150_000 / SAVED_S, 0.0),  # its shard of the other's values, and both sums
        (1e18, 1e18, SAVED_S / 2),
    ],
)
def test_auto_encodes_if_coding_on_the_slowest_device_takes_less_time_than_it_saves(
    encode, decode, latency_s
):
    plain_s = reduced_s(hosts(), 100_000)
    for times in (0.98, 1.02):
        slow = codec_speed(encode * times, decode * times, latency_s / times)
        machine = hosts(2, {"eightbit": slow}, {"eightbit": codec_speed(1e18, 1e18)})
        encoded_s, auto_s = (
            reduced_s(machine, 100_000, codec=codec) for codec in ("dynamic8", "auto")
        )
        assert (encoded_s < plain_s) is (times > 1)
        assert auto_s == min(encoded_s, plain_s)


def typed(element_size: int) -> Workload:
    layer = Layer("fc", (Parameter("w", (1000,), element_size),), 0, Cost(), Cost())
    return Workload("typed", 1, (layer,), (0,), 0)


def test_unsupported_codecs_and_types_are_refused():
    without, work = hosts(2, {"cast": SPEED}), chain((0, 4))
    for codec in ("dynamic8", "auto"):
        with refused("codec") as caught:
            all_reduced(work, without, codec=codec)
        assert "devices.codecs.eightbit" in caught.value.hint
    with refused("codec"):
        plan_host(work, without, HostReduce(codec="dynamic8"), Window(1))
    with refused("codec"):  # without a declared share
        all_reduced(work, hosts(), codec="threshold:0.1")
    with refused("codec"):
        all_reduced(typed(8), hosts(), codec="dynamic8")
    with refused("codec"):
        plan_host(typed(2), hosts(), HostReduce(codec="dynamic8"), Window(1))
    tasks = all_reduced(typed(2), hosts(), codec="dynamic8")
    assert tasks["s0/encode[0.0]@worker0"].cost.flops == 1000


def test_one_worker_or_one_host_needs_no_codec_speed():
    work, one = chain((0, 4)), box("cpu", "cpu", links=[link("h", "h", 1e9)])
    assert all_reduced(work, box("cpu"), codec="dynamic8")
    encoded, plain = (
        plan_host(work, one, HostReduce(codec=codec), Window(1)) for codec in ("onebit", None)
    )
    assert named(encoded) == named(plain)


def test_the_first_worker_of_a_host_encodes_its_sum():
    machine = box(*["cpu"] * 3, hosts="aab", links=[link("a", "b", WIRE, 0.01)], device=CODECS)
    config = HostReduce(workers=3, codec="dynamic8")
    tasks = plan_host(chain((0, NBYTES)), machine, config, Window(1))
    coding = {f"{kind}[0.0]@worker{w}" for kind in ("encode", "decode") for w in (0, 2)}
    assert {name for name in named(tasks) if name.startswith(("encode", "decode"))} == coding
    assert {"reduce[0]", "send[0.0]"} <= named(tasks)
    assert after(tasks["s0/encode[0.0]@worker2"]) == ("s0/reduce[0]",)
    for worker, own in enumerate((0, 0, 2)):
        assert after(tasks[f"s0/step@worker{worker}"])[0] == f"s0/decode[0.0]@worker{own}"
    coding_s = 2 * LATENCY_S + 102_400 / ENCODE + 1.5 * 102_400 / DECODE
    expected = 102_400 * CODES / WIRE + 0.02 + coding_s
    assert exchange_s(tasks, machine) == pytest.approx(expected, rel=1e-6)


def test_the_cores_of_a_host_encode_for_its_gpus():
    links = [link("gpu0", "a", 1e18), link("gpu1", "b", 1e18), link("a", "b", WIRE)]
    machine = box("gpu", "gpu", hosts="ab", links=links, host=CODECS)
    tasks = plan_host(chain((0, NBYTES)), machine, HostReduce(codec="dynamic8"), Window(1))
    assert after(tasks["s0/h2d[0]@worker1"]) == ("s0/decode[0.0]@worker1",)
    encode = tasks["s0/encode[0.0]@worker1"]
    assert {resource.owner for resource in encode.on} == {"b"}
    assert Roofline.of(machine).seconds(encode) == pytest.approx(LATENCY_S + 102_400 / ENCODE)
    on_gpus = box("gpu", "gpu", hosts="ab", links=links, device=CODECS)
    with refused("codec") as caught:
        plan_host(chain((0, NBYTES)), on_gpus, HostReduce(codec="dynamic8"), Window(1))
    assert "hosts.codecs.eightbit" in caught.value.hint
