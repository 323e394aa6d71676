"""The plan of strategy local against closed forms: rounds, exchanges, uneven workers, fragments."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from boxes import FLOPS_PER_S, ExchangeOnly, after, box, chain, link, named
from paceline.core.cost import Roofline, compute_lane, layer_times
from paceline.core.errors import InvalidInput
from paceline.core.machine import Machine
from paceline.core.plan import Kind
from paceline.core.simulate import period, simulate
from paceline.core.strategy import Strategy, Window
from paceline.core.workload import Cost, Layer, Parameter, Workload
from paceline.planner import Forecast, forecast, search
from paceline.records.machine_file import find_machine
from paceline.strategies import find_strategy
from paceline.strategies.local import STRATEGY
from paceline.strategies.local.config import Local
from paceline.strategies.local.plan import (
    exchange_nbytes,
    fragments_of,
    inner_step,
    inner_steps_of,
    memory,
    plan,
    plan_balanced,
    turns,
)

NBYTES = 4000  # of the model's parameters
PACE = 1e3  # bytes a second between two hosts
STEP_S = 20.0  # of an inner step
SPEED = {"encode_values_per_s": 1e3, "decode_values_per_s": 4e3}


def hosts(speeds=(1.0, 1.0), latency_s: float = 0.0, kind: str = "cpu", **facts) -> Machine:
    """Hosts of one device each, of these Gflop/s, all linked with the first, which has the hub."""
    names = "abcdefgh"[: len(speeds)]
    links = [link("a", other, PACE, latency_s) for other in names[1:]]
    if kind == "gpu":
        links += [link(f"gpu{i}", name, 1e12) for i, name in enumerate(names)]
    machine = box(*[kind] * len(speeds), hosts=names, links=links, **facts)
    devices = [
        one.model_copy(update={"flops_per_s": speed * FLOPS_PER_S})
        for one, speed in zip(machine.devices, speeds, strict=True)
    ]
    return machine.model_copy(update={"devices": tuple(devices)})


def two_layers(seconds: float = STEP_S) -> Workload:
    """Two layers of half the parameters each; memory is so fast that updates take no time."""
    return chain((seconds / 2, NBYTES // 2), (seconds / 2, NBYTES // 2))


def round_s(machine: Machine, config: Local, *, balanced: bool = False, work=None) -> float:
    planned = plan_balanced if balanced else plan
    workload = two_layers() if work is None else work
    return period(lambda n: planned(workload, machine, config, Window(n)), Roofline.of(machine), 2)


def forecast_of(machine: Machine, config: Local, **options) -> Forecast:
    return forecast(two_layers(), machine, STRATEGY, config, 64.0, **options)


def test_these_tasks_and_no_others_are_a_round():
    machine = hosts(device={"codecs": {"eightbit": SPEED}})
    config = Local(sync_every=10, fragments=2, delay=2, codec="dynamic8")
    tasks = plan(two_layers(), machine, config, Window(2))
    fragment = {"train[{}]", "reduce[{}.gradient]", "encode[{}]", "send[{}.up]", "decode[{}.hub]"}
    fragment |= {"send[{}.down]", "decode[{}]", "step[{}]"}
    expected = {
        f"{name.format(p)}@worker{w}" for name in fragment for p in range(2) for w in range(2)
    }
    expected |= {f"reduce[{p}]" for p in range(2)}
    # In the first round nothing travels beside the steps before the first fragment.
    expected |= {f"train[1.beside]@worker{w}" for w in range(2)}
    assert named(tasks) == expected
    later = {task.name.removeprefix("s1/") for task in tasks.tasks if task.step == 1}
    assert later == expected | {f"train[0.beside]@worker{w}" for w in range(2)}
    without = named(plan(two_layers(), machine, Local(sync_every=10), Window(1)))
    assert not any("encode" in name or "beside" in name for name in without)


def test_a_fragment_waits_for_all_workers_and_inner_steps_for_the_fragment_before():
    config = Local(workers=3, sync_every=10, fragments=2, delay=2)
    tasks = plan(two_layers(), hosts((1, 1, 1)), config, Window(2))
    taken = {f"s0/decode[1.hub]@worker{w}" for w in range(3)}  # by the hub
    for name in ("s0/send[1.down]@worker2", "s0/reduce[1]"):
        assert set(after(tasks[name])) == taken
    assert after(tasks["s1/train[0.beside]@worker2"]) == ("s0/reduce[1.gradient]@worker2",)
    assert set(after(tasks["s1/train[0]@worker2"])) == {
        "s0/step[1]@worker2",
        "s1/train[0.beside]@worker2",
    }
    # Nobody waits for what the hub does for itself.
    assert not any("s0/reduce[1]" in after(task) for task in tasks.tasks)


@given(
    st.integers(1, 12),
    st.lists(st.integers(1, 30), min_size=1, max_size=4),
    st.integers(1, 4),
    st.integers(0, 9),
)
def test_every_worker_takes_its_inner_steps_in_every_round(sync_every, speeds, fragments, delay):
    try:
        config = Local(len(speeds), sync_every, min(fragments, sync_every), delay)
    except ValueError:
        return
    machine, work = hosts(speeds), chain(*[(1.0, 40)] * 4)
    counts = inner_steps_of(machine, machine.devices, config, work, balanced=True)
    assert sum(counts) >= sync_every * len(speeds)
    tasks = plan_balanced(work, machine, config, Window(3)).tasks
    rates = Roofline.of(machine).rates
    for worker, count in enumerate(counts):
        for number in range(3):
            flops = [
                task.cost.flops
                for task in tasks
                if (task.kind, task.step, task.worker) == (Kind.TRAIN, number, worker)
            ]
            one = inner_step(work, rates[compute_lane(machine.devices[worker].name)]).flops
            assert sum(flops) == pytest.approx(count * one)


@given(st.integers(1, 400), st.integers(1, 12), st.integers(0, 60), st.integers(1, 999))
def test_turns_hold_all_inner_steps_and_as_many_beside_as_fit(sync_every, fragments, delay, count):
    try:
        config = Local(2, sync_every, fragments, delay)
    except ValueError:
        return
    found = turns(config, count)
    assert sum(map(sum, found)) == count
    sizes = [sum(turn) for turn in found]
    assert max(sizes) - min(sizes) <= 1
    assert all(turn.beside == min(delay * count // sync_every, sum(turn)) for turn in found)


def test_an_inner_step_takes_as_long_as_its_layers_and_its_update_one_after_another():
    # One layer is bound by arithmetic, one by traffic, and each pays for its calls.
    machine = hosts(device={"memory_bandwidth_bytes_per_s": 1e8, "call_latency_s": 0.5})
    layers = (
        Layer("a", (Parameter("w", (250,)),), 0, Cost(3e9, 1e8, 1), Cost(6e9, 1e8, 2)),
        Layer("b", (Parameter("w", (250,)),), 0, Cost(1e9, 4e8, 1), Cost(2e9, 8e8, 2)),
    )
    work = Workload("two", 1, layers, (1, 0), 10**8)
    rate = Roofline.of(machine).rates[plan(work, machine, Local(), Window(1)).tasks[0].on[0]]
    times = layer_times(work, rate)
    load_s = 2 * 1e8 / 1e8 + 0.5
    expected = sum(times.forward_s) + sum(times.backward_s) + times.update_s + load_s
    found = inner_step(work, rate)
    assert rate.work_s(found) + rate.latency_s(found) == pytest.approx(expected)
    accumulated = replace(work, num_accumulated=2)
    extra = inner_step(accumulated, rate).flops / rate.flops_per_s - rate.work_s(found)
    assert extra == pytest.approx(2 * 2 + max(12.0, 14.0) * 2)


@pytest.mark.parametrize("sync_every", [1, 7, 1000])
def test_a_round_takes_its_inner_steps_and_the_way_to_the_hub_and_back(sync_every):
    # The worker at the hub sends nothing over the network; the other one's payload goes up, and
    # then the first one's comes down.
    machine, config = hosts(latency_s=0.25), Local(sync_every=sync_every)
    expected = sync_every * STEP_S + 2 * NBYTES / PACE + 2 * 0.25
    assert round_s(machine, config) == pytest.approx(expected)
    found = forecast_of(machine, config)
    assert found.step_s == pytest.approx(expected / sync_every)
    assert found.samples_per_s == pytest.approx(64 * sync_every / expected)


def test_the_parts_of_a_forecast_are_those_of_one_inner_step():
    found = forecast_of(hosts(), Local(sync_every=10))
    parts = found.breakdown
    assert parts.step_s == pytest.approx(found.step_s) == pytest.approx(20.8)
    assert parts.train_s == pytest.approx(20)
    # One worker sends for 8 of 208 s, and the other one waits meanwhile.
    assert (parts.exposed_s, parts.idle_s) == pytest.approx((0.4, 0.4))
    assert found.link_nbytes == pytest.approx({"a->b": 400, "b->a": 400})
    assert found.link_busy == pytest.approx(4 / 208)
    assert found.why.startswith("computes 96 % of the step; 2 % is communication that shows")


def test_each_of_more_workers_sends_one_payload_and_gets_those_of_the_others():
    # Three on hosts of their own beside the hub's: links of their own, up one, and down three.
    config = Local(workers=4, sync_every=5)
    assert round_s(hosts((1, 1, 1, 1)), config) == pytest.approx(5 * STEP_S + 4 * NBYTES / PACE)
    # Behind one link, on a host of their own, they share it: three times three come down, one
    # worker after the other, and but for the last one's all payloads are up before that one is.
    shared = box(*["cpu"] * 4, hosts="abbb", links=[link("a", "b", PACE)], host={"cores": 4})
    assert round_s(shared, config) == pytest.approx(5 * STEP_S + (9 + 1) * NBYTES / PACE)
    # With the hub on theirs, it is one up, and one time three down.
    config = Local(workers=4, sync_every=5, hub="b")
    assert round_s(shared, config) == pytest.approx(5 * STEP_S + (1 + 3) * NBYTES / PACE)


def test_one_worker_alone_exchanges_with_a_hub_that_sends_nothing_back():
    assert round_s(hosts((1,)), Local(workers=1, sync_every=3)) == pytest.approx(3 * STEP_S)


def test_messages_that_take_a_workers_cores_hide_beside_others_work_only():
    # Four messages follow one another; two are a worker's own, whose cores carry them.
    machine = box("cpu", "cpu", links=[link("h", "h", PACE, uses_cores=True)])
    waiting, beside = (round_s(machine, Local(sync_every=10, delay=delay)) for delay in (0, 3))
    assert waiting == pytest.approx(10 * STEP_S + 4 * NBYTES / PACE)
    assert waiting > beside > 10 * STEP_S + 2 * NBYTES / PACE


def test_a_delay_hides_the_exchange_as_far_as_its_steps_last():
    # 4 s up and 4 s down beside steps of 1 s.
    machine, work = hosts(), two_layers(1.0)
    for delay, shown_s in ((0, 8), (3, 5), (8, 0), (12, 0)):
        config = Local(sync_every=20, delay=delay)
        assert round_s(machine, config, work=work) == pytest.approx(20 + shown_s, rel=1e-4)
        found = forecast(work, machine, STRATEGY, config, 64.0)
        # One worker waits while the other one sends.
        shown = found.breakdown.exposed_s + found.breakdown.idle_s
        assert shown == pytest.approx(shown_s / 20, abs=1e-4)
        assert found.breakdown.step_s == pytest.approx(found.step_s)


@given(st.integers(1, 9), st.lists(st.integers(1, 500), min_size=9, max_size=12))
def test_fragments_are_strided_and_divide_what_passes_at_once(fragments, sizes):
    work = chain(*((1.0, 4 * size) for size in sizes))
    config = Local(sync_every=100, fragments=fragments)
    dealt = fragments_of(work, config)
    names = [[layer.name for layer in fragment] for fragment in dealt]
    assert names == [
        [f"l{i}" for i in range(len(sizes)) if i % fragments == p] for p in range(fragments)
    ]
    assert sum(exchange_nbytes(work, config)) == 4 * sum(sizes)
    equal = chain(*[(1.0, 400)] * (4 * fragments))
    assert exchange_nbytes(equal, config) == (4 * 400,) * fragments
    # 8 bits a value, and 4 bytes more for each block of 1024.
    encoded = exchange_nbytes(equal, replace(config, codec="dynamic8"))
    assert encoded == (400 + 4,) * fragments


def test_fragments_send_as_many_bytes_in_a_round_and_hide_behind_fewer_steps():
    # Each half takes 2 s up and 2 down: 4 steps of a second hide it, where the whole needs 8.
    machine, work = hosts(), two_layers(1.0)
    whole, halves = (Local(sync_every=20, fragments=p, delay=4) for p in (1, 2))
    assert round_s(machine, whole, work=work) == pytest.approx(20 + 4, rel=1e-4)
    assert round_s(machine, halves, work=work) == pytest.approx(20, rel=1e-4)
    found = [forecast(work, machine, STRATEGY, one, 64.0) for one in (whole, halves)]
    assert [one.wire_nbytes for one in found] == pytest.approx([NBYTES / 20] * 2)
    most = [
        max(task.cost.nbytes for task in plan(work, machine, one, Window(1)).tasks
            if task.kind is Kind.SEND and task.worker == 1)
        for one in (whole, halves)
    ]  # fmt: skip
    assert most == [NBYTES, NBYTES / 2]


def test_layers_without_parameters_are_in_no_fragment():
    work = two_layers()
    bare = Layer("bare", (), 0, Cost(), Cost())
    between = replace(work, layers=(work.layers[0], bare, work.layers[1]), backward_order=(2, 1, 0))
    dealt = fragments_of(between, Local(fragments=2))
    assert [[layer.name for layer in one] for one in dealt] == [["l0"], ["l1"]]


def test_uneven_workers_gain_by_inner_steps_that_follow_their_speeds():
    # 4:1. In equal steps both take as long as the slow one; in 16 and 4 of 10 on average both take
    # 80 s, while the fast one alone would have done 16 steps.
    machine, config = hosts((4.0, 1.0)), Local(sync_every=10)
    steps = inner_steps_of(machine, machine.devices, config, two_layers(), balanced=True)
    assert steps == (16, 4)
    exchange_s = 2 * NBYTES / PACE
    equal, balanced = (round_s(machine, config, balanced=one) for one in (False, True))
    assert (equal, balanced) == pytest.approx((10 * 20 + exchange_s, 4 * 20 + exchange_s))
    alone_s = 20 * 5.0  # for as many steps of the fast one
    assert alone_s / balanced == pytest.approx(100 / 88)
    long = Local(sync_every=100)
    gain = 20 * 5.0 * 10 / round_s(machine, long, balanced=True)
    assert gain == pytest.approx(1000 / 808)  # 1.24


def test_the_planner_plans_equal_and_balanced_parts_of_uneven_workers_and_says_the_gain():
    def work(samples: int) -> Workload:
        return replace(two_layers(STEP_S * samples / 8), batch_size=samples)

    found = search(work, hosts((4.0, 1.0)), [STRATEGY], 16, 2)
    balanced, equal = found
    assert (balanced.is_balanced, equal.is_balanced) == (True, False)
    times = (100 * 20 + 8) / (40 * 20 + 8)
    assert balanced.notes[0] == (
        f"with --balance auto, {times:.2f} times as fast as with equal parts"
    )
    assert balanced.samples_per_s / equal.samples_per_s == pytest.approx(times)
    assert [one.is_balanced for one in search(work, hosts(), [STRATEGY], 16, 2)] == [False]


def test_a_worker_that_takes_fewer_steps_than_there_are_fragments_sends_all_of_them():
    # Of 20 steps the slow worker takes one: half of the fragments are sent without a step between.
    machine, config = hosts((19.0, 1.0)), Local(sync_every=10, fragments=2, delay=2)
    steps = inner_steps_of(machine, machine.devices, config, two_layers(), balanced=True)
    assert steps == (19, 1)
    tasks = plan_balanced(two_layers(), machine, config, Window(3)).tasks
    slow = [task.id.part for task in tasks if task.step == 1 and task.worker == 1]
    out, back = ["{}.gradient", "{}.up", "{}.hub"], ["{}.down", "{}", "{}"]
    assert slow == [one.format(0) for one in (*out, *back)] + [
        one.format(1) for one in ("{}", *out, *back)
    ]


def test_codecs_take_the_devices_and_shrink_the_wire():
    machine = hosts(device={"codecs": {"eightbit": SPEED}})
    config = Local(sync_every=10, codec="dynamic8")
    # A quarter of the bytes, and 4 more; 1 s to encode 1000 values and 0.5 to decode two payloads.
    expected = 10 * STEP_S + 2 * 1004 / PACE + 1 + 0.5
    assert round_s(machine, config) == pytest.approx(expected)


def test_a_gpu_is_encoded_for_in_its_hosts_memory_and_waits():
    machine = hosts(kind="gpu", host={"codecs": {"eightbit": SPEED}})
    config = Local(sync_every=10, codec="dynamic8")
    names = named(plan(two_layers(), machine, config, Window(1)))
    assert {f"{kind}[0]@worker0" for kind in ("d2h", "h2d", "encode", "decode")} <= names
    expected = 10 * STEP_S + 2 * 1004 / PACE + 1 + 0.5
    assert round_s(machine, config) == pytest.approx(expected)
    found = forecast_of(machine, config)
    # Hosts, in whose memory the outer steps are taken, are no devices of the breakdown.
    assert found.breakdown.step_s == pytest.approx(found.step_s)
    with pytest.raises(InvalidInput, match=r"host 'a' is with kernel 'eightbit'.* hosts.codecs"):
        plan(two_layers(), hosts(kind="gpu"), config, Window(1))


def test_the_hubs_outer_step_takes_the_cores_beside_it_and_nobody_elses():
    # 32 kB in the hub's memory of 1 kB/s: two payloads, their sum, and five vectors.
    slow = hosts(host={"memory_bandwidth_bytes_per_s": 1e3})
    tasks = plan(two_layers(), slow, Local(sync_every=10), Window(1))
    hub = tasks["s0/reduce[0]"]
    assert [str(resource) for resource in hub.on] == ["a/reduce", "cpu0/compute"]
    assert hub.cost.nbytes == 8 * NBYTES
    assert Roofline.of(slow).seconds(hub) == pytest.approx(32)
    on_gpu = plan(two_layers(), hosts(kind="gpu"), Local(sync_every=10), Window(1))
    assert [str(one) for one in on_gpu["s0/reduce[0]"].on] == ["a/reduce"]


def test_the_messages_of_all_workers_follow_one_another_on_the_cores_of_the_hubs_host():
    # A wire takes 4 s for a payload of 4,000 bytes, and the hub's cores 8 s.
    machine = hosts((1, 1, 1), host={"message_bytes_per_s": PACE / 2})
    # The payloads of two workers on other hosts; each gets those of two, one after the other. The
    # later one has the hub to itself when it sends again.
    inner_s, up_s, down_s = 10 * STEP_S, 8, 2 * 16
    assert round_s(machine, Local(workers=3, sync_every=10)) == pytest.approx(
        inner_s + up_s + down_s
    )
    fast = hosts((1, 1, 1), host={"message_bytes_per_s": 1e12})
    assert round_s(fast, Local(workers=3, sync_every=10)) == pytest.approx(inner_s + 4 + 8)


def test_a_lone_core_takes_the_steps_of_hub_and_worker_one_after_the_other():
    # Each vector of 4,000 bytes that is read or written takes 4 s of the host's memory.
    slow = {"memory_bandwidth_bytes_per_s": 1e3}
    two = hosts(host=slow)
    device = two.devices[1].model_copy(update={"host": "a"})
    together = two.model_copy(
        update={"links": (), "hosts": two.hosts[:1], "devices": (two.devices[0], device)}
    )
    lone = together.with_each("hosts", cores=1)
    passed, added, stepped, of_hub, made, taken = 2 * 4, 3 * 4, 7 * 4, 8 * 4, 4 * 4, 3 * 4
    # Both get what the other sent, the hub takes its step, and both theirs: the second is the last.
    back_s = 2 * passed + of_hub + 2 * (added + stepped)
    # When it has trained, 28 s after the first one, the hub still looks at the payload of that.
    waiting = made + passed + taken - stepped
    out_s = waiting + made + passed + taken
    found = round_s(lone, Local(sync_every=10))
    assert found == pytest.approx(back_s + 10 * STEP_S + out_s)
    assert {
        str(on)
        for on in plan(two_layers(), lone, Local(sync_every=10), Window(1))["s0/reduce[0]"].on
    } >= {"a/0/core"}


def test_large_rounds_cost_no_more_to_plan():
    sizes = {len(plan(two_layers(), hosts(), Local(sync_every=h), Window(2))) for h in (2, 10**9)}
    assert len(sizes) == 1


def test_memory_is_a_replica_and_two_vectors_for_each_worker_and_for_the_hub():
    needed = memory(two_layers(), hosts(), Local())
    assert needed["a"] == 2 * needed["b"] == 4 * NBYTES
    assert needed["cpu0"] == needed["cpu1"] >= 3 * NBYTES
    apart = memory(two_layers(), hosts((1, 1, 1)), Local(hub="c"))
    assert apart["c"] == apart["a"] == 2 * NBYTES


@pytest.mark.parametrize(
    ("machine", "config", "why"),
    [
        (hosts(), Local(fragments=3), "fragments: 3 are more than the 2 layers of model chain"),
        (hosts(), Local(workers=3), "workers: 3 do not fit"),
        (hosts(), Local(hub="z"), "hub: 'z' is no host of machine 'box'; choose one of a, b"),
        (box("cpu", "cpu", hosts="ab"), Local(), "no link leads from 'b' to 'a'"),
        (hosts(), Local(codec="dynamic8"), "nothing says how fast device 'cpu0' is"),
        (hosts(), Local(codec="threshold:0.1"), "nobody knows beforehand"),
    ],
)
def test_what_does_not_fit_is_refused(machine, config, why):
    with pytest.raises(InvalidInput, match=why):
        plan(two_layers(), machine, config, Window(1))


def test_an_exchange_by_itself_is_priced_without_inner_steps():
    machine = hosts()
    tasks = plan(two_layers(), machine, Local(sync_every=50), Window(1))
    found = simulate(tasks, ExchangeOnly(machine)).makespan_s
    assert found == pytest.approx(2 * NBYTES / PACE)


CONSUMER = """
name = "two-consumer-gpus"

[[hosts]]
name = "host0"
cores = 16
memory_bytes = "64 GiB"
memory_bandwidth_bytes_per_s = "40 GB/s"
source = "made up"

[[hosts]]
name = "host1"
cores = 16
memory_bytes = "64 GiB"
memory_bandwidth_bytes_per_s = "40 GB/s"
source = "made up"

[[devices]]
name = "gpu0"
host = "host0"
kind = "gpu"
flops_per_s = "35 Tflop/s"
memory_bytes = "24 GB"
memory_bandwidth_bytes_per_s = "900 GB/s"
source = "made up"

[[devices]]
name = "gpu1"
host = "host1"
kind = "gpu"
flops_per_s = "35 Tflop/s"
memory_bytes = "24 GB"
memory_bandwidth_bytes_per_s = "900 GB/s"
source = "made up"

[[links]]
between = ["gpu0", "host0"]
bandwidth_bytes_per_s = "13 GB/s"
latency_s = "5 us"
source = "made up"

[[links]]
between = ["gpu1", "host1"]
bandwidth_bytes_per_s = "13 GB/s"
latency_s = "5 us"
source = "made up"

[[links]]
between = ["host0", "host1"]
bandwidth_bytes_per_s = "1 Gbit/s"
latency_s = "100 us"
source = "made up"

[losses]
beside_exchange = 0.0
spread = 0.0
source = "made up"
"""
TOKENS, WIRE_PER_S, DEVICE_PER_S = 16_384, 1.25e8, 35e12  # a host and step: 32 k in all


def transformer(num_layers: int, width: int) -> Workload:
    """Blocks of 12 width^2 parameters, each of which takes 6 operations a token."""
    count = 12 * width * width
    layers = tuple(
        Layer(
            f"block{i}",
            (Parameter("w", (count,)),),
            0,
            Cost(2 * count * TOKENS),
            Cost(4 * count * TOKENS),
        )
        for i in range(num_layers)
    )
    return Workload("transformer", 16, layers, tuple(reversed(range(num_layers))), 0)


@pytest.fixture
def consumer(tmp_path: Path) -> Machine:
    path = tmp_path / "two-consumer-gpus.toml"
    path.write_text(CONSUMER)
    return find_machine(str(path))


@pytest.mark.parametrize(("num_layers", "width"), [(12, 768), (24, 2048)])
def test_what_no_exchange_of_gradients_gains_on_gigabit_a_round_does(consumer, num_layers, width):
    # Communication over computation is b F / (6 T B), whatever the model: 11.5 in float32.
    work, num_steps = transformer(num_layers, width), 128
    ratio = 4 * DEVICE_PER_S / (6 * TOKENS * WIRE_PER_S)

    def found(strategy: Strategy, config) -> Forecast:
        return forecast(work, consumer, strategy, config, 32.0)

    allreduce = find_strategy("allreduce")
    every_step = found(allreduce, allreduce.config(workers=2))
    alone = forecast(work, consumer, allreduce, allreduce.config(workers=1), 16.0)
    parts = every_step.breakdown
    assert parts.communication_s / parts.compute_s == pytest.approx(ratio, rel=0.03)
    # "0.16 times one": but for what hides behind backward.
    assert every_step.samples_per_s / alone.samples_per_s == pytest.approx(0.16, abs=0.015)
    rounds = found(STRATEGY, Local(sync_every=num_steps))
    # One worker's payload goes up, and then the other's comes down, which is as much as a ring
    # sends in both directions at once: once on each of the two on average.
    exposed = (parts.exposed_s + parts.hidden_s) / num_steps
    assert rounds.breakdown.exposed_s == pytest.approx(exposed, rel=0.05)
    expected = 2 / (1 + 2 * ratio / num_steps)
    assert rounds.samples_per_s / alone.samples_per_s == pytest.approx(expected, rel=0.05)
    assert expected > 1.65
    # Streamed in the steps beside it, next to nothing of it shows.
    streamed = found(STRATEGY, Local(sync_every=num_steps, fragments=4, delay=12))
    assert streamed.samples_per_s / alone.samples_per_s > 1.95
