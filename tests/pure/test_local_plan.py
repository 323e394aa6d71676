"""The plan of strategy local against closed forms: rounds, exchanges, uneven workers, fragments."""

from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from boxes import FLOPS_PER_S, after, box, chain, codec_speed, link, named
from findings import numbers
from paceline.core.cost import Roofline, layer_times
from paceline.core.machine import Machine
from paceline.core.plan import Kind
from paceline.core.simulate import period
from paceline.core.strategy import Window
from paceline.core.workload import Cost, Layer, Parameter, Workload
from paceline.planner import Forecast, forecast, search
from paceline.records.result import PlanRow
from paceline.strategies import find_strategy
from paceline.strategies.local import STRATEGY
from paceline.strategies.local.config import Local
from paceline.strategies.local.loss_table import LossRow, caveat, described, loss_rows
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
from refusals import refused

NBYTES = 4000  # of the model's parameters
PACE = 1e3  # bytes a second between two hosts
STEP_S = 20.0  # of an inner step
CODECS = {"codecs": {"eightbit": codec_speed(1e3, 4e3)}}


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
    config = Local(sync_every=10, fragments=2, delay=2, codec="dynamic8")
    tasks = plan(two_layers(), hosts(device=CODECS), config, Window(2))
    fragment = {"train[{}]", "reduce[{}.gradient]", "encode[{}]", "send[{}.up]", "decode[{}.hub]"}
    fragment |= {"send[{}.down]", "decode[{}]", "step[{}]"}
    own = {name.format(p) for name in fragment for p in range(2)} | {"train[1.beside]"}
    expected = {f"{name}@worker{w}" for name in own for w in range(2)} | {"reduce[0]", "reduce[1]"}
    # In the first round nothing travels beside the steps before the first fragment.
    assert named(tasks) == expected
    later = {task.name.removeprefix("s1/") for task in tasks.tasks if task.step == 1}
    assert later == expected | {f"train[0.beside]@worker{w}" for w in range(2)}
    without = named(plan(two_layers(), hosts(), Local(sync_every=10), Window(1)))
    assert not any("encode" in name or "beside" in name for name in without)


def test_a_fragment_waits_for_all_workers_and_inner_steps_for_the_fragment_before():
    config = Local(workers=3, sync_every=10, fragments=2, delay=2)
    tasks = plan(two_layers(), hosts((1, 1, 1)), config, Window(2))
    taken = {f"s0/decode[1.hub]@worker{w}" for w in range(3)}  # by the hub
    for name in ("s0/send[1.down]@worker2", "s0/reduce[1]"):
        assert set(after(tasks[name])) == taken
    assert after(tasks["s1/train[0.beside]@worker2"]) == ("s0/reduce[1.gradient]@worker2",)
    before = {"s0/step[1]@worker2", "s1/train[0.beside]@worker2"}
    assert set(after(tasks["s1/train[0]@worker2"])) == before
    # Nobody waits for what the hub does for itself.
    assert not any("s0/reduce[1]" in after(task) for task in tasks.tasks)


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


# Three workers behind one link, on a host of their own.
SHARED = box(*["cpu"] * 4, hosts="abbb", links=[link("a", "b", PACE)], host={"cores": 4})
PAYLOAD_S = NBYTES / PACE


@pytest.mark.parametrize(
    ("machine", "config", "step_s", "shown_s"),
    [
        # The worker at the hub sends nothing over the network; the other one's payload goes up, and
        # then the first one's comes down.
        *[
            (hosts(latency_s=0.25), Local(sync_every=n), STEP_S, 2 * (PAYLOAD_S + 0.25))
            for n in (1, 7, 1000)
        ],
        # Three on hosts of their own beside the hub's: links of their own, up one, and down three.
        (hosts((1, 1, 1, 1)), Local(4, sync_every=5), STEP_S, 4 * PAYLOAD_S),
        # Behind one link they share it: three times three come down, one worker after the other,
        # and but for the last one's all payloads are up before that one is.
        (SHARED, Local(4, sync_every=5), STEP_S, (9 + 1) * PAYLOAD_S),
        # With the hub on theirs, it is one up, and one time three down.
        (SHARED, Local(4, sync_every=5, hub="b"), STEP_S, (1 + 3) * PAYLOAD_S),
        # One worker alone exchanges with a hub that sends nothing back.
        (hosts((1,)), Local(1, sync_every=3), STEP_S, 0),
        # A delay hides 4 s up and 4 s down as far as its steps last.
        *[
            (hosts(), Local(sync_every=20, delay=delay), 1.0, shown_s)
            for delay, shown_s in ((0, 8), (3, 5), (8, 0), (12, 0))
        ],
        # Each half takes 2 s up and 2 down: 4 steps of a second hide it, where the whole needs 8.
        (hosts(), Local(sync_every=20, fragments=1, delay=4), 1.0, 4),
        (hosts(), Local(sync_every=20, fragments=2, delay=4), 1.0, 0),
        # A wire takes 4 s for a payload of 4,000 bytes, and the hub's cores 8 s. Two workers on
        # other hosts send one; each gets those of two, one after the other. The later one has the
        # hub to itself when it sends again.
        *[
            (hosts((1, 1, 1), host={"message_bytes_per_s": pace}), Local(3, 10), STEP_S, shown_s)
            for pace, shown_s in ((PACE / 2, 8 + 2 * 16), (1e12, 4 + 8))
        ],
    ],
)
def test_a_round_takes_its_steps_and_the_exchange_that_shows(machine, config, step_s, shown_s):
    work, expected = two_layers(step_s), config.sync_every * step_s + shown_s
    assert round_s(machine, config, work=work) == pytest.approx(expected, rel=1e-4)
    found = forecast(work, machine, STRATEGY, config, 64.0)
    assert found.step_s == pytest.approx(expected / config.sync_every, rel=1e-4)
    assert found.samples_per_s == pytest.approx(64 / found.step_s)
    if len(machine.devices) == 2:  # one waits while the other one sends
        shown = found.breakdown.exposed_s + found.breakdown.idle_s
        assert shown == pytest.approx(shown_s / config.sync_every, abs=1e-4)
        assert found.wire_nbytes == pytest.approx(NBYTES / config.sync_every)
        # Fragments send as many bytes in a round, in smaller parts.
        tasks = plan(work, machine, config, Window(1)).tasks
        sent = [t.cost.nbytes for t in tasks if (t.kind, t.worker) == (Kind.SEND, 1)]
        assert max(sent) == NBYTES / config.fragments


def test_the_parts_of_a_forecast_are_those_of_one_inner_step():
    found = forecast_of(hosts(), Local(sync_every=10))
    parts = found.breakdown
    assert parts.step_s == pytest.approx(found.step_s) == pytest.approx(20.8)
    assert parts.train_s == pytest.approx(20)
    # One worker sends for 8 of 208 s, and the other one waits meanwhile.
    assert (parts.exposed_s, parts.idle_s) == pytest.approx((0.4, 0.4))
    assert found.link_nbytes == pytest.approx({"a->b": 400, "b->a": 400})
    assert found.link_busy == pytest.approx(4 / 208)
    assert numbers(found.why)[:2] == [96, 2]


def test_messages_that_take_a_workers_cores_hide_beside_others_work_only():
    # Four messages follow one another; two are a worker's own, whose cores carry them.
    machine = box("cpu", "cpu", links=[link("h", "h", PACE, uses_cores=True)])
    waiting, beside = (round_s(machine, Local(sync_every=10, delay=delay)) for delay in (0, 3))
    assert waiting == pytest.approx(10 * STEP_S + 4 * NBYTES / PACE)
    assert waiting > beside > 10 * STEP_S + 2 * NBYTES / PACE


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


def test_layers_without_parameters_are_in_no_fragment():
    work = two_layers()
    bare = Layer("bare", (), 0, Cost(), Cost())
    between = replace(work, layers=(work.layers[0], bare, work.layers[1]), backward_order=(2, 1, 0))
    dealt = fragments_of(between, Local(fragments=2))
    assert [[layer.name for layer in one] for one in dealt] == [["l0"], ["l1"]]


def test_the_planner_plans_equal_and_balanced_parts_of_uneven_workers_and_says_the_gain():
    def found(machine: Machine) -> list[Forecast]:
        def work(samples: int) -> Workload:
            return replace(two_layers(STEP_S * samples / 8), batch_size=samples)

        return list(search(work, machine, [STRATEGY], 16, 2))

    balanced, equal = found(hosts((4.0, 1.0)))
    assert (balanced.is_balanced, equal.is_balanced) == (True, False)
    times = (100 * 20 + 8) / (40 * 20 + 8)
    assert numbers(balanced.notes[0]) == [round(times, 2)]
    assert balanced.samples_per_s / equal.samples_per_s == pytest.approx(times)
    assert [one.is_balanced for one in found(hosts())] == [False]


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


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_codecs_take_the_devices_or_the_hosts_of_gpus_and_shrink_the_wire(kind):
    facts = {"device" if kind == "cpu" else "host": CODECS}
    machine, config = hosts(kind=kind, **facts), Local(sync_every=10, codec="dynamic8")
    # A quarter of the bytes, and 4 more; 1 s to encode 1000 values and 0.5 to decode two payloads.
    expected = 10 * STEP_S + 2 * 1004 / PACE + 1 + 0.5
    assert round_s(machine, config) == pytest.approx(expected)
    names = named(plan(two_layers(), machine, config, Window(1)))
    assert {"encode[0]@worker0", "decode[0]@worker0"} <= names
    assert ({"d2h[0]@worker0", "h2d[0]@worker0"} <= names) is (kind == "gpu")
    # Hosts, in whose memory the outer steps are taken, are no devices of the breakdown.
    found = forecast_of(machine, config)
    assert found.breakdown.step_s == pytest.approx(found.step_s)
    with refused("codec") as caught:
        plan(two_layers(), hosts(kind=kind), config, Window(1))
    assert f"{next(iter(facts))}s.codecs.eightbit" in caught.value.problem


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


def test_a_lone_core_takes_the_steps_of_hub_and_worker_one_after_the_other():
    # Each vector of 4,000 bytes that is read or written takes 4 s of the host's memory.
    lone = box("cpu", "cpu", host={"memory_bandwidth_bytes_per_s": 1e3, "cores": 1})
    passed, added, stepped, of_hub, made, taken = 2 * 4, 3 * 4, 7 * 4, 8 * 4, 4 * 4, 3 * 4
    # Both get what the other sent, the hub takes its step, and both theirs: the second is the last.
    back_s = 2 * passed + of_hub + 2 * (added + stepped)
    # When it has trained, 28 s after the first one, the hub still looks at the payload of that.
    waiting = made + passed + taken - stepped
    out_s = waiting + made + passed + taken
    config = Local(sync_every=10)
    assert round_s(lone, config) == pytest.approx(back_s + 10 * STEP_S + out_s)
    hub = plan(two_layers(), lone, config, Window(1))["s0/reduce[0]"]
    assert "h/0/core" in map(str, hub.on)


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
    ("machine", "config", "field"),
    [
        (hosts(), Local(fragments=3), "fragments"),
        (hosts(), Local(workers=3), "workers"),
        (hosts(), Local(hub="z"), "hub"),
        (box("cpu", "cpu", hosts="ab"), Local(), "machine box"),
        (hosts(), Local(codec="threshold:0.1"), "codec"),
    ],
)
def test_what_does_not_fit_is_refused(machine, config, field):
    with refused(field):
        plan(two_layers(), machine, config, Window(1))


ROW = LossRow(
    sync_every=100,
    workers=2,
    bits=8,
    difference=0.012,
    spread=0.004,
    seeds=3,
    model="gpt-10m",
    tokens=20_000_000,
)
EIGHT_BITS = Local(sync_every=100, codec="dynamic8")


def is_known(config: Local, **row: object) -> bool:
    """Whether a row of measured losses is near a configuration: its range is in the caveat."""
    return "+0.008" in described(config, [replace(ROW, **row)])


@pytest.mark.parametrize(
    ("config", "row", "is_near"),
    [
        *[(EIGHT_BITS, row, True) for row in ({}, {"sync_every": 200}, {"workers": 1})],
        (EIGHT_BITS, {"sync_every": 50, "workers": 4}, True),
        *[(EIGHT_BITS, {"sync_every": number}, False) for number in (201, 49)],
        *[(EIGHT_BITS, row, False) for row in ({"workers": 5}, {"bits": 4}, {"bits": 32})],
        (EIGHT_BITS, {"outer_learning_rate": 1.0}, False),  # another outer step
        (EIGHT_BITS, {"outer_momentum": 0.0}, False),
        (Local(), {"bits": 32}, True),
        (Local(outer_learning_rate=1), {"bits": 32}, False),
        (Local(outer_momentum=0), {"bits": 32}, False),
        (Local(codec="auto"), {}, True),  # as what it encodes with
    ],
)
def test_losses_are_known_of_rounds_up_to_twice_or_half_with_as_many_bits(config, row, is_near):
    assert is_known(config, **row) is is_near


def test_a_known_loss_is_a_range_over_all_seeds_and_nothing_is_promised_without_one():
    assert loss_rows()
    assert all(isinstance(row, LossRow) for row in loss_rows())
    assert numbers(caveat(Local(workers=64, sync_every=7, codec="onebit"))) == [7, 64, 1]
    better = replace(ROW, sync_every=50, difference=-0.01, spread=0.002)
    for rows, found in (([ROW], (0.008, 0.016)), ([ROW, better], (-0.012, 0.016))):
        assert numbers(described(EIGHT_BITS, rows))[3:5] == list(found)
    with refused("codec"):
        caveat(Local(codec="threshold:0.1"))


@pytest.mark.parametrize(
    "wrong", [{"bits": 0}, {"spread": -1.0}, {"difference": float("nan")}, {"steps": 3}]
)
def test_a_row_that_says_nothing_is_refused(wrong):
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(LossRow).validate_python(asdict(ROW) | wrong)
    assert caught.value.errors()[0]["loc"] == tuple(wrong)


def test_every_forecast_of_local_has_the_caveat():
    machine = box("cpu", "cpu", hosts="ab", links=[link("a", "b", 1e6)])
    strategies = [find_strategy("allreduce"), STRATEGY]
    found = search(lambda _: chain((1.0, 4_000_000)), machine, strategies, 8, workers=2)
    assert {one.strategy for one in found} == {"allreduce", "local"}
    assert found[0].strategy == "local"  # on such a link
    for one in found:
        said = caveat(one.config) in one.notes if one.strategy == "local" else one.notes
        assert bool(said) is (one.strategy == "local")
    assert caveat(found[0].config) in PlanRow.of(found[0]).explanation
