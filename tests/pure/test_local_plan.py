"""Plans of strategy local against closed forms: rounds, exchanges, uneven workers, fragments."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from boxes import after, at_speeds, box, chain, codec_speed, link, named
from findings import numbers
from paceline.core.cost import Roofline, layer_times
from paceline.core.machine import Machine
from paceline.core.rounds import AVERAGE, OuterStep, Rounds
from paceline.core.simulate import period
from paceline.core.strategy import StepsToLoss, Window
from paceline.core.workload import Cost, Layer, Parameter, Workload
from paceline.planner import Forecast, forecast, search
from paceline.planner.forecast import of_learning
from paceline.planner.search import rank
from paceline.records.result import PlanRow
from paceline.strategies import find_strategy
from paceline.strategies.local import STRATEGY, loss_table
from paceline.strategies.local.config import Local
from paceline.strategies.local.loss_table import Row, rows, steps_to_loss
from paceline.strategies.local.plan import (
    fragments_of,
    inner_step,
    memory,
    plan,
    turns,
)
from refusals import refused

NBYTES = 4000  # of the parameters
PACE = 1e3  # bytes per second between two hosts
STEP_S = 20.0  # seconds of an inner step
CODECS = {"codecs": {"eightbit": codec_speed(1e3, 4e3)}}


def hosts(speeds=(1.0, 1.0), latency_s: float = 0.0, kind: str = "cpu", **facts) -> Machine:
    """Return hosts with one device each, of these Gflop/s, linked to the first host."""
    names = "abcdefgh"[: len(speeds)]
    links = [link("a", other, PACE, latency_s) for other in names[1:]]
    if kind == "gpu":
        links += [link(f"gpu{i}", name, 1e12) for i, name in enumerate(names)]
    return at_speeds(*speeds, kinds=[kind] * len(speeds), hosts=names, links=links, **facts)


def two_layers(seconds: float = STEP_S) -> Workload:
    """Return two equal layers; memory is so fast that updates take no time."""
    return chain((seconds / 2, NBYTES // 2), (seconds / 2, NBYTES // 2))


def round_s(machine: Machine, config: Local, work=None) -> float:
    workload = two_layers() if work is None else work
    return period(lambda n: plan(workload, machine, config, Window(n)), Roofline.of(machine), 2)


def forecast_of(machine: Machine, config: Local, work=None) -> Forecast:
    return forecast(two_layers() if work is None else work, machine, STRATEGY, config, 64.0)


def test_a_round_has_exactly_these_tasks():
    config = Local(sync_every=10, fragments=2, delay=2, codec="dynamic8")
    tasks = plan(two_layers(), hosts(device=CODECS), config, Window(2))
    own = {f"{kind}[{p}{piece}]" for kind, piece in PARTS for p in range(2)} | {
        "train[1.overlapped]"
    }
    expected = {f"{name}@worker{w}" for name in own for w in range(2)}
    expected |= {"reduce[0.0]", "reduce[1.0]"}
    # In the first round no exchange overlaps the steps before the first fragment.
    assert named(tasks) == expected
    later = {task.name.removeprefix("s1/") for task in tasks.tasks if task.id.step == 1}
    assert later == expected | {f"train[0.overlapped]@worker{w}" for w in range(2)}
    without = named(plan(two_layers(), hosts(), Local(sync_every=10), Window(1)))
    assert not any("encode" in name or "overlapped" in name for name in without)


PARTS = (("train", ""), ("encode", ".0"), ("decode", ".0"), ("step", ""))


def test_a_fragment_waits_for_all_workers_and_inner_steps_wait_for_the_previous_fragment():
    config = Local(workers=3, sync_every=10, fragments=2, delay=2)
    tasks = plan(two_layers(), hosts((1, 1, 1)), config, Window(2))
    trained = {f"s0/train[1]@worker{w}" for w in range(3)}
    assert set(after(tasks["s0/reduce[1]"])) == trained | {"s0/reduce[0]"}
    assert after(tasks["s1/train[0.overlapped]@worker2"]) == ("s0/train[1]@worker2",)
    before = {"s0/step[1]@worker2", "s1/train[0.overlapped]@worker2"}
    assert set(after(tasks["s1/train[0]@worker2"])) == before


@given(st.integers(1, 400), st.integers(1, 12), st.integers(0, 60), st.integers(1, 999))
def test_turns_hold_all_inner_steps_and_overlap_as_many_as_fit(sync_every, fragments, delay, count):
    try:
        config = Local(sync_every, fragments, delay)
    except ValueError:
        return
    found = turns(config, count)
    assert sum(map(sum, found)) == count
    sizes = [sum(turn) for turn in found]
    assert max(sizes) - min(sizes) <= 2 + count / sync_every  # rounded, scaled, rounded
    most = round(delay * count / sync_every)
    assert all(turn.overlapped == min(most, sum(turn)) for turn in found)


def test_an_inner_step_takes_the_sum_of_its_layers_and_its_update():
    # One layer is bound by arithmetic, the other by memory traffic; both have calls.
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


@pytest.mark.parametrize(
    ("machine", "config", "step_s", "shown_s"),
    [
        # Each of two workers sends half of the bytes twice; both send at the same time.
        *[
            (hosts(latency_s=0.25), Local(sync_every=n), STEP_S, NBYTES / PACE + 2 * 0.25)
            for n in (1, 7, 1000)
        ],
        # A single worker exchanges nothing.
        (hosts((1,)), Local(workers=1, sync_every=3), STEP_S, 0),
        # A delay hides the exchange of 4 s during its steps of 1 s.
        *[
            (hosts(), Local(sync_every=20, delay=delay), 1.0, shown_s)
            for delay, shown_s in ((0, 4), (3, 1), (4, 0), (12, 0))
        ],
        # Half of the model takes 2 s, which 2 steps of 1 s hide; the whole model takes 4 s.
        (hosts(), Local(sync_every=20, fragments=1, delay=2), 1.0, 2),
        (hosts(), Local(sync_every=20, fragments=2, delay=2), 1.0, 0),
    ],
)
def test_a_round_takes_its_steps_and_the_exposed_exchange(machine, config, step_s, shown_s):
    work, expected = two_layers(step_s), config.sync_every * step_s + shown_s
    assert round_s(machine, config, work) == pytest.approx(expected, rel=1e-4)
    found = forecast_of(machine, config, work)
    assert found.step_s == pytest.approx(expected / config.sync_every, rel=1e-4)
    assert found.samples_per_s == pytest.approx(64 / found.step_s)
    if len(machine.devices) == 2:
        assert found.breakdown.train_s == pytest.approx(step_s, rel=1e-4)
        assert found.breakdown.exposed_s == pytest.approx(shown_s / config.sync_every, abs=1e-4)
        assert found.wire_nbytes == pytest.approx(NBYTES / config.sync_every)


def test_messages_that_use_the_workers_cores_do_not_overlap_steps():
    machine = box("cpu", "cpu", links=[link("h", "h", PACE, uses_cores=True)])
    for delay in (0, 3):
        found = round_s(machine, Local(sync_every=10, delay=delay))
        assert found >= 10 * STEP_S + NBYTES / PACE


def test_layers_with_parameters_are_dealt_to_fragments_in_turn():
    work, bare = chain(*[(1.0, 4)] * 5), Layer("bare", (), 0, Cost(), Cost())
    order = tuple(reversed(range(6)))
    between = replace(work, layers=(work.layers[0], bare, *work.layers[1:]), backward_order=order)
    dealt = fragments_of(between, Local(fragments=2))
    assert [[layer.name for layer in one] for one in dealt] == [["l0", "l2", "l4"], ["l1", "l3"]]


def test_the_planner_plans_uneven_workers_with_equal_and_balanced_batches():
    def found(machine: Machine) -> list[Forecast]:
        def work(samples: int) -> Workload:
            return replace(two_layers(STEP_S * samples / 8), batch_size=samples)

        return list(search(work, machine, [STRATEGY], 16, 2))

    balanced, equal = found(hosts((4.0, 1.0)))
    assert (balanced.is_balanced, equal.is_balanced) == (True, False)
    times = (100 * 20 + 4) / (40 * 20 + 4)
    assert numbers(balanced.notes[0]) == [round(times, 2)]
    assert balanced.samples_per_s / equal.samples_per_s == pytest.approx(times)
    assert [one.is_balanced for one in found(hosts())] == [False]


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_codecs_run_on_cpu_workers_or_on_the_hosts_of_gpus_and_save_bytes(kind):
    facts = {"device" if kind == "cpu" else "host": CODECS}
    machine, config = hosts(kind=kind, **facts), Local(sync_every=10, codec="dynamic8")
    # A quarter of the bytes, and a scale of 4 bytes per half. Encoding 1000 values takes 1 s; each
    # worker decodes the other's half and both sums.
    expected = 10 * STEP_S + 2 * 504 / PACE + 1 + 1.5 * 1000 / 4e3
    assert round_s(machine, config) == pytest.approx(expected, rel=1e-4)
    names = named(plan(two_layers(), machine, config, Window(1)))
    assert {"encode[0.0]@worker0", "decode[0.0]@worker0"} <= names
    assert ({"d2h[0]@worker0", "h2d[0]@worker0"} <= names) is (kind == "gpu")
    # Hosts take the outer steps, but are no devices in the breakdown.
    found = forecast_of(machine, config)
    assert found.breakdown.step_s == pytest.approx(found.step_s)
    with refused("codec") as caught:
        plan(two_layers(), hosts(kind=kind), config, Window(1))
    assert f"{next(iter(facts))}s.codecs.eightbit" in caught.value.hint


def test_an_outer_step_reads_and_writes_nine_vectors_in_the_hosts_memory():
    slow = hosts(host={"memory_bandwidth_bytes_per_s": 1e3})
    tasks = plan(two_layers(), slow, Local(sync_every=10), Window(1))
    assert Roofline.of(slow).seconds(tasks["s0/step[0]@worker0"]) == pytest.approx(9 * 4)
    # Two workers of a host share its memory.
    memory_pace = {"memory_bandwidth_bytes_per_s": 1e3}
    shared = box("cpu", "cpu", links=[link("h", "h", PACE)], host=memory_pace)
    tasks = plan(two_layers(), shared, Local(sync_every=10), Window(1))
    assert Roofline.of(shared).seconds(tasks["s0/step[0]@worker0"]) == pytest.approx(2 * 9 * 4)


def test_large_rounds_cost_no_more_to_plan():
    sizes = {len(plan(two_layers(), hosts(), Local(sync_every=h), Window(2))) for h in (2, 10**9)}
    assert len(sizes) == 1


def test_memory_holds_a_replica_on_the_device_and_two_vectors_on_its_host():
    needed = memory(two_layers(), hosts(), Local())
    assert needed["a"] == needed["b"] == 2 * NBYTES
    assert needed["cpu0"] == needed["cpu1"] >= 3 * NBYTES


@pytest.mark.parametrize(
    ("machine", "config", "field"),
    [
        (hosts(), Local(fragments=3), "fragments"),
        (hosts(), Local(workers=3), "workers"),
        (box("cpu", "cpu", hosts="ab"), Local(), "machine box"),
        (hosts(), Local(codec="threshold:0.1"), "codec"),
    ],
)
def test_unsupported_configurations_are_refused(machine, config, field):
    with refused(field):
        plan(two_layers(), machine, config, Window(1))


MILLION = SimpleNamespace(num_parameters=1_000_000)
ROW = Row(
    parameters=1_000_000,
    sync_every=100,
    delay=0,
    outer="auto",
    workers=2,
    bits=4,
    num_steps=600,
    steps=1.2,
    low=1.1,
    high=1.4,
    seeds=3,
    model="a GPT",
)


@pytest.mark.parametrize(
    ("config", "row", "is_near"),
    [
        *[(Local(), row, True) for row in ({}, {"sync_every": 200}, {"workers": 4, "bits": 32})],
        (Local(codec="dynamic8"), {"sync_every": 50}, True),
        (Local(codec="dynamic4"), {"parameters": 4_000_000}, True),
        *[(Local(delay=20), {"sync_every": every, "delay": 10}, every == 50) for every in (50, 51)],
        *[(Local(), {"sync_every": number}, False) for number in (201, 49)],
        *[(Local(), row, False) for row in ({"workers": 5}, {"parameters": 4_000_001})],
        (Local(codec="onebit"), {}, False),
        (Local(codec="dynamic4"), {"bits": 8}, False),
        (Local(codec="threshold:0.1@0.1"), {}, False),
        (Local(outer_learning_rate=1.0), {}, False),  # another outer step
        *[
            (Local(outer=one), {"outer": "average"}, one == "average")
            for one in ("auto", "average")
        ],
        (Local(mixing=0.5), {}, False),
        (Local(workers=1), {"workers": 1}, False),
    ],
)
def test_steps_to_a_loss_are_known_near_measured_configurations(monkeypatch, config, row, is_near):
    monkeypatch.setattr(loss_table, "rows", lambda: [replace(ROW, **row)])
    found = steps_to_loss(MILLION, config)
    assert (found is not None) is is_near


def test_steps_to_a_loss_are_a_range_over_all_near_rows(monkeypatch):
    other = replace(ROW, sync_every=50, steps=1.0, low=0.9, high=1.2, model="an MLP", seeds=1)
    monkeypatch.setattr(loss_table, "rows", lambda: [ROW, other])
    found = steps_to_loss(MILLION, Local())
    assert (found.median, found.low, found.high) == pytest.approx((1.1, 0.9, 1.4))
    assert numbers(of_learning(found))[:3] == [1.1, 0.9, 1.4]
    assert all(row.low <= row.steps <= row.high for row in rows())


@pytest.mark.parametrize(
    ("seconds", "sync_every"), [(STEP_S, 10), (100 * STEP_S, 1), (None, Local.sync_every)]
)
def test_a_search_chooses_the_rounds_that_reach_a_loss_first(monkeypatch, seconds, sync_every):
    # An exchange takes as long as 0.2 or 0.002 steps; the third model has no rows.
    known = {1: 1.0, 10: 1.1}
    own = dict.fromkeys(("low", "steps", "high"), 1.0) | {"parameters": NBYTES // 4}
    table = [
        replace(ROW, **own | {"sync_every": length, "steps": steps})
        for length, steps in known.items()
    ]
    monkeypatch.setattr(loss_table, "rows", lambda: () if seconds is None else tuple(table))
    found = search(lambda _: two_layers(seconds or STEP_S), hosts(), [STRATEGY], 2, 2)
    assert found[0].config.sync_every == sync_every
    assert len({one.codec for one in found}) == len(found)


@pytest.mark.parametrize("known", [None, StepsToLoss(1.5, 1.2, 1.9, "a model")])
def test_strategies_that_change_training_are_ranked_last_by_the_time_to_a_loss(known):
    machine = box("cpu", "cpu", hosts="ab", links=[link("a", "b", 1e6)])
    local = replace(STRATEGY, planning=replace(STRATEGY.planning, steps_to_loss=lambda *_: known))
    strategies = [local, find_strategy("allreduce")]
    found = rank(search(lambda _: chain((1.0, 4_000_000)), machine, strategies, 8, workers=2))
    assert [one.strategy for one in found] == ["allreduce"] * (len(found) - 1) + ["local"]
    last = found[-1]
    assert last.samples_per_s > found[0].samples_per_s  # because the link is slow
    assert last.learnt_samples_per_s == (last.samples_per_s / 1.5 if known else 0.0)
    row = PlanRow.of(last)
    assert (row.is_same_training, row.steps_to_loss) == (False, known)
    assert of_learning(known) in row.explanation


@pytest.mark.parametrize(
    ("rounds", "workers", "num_rounds", "expected"),
    [
        (Rounds(sync_every=2), 2, 750, AVERAGE),
        (Rounds(sync_every=30), 1, 50, AVERAGE),
        (Rounds(sync_every=30), 2, 50, OuterStep(0.9, 0.4)),
        (Rounds(sync_every=30), 2, None, OuterStep(0.9, 0.4)),
        # Halfway from 100 to 5000 rounds on a logarithmic scale.
        (Rounds(sync_every=30), 2, 5e5**0.5, OuterStep(0.75, 0.65)),
        (Rounds(sync_every=500), 8, 5000, OuterStep(0.8, 0.9)),
        (Rounds(sync_every=500), 8, 10**6, OuterStep(0.8, 0.9)),
        (Rounds(sync_every=1, outer="nesterov"), 2, 50, OuterStep(0.9, 0.4)),
        (Rounds(sync_every=500, outer="average"), 2, 5000, AVERAGE),
        (Rounds(outer="average", outer_momentum=0.3), 2, 50, OuterStep(1.0, 0.3)),
        (Rounds(outer_learning_rate=0.1), 2, 50, OuterStep(0.1, 0.4)),
    ],
)
def test_the_outer_step_follows_the_run(
    rounds: Rounds, workers: int, num_rounds: float | None, expected: OuterStep
) -> None:
    found = rounds.outer_step(workers, rounds.sync_every, num_rounds)
    assert found == pytest.approx(expected)
