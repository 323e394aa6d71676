"""Plans whose gradients travel encoded: what they consist of, and what they take."""

import pytest

from boxes import ExchangeOnly, WithoutUpdate, after, box, chain, link, named
from paceline.core.calibration import LinearTime
from paceline.core.collective import codec_times
from paceline.core.cost import Roofline
from paceline.core.errors import InvalidInput
from paceline.core.machine import CodecSpeed, Machine
from paceline.core.simulate import period, simulate
from paceline.core.strategy import Window
from paceline.core.wire_format import PIECE, wire_format
from paceline.core.workload import Cost, Layer, Parameter, Workload
from paceline.strategies.allreduce.config import AllReduce
from paceline.strategies.allreduce.plan import plan
from paceline.strategies.host.config import HostReduce
from paceline.strategies.host.plan import plan as plan_host

ENCODE, DECODE, LATENCY_S = 1e9, 4e9, 1e-3
SPEED = {"encode_values_per_s": ENCODE, "decode_values_per_s": DECODE, "latency_s": LATENCY_S}
CODECS = {"codecs": {"eightbit": SPEED, "fourbit": SPEED}}
WIRE = 1e8


def hosts(world_size: int = 2, device: dict = CODECS, **more) -> Machine:
    """Return hosts of one core each in a ring."""
    names = [f"h{i}" for i in range(world_size)]
    pairs = list(zip(names, names[1:] + names[:1], strict=True))[
        : world_size if world_size > 2 else 1
    ]
    links = [link(*pair, WIRE, 0.01, **more) for pair in pairs]
    return box(*["cpu"] * world_size, hosts=names, links=links, device=device)


def all_reduced(work: Workload, machine: Machine, **config):
    return plan(work, machine, AllReduce(workers=len(machine.devices), **config), Window(1))


def exchange_s(machine: Machine, num_values: int, **config) -> float:
    tasks = all_reduced(chain((0, 4 * num_values)), machine, **config)
    return simulate(tasks, ExchangeOnly(machine)).makespan_s


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_a_bucket_takes_encoding_the_wire_and_decoding(world_size):
    num_values = 1024 * 60 * world_size  # in whole blocks
    sent = 2 * (world_size - 1) / world_size * num_values * (1 + 4 / 1024)
    wire_s = sent / WIRE + 2 * (world_size - 1) * 0.01
    # Each rank encodes the shards of the others and the sum of its own; it decodes its own shard as
    # often as there are others, and all shards of the sum.
    others = (world_size - 1) / world_size
    encode_s = LATENCY_S + (others + 1 / world_size) * num_values / ENCODE
    decode_s = LATENCY_S + (others + 1) * num_values / DECODE
    found = exchange_s(hosts(world_size), num_values, codec="dynamic8")
    assert found == pytest.approx(encode_s + wire_s + decode_s, rel=1e-9)


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_four_bits_go_to_all_and_no_sum_comes_back(world_size):
    num_values = 1024 * 60
    sent = (world_size - 1) * num_values * (1 / 2 + 4 / 1024)
    wire_s = sent / WIRE + (world_size - 1) * 0.01
    # Each rank encodes all its values once, and decodes those of all ranks, its own too.
    encode_s = LATENCY_S + num_values / ENCODE
    decode_s = LATENCY_S + world_size * num_values / DECODE
    found = exchange_s(hosts(world_size), num_values, codec="e3m0")
    assert found == pytest.approx(encode_s + wire_s + decode_s, rel=1e-9)
    whole = LinearTime(2 * (world_size - 1) * 0.01, 2 * (world_size - 1) / world_size / WIRE)
    own = CodecSpeed(encode_values_per_s=ENCODE, decode_values_per_s=DECODE, latency_s=LATENCY_S)
    times = codec_times(4 * num_values, world_size, whole, own, wire_format("e3m0"))
    assert found == pytest.approx(times.encoded_s, rel=1e-9)


@pytest.mark.parametrize("world_size", [2, 4])
def test_what_is_on_the_wire_is_what_the_codec_makes_of_each_shard(world_size):
    num_values = 1000 * world_size - 1
    tasks = all_reduced(chain((0, 4 * num_values)), hosts(world_size), codec="dynamic8")
    per_rank = 2 * (world_size - 1) * (1000 + 4)
    assert tasks["s0/reduce[0.0]"].cost == Cost(nbytes=per_rank, num_calls=2 * (world_size - 1))


def test_pieces_of_a_bucket_follow_one_another_and_overlap():
    tasks = all_reduced(chain((0, 4 * (2 * PIECE + 5))), hosts(), codec="dynamic8")
    ranks = {
        f"{kind}[0.{i}]@worker{w}"
        for kind in ("encode", "decode")
        for i in range(3)
        for w in (0, 1)
    }
    own = {
        f"{kind}@worker{w}"
        for kind in ("load", "forward[l0]", "backward[l0]", "step")
        for w in (0, 1)
    }
    assert named(tasks) == ranks | own | {"reduce[0.0]", "reduce[0.1]", "reduce[0.2]"}
    assert after(tasks["s0/encode[0.1]@worker1"]) == ("s0/backward[l0]@worker1",)
    assert set(after(tasks["s0/reduce[0.1]"])) == {
        "s0/reduce[0.0]",
        "s0/encode[0.1]@worker0",
        "s0/encode[0.1]@worker1",
    }
    assert set(after(tasks["s0/decode[0.1]@worker0"])) == {
        "s0/reduce[0.1]",
        "s0/decode[0.0]@worker0",
    }
    assert "s0/decode[0.2]@worker1" in after(tasks["s0/step@worker1"])
    # The wire never waits for the second and the third piece to be encoded, or decoded.
    piece_s = PIECE * (1 + 4 / 1024) / WIRE + 0.02
    encode_s = LATENCY_S + PIECE / ENCODE
    rest_s = 0.02 + LATENCY_S  # of five values
    found = simulate(tasks, ExchangeOnly(hosts())).makespan_s
    assert found == pytest.approx(encode_s + 2 * piece_s + rest_s, rel=1e-5)


def test_encoding_slows_backward_down():
    # A second of backward beside a bucket of 0.5 Gvalues, which takes 0.5 s to encode.
    work = chain((1.0, 4), (0.0, 4 * 500_000_000))
    fast = box("cpu", "cpu", hosts=["a", "b"], links=[link("a", "b", 1e18)], device=CODECS)
    free = {"eightbit": SPEED | {"latency_s": 0.0, "decode_values_per_s": 1e18}}
    fast = Machine.model_validate(
        fast.model_dump()
        | {"devices": [one.model_dump() | {"codecs": free} for one in fast.devices]}
    )
    tasks = plan(work, fast, AllReduce(codec="dynamic8"), Window(1))
    assert simulate(tasks, WithoutUpdate(fast)).makespan_s == pytest.approx(1.5, rel=1e-6)


def test_auto_encodes_large_buckets_and_leaves_small_ones():
    # 10 ms a message, 2 ms of the codec: 16 values gain nothing, 4 million do.
    work = chain((0, 4 * 16), (0, 4 * 4_000_000))
    names = named(all_reduced(work, hosts(), codec="auto"))
    assert {"reduce[0.0]", "encode[0.0]@worker0", "reduce[1]"} <= names
    assert not {name for name in names if name.startswith(("encode[1", "decode[1"))}
    step = all_reduced(work, hosts(), codec="auto")["s0/step@worker1"]
    assert set(after(step)) >= {"s0/reduce[1]", "s0/decode[0.0]@worker1"}


def test_the_slowest_device_decides_what_auto_does():
    machine = hosts(3).model_dump()
    slow = SPEED | {"encode_values_per_s": 1e5}
    machine["devices"][2]["codecs"] = {"eightbit": slow}
    found = exchange_s(Machine.model_validate(machine), 100_000, codec="auto")
    assert found == exchange_s(hosts(3), 100_000)


def test_a_device_without_a_speed_is_named_with_its_kernel_and_field():
    half = hosts().model_dump()
    half["devices"][1]["codecs"] = {"cast": SPEED}
    machine = Machine.model_validate(half)
    message = r"'dynamic8' .* device 'cpu1' is with kernel 'eightbit': .* devices\.codecs\.eightbit"
    for config in (AllReduce(codec="dynamic8"), AllReduce(codec="auto")):
        with pytest.raises(InvalidInput, match=message):
            plan(chain((0, 4)), machine, config, Window(1))
    with pytest.raises(InvalidInput, match=message):
        plan_host(chain((0, 4)), machine, HostReduce(codec="dynamic8"), Window(1))


def test_one_worker_and_one_host_need_no_speed():
    assert plan(chain((0, 4)), box("cpu"), AllReduce(workers=1, codec="dynamic8"), Window(1))
    one = box("cpu", "cpu", links=[link("h", "h", 1e9)])
    assert named(plan_host(chain((0, 4)), one, HostReduce(codec="onebit"), Window(1))) == named(
        plan_host(chain((0, 4)), one, HostReduce(), Window(1))
    )


def typed(element_size: int) -> Workload:
    layer = Layer("fc", (Parameter("w", (1000,), element_size),), 0, Cost(), Cost())
    return Workload("typed", 1, (layer,), (0,), 0)


def test_gradients_that_are_not_encoded_are_refused():
    with pytest.raises(InvalidInput, match="gradients of 64 bits, as those of fc, are not encoded"):
        plan(typed(8), hosts(), AllReduce(codec="dynamic8"), Window(1))
    with pytest.raises(InvalidInput, match="gradients of 16 bits, as those of fc, are not encoded"):
        plan_host(typed(2), hosts(), HostReduce(codec="dynamic8"), Window(1))
    tasks = plan(typed(2), hosts(), AllReduce(codec="dynamic8"), Window(1))
    assert tasks["s0/encode[0.0]@worker0"].cost.flops == 1000


def test_a_threshold_is_planned_only_with_the_share_that_it_sends():
    message = "nobody knows beforehand .* declare the share .* such as threshold:0.1@0.01"
    with pytest.raises(InvalidInput, match=message):
        plan(chain((0, 4)), hosts(), AllReduce(codec="threshold:0.1"), Window(1))


@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize("share", [0.001, 0.05, 1.0])
def test_a_declared_share_is_what_travels_and_takes_its_time(world_size, share):
    num_values = 60_000 * world_size
    machine = hosts(world_size, device={"codecs": {"threshold": SPEED}})
    # To each other rank, and from it: tau, and a word for each value that is sent of a shard.
    sent = 2 * (world_size - 1) * (4 + 4 * share * 60_000)
    # Ranks agree on the longest payload before each half, which takes a small all-reduce.
    num_messages = 3 * 2 * (world_size - 1)
    tasks = all_reduced(chain((0, 4 * num_values)), machine, codec=f"threshold:0.1@{share}")
    cost = tasks["s0/reduce[0.0]"].cost
    assert (cost.nbytes, cost.num_calls) == (pytest.approx(sent), num_messages)
    encode_s = LATENCY_S + num_values / ENCODE
    decode_s = LATENCY_S + (2 - 1 / world_size) * num_values / DECODE
    found = exchange_s(machine, num_values, codec=f"threshold:0.1@{share}")
    expected = encode_s + sent / WIRE + num_messages * 0.01 + decode_s
    assert found == pytest.approx(expected, rel=1e-9)


NBYTES = 4 * 102_400


def test_hosts_encode_their_sums_by_their_first_worker():
    machine = box(*["cpu"] * 3, hosts="aab", links=[link("a", "b", WIRE, 0.01)], device=CODECS)
    tasks = plan_host(
        chain((0, NBYTES)), machine, HostReduce(workers=3, codec="dynamic8"), Window(1)
    )
    names = named(tasks)
    assert {"reduce[0]", "send[0.0]"} <= names
    coding = {name for name in names if name.startswith(("encode", "decode"))}
    assert coding == {f"{kind}[0.0]@worker{w}" for kind in ("encode", "decode") for w in (0, 2)}
    assert after(tasks["s0/encode[0.0]@worker2"]) == ("s0/reduce[0]",)
    for worker, own in enumerate((0, 0, 2)):
        assert after(tasks[f"s0/step@worker{worker}"])[0] == f"s0/decode[0.0]@worker{own}"
    sent_s = 102_400 * (1 + 4 / 1024) / WIRE + 0.02
    coding_s = 2 * LATENCY_S + 102_400 / ENCODE + 1.5 * 102_400 / DECODE
    found = simulate(tasks, ExchangeOnly(machine)).makespan_s
    assert found == pytest.approx(sent_s + coding_s, rel=1e-6)


def test_the_cores_of_a_host_encode_for_its_gpus():
    links = [link("gpu0", "a", 1e18), link("gpu1", "b", 1e18), link("a", "b", WIRE)]
    machine = box("gpu", "gpu", hosts="ab", links=links, host=CODECS)
    tasks = plan_host(chain((0, NBYTES)), machine, HostReduce(codec="dynamic8"), Window(1))
    assert after(tasks["s0/h2d[0]@worker1"]) == ("s0/decode[0.0]@worker1",)
    encode = tasks["s0/encode[0.0]@worker1"]
    assert {resource.owner for resource in encode.on} == {"b"}
    assert Roofline.of(machine).seconds(encode) == pytest.approx(LATENCY_S + 102_400 / ENCODE)
    on_gpus = box("gpu", "gpu", hosts="ab", links=links, device=CODECS)
    with pytest.raises(InvalidInput, match=r"host 'a' is with kernel 'eightbit'.*hosts\.codecs"):
        plan_host(chain((0, NBYTES)), on_gpus, HostReduce(codec="dynamic8"), Window(1))


def test_steps_with_a_codec_follow_one_another():
    machine = hosts()

    def window(num_steps):
        config = AllReduce(codec="dynamic8")
        return plan(
            chain((0.1, 4 * 100_000), (0.2, 4 * 9_000_000)), machine, config, Window(num_steps)
        )

    cost = WithoutUpdate(machine)
    assert period(window, cost, 2) == pytest.approx(period(window, cost, 4), rel=1e-9)
