"""Searches: tried and refused plans, numbers of workers, chunks, groups of layers, sweeps."""

import itertools
from collections import Counter
from dataclasses import replace

import pytest

from boxes import at_speeds, box, chain, codec_speed, link, ring
from findings import numbers
from paceline.core.chunks import candidates
from paceline.core.cost import Roofline, compute_lane
from paceline.core.errors import InvalidInput
from paceline.core.machine import Machine
from paceline.core.plan import Kind, Lane, Resource
from paceline.core.simulate import makespan_s, period
from paceline.core.strategy import Planning, Strategy, Window, codec_fields
from paceline.core.timeline import Span, Timeline
from paceline.core.workload import Workload
from paceline.planner import Ranking, search
from paceline.planner.drawing import drawing
from paceline.planner.grouping import Windows, with_best_chunk
from paceline.planner.search import placements, worker_counts
from paceline.planner.steady import steady
from paceline.planner.sweep import chart, parse_range, sweep
from paceline.records.built_in import recorded
from paceline.records.machine_file import find_machine
from paceline.records.result import RankingRows
from paceline.strategies import EXCHANGES, STRATEGIES, find_exchange
from paceline.strategies.subbatch.config import SubBatch
from paceline.strategies.subbatch.plan import plan, sizes
from refusals import refused
from subbatches import BATCH, NET

ALLREDUCE = find_exchange("allreduce")
SECONDS = 8.0  # backward of a batch of 8


def workload(samples: int) -> Workload:
    """One layer, whose time is proportional to samples, with 4 MB of gradients."""
    return replace(chain((SECONDS * samples / 8, 4_000_000)), batch_size=samples)


def ranked(machine: Machine, *strategies: Strategy, workers: int | None = None) -> Ranking:
    return search(workload, machine, strategies or [ALLREDUCE], 8, workers)


def joined(kinds: list[str], nbytes_per_s: float, **facts) -> Machine:
    return box(*kinds, links=[link("h", "h", nbytes_per_s)], **facts)


@pytest.mark.parametrize(
    ("num_devices", "nbytes_per_s", "asked", "worth"),
    [
        (4, 4e6, None, 2),  # 4 + 2 s; 3 take 3 + 4, 4 take 2 + 6
        (2, 4e7, None, 2),  # 4 + 0.2 s instead of 8 s
        (2, 1e5, None, 1),  # 84 s instead of 8 s
        # Four workers gain nothing (4 + 1 and 2 + 3 s), less than 2 %, or lose.
        (4, 8e6, None, 2),
        (4, 8e6 / 0.97, None, 2),  # 4.97 and 4.91 s
        (4, 8e6 / 1.05, None, 2),  # 5.05 and 5.15 s
        # For a requested number `worth` is None, because other numbers are not tried.
        (2, 1e5, 2, None),
        (4, 1e9, 4, None),
        (1, 4e6, 1, 1),
    ],
)
def test_more_workers_gain_until_the_exchange_costs_more_than_they_save(
    num_devices, nbytes_per_s, asked, worth
):
    found = ranked(joined(["cpu"] * num_devices, nbytes_per_s), workers=asked)
    one = found.alone or found.best_of[1]
    assert {each.workers for each in found} == ({asked} if asked else {*range(1, num_devices + 1)})
    # A sample takes a second. In a ring each of n workers sends 2 (n - 1) / n of 4 MB, and all
    # messages share one link.
    for workers, forecast in found.best_of.items():
        expected = -(-8 // workers) + 2 * (workers - 1) * 4e6 / nbytes_per_s
        assert forecast.step_s - (one.step_s - SECONDS) == pytest.approx(expected)
    assert found.worth == worth


def test_any_number_of_workers_can_be_given_and_some_of_many_are_searched():
    twenty = box(*["cpu"] * 20)
    assert worker_counts(twenty, 64, None) == [1, 2, 3, 4, 5, 6, 7, 8, 16, 20]
    assert worker_counts(twenty, 6, None) == [1, 2, 3, 4, 5, 6]
    assert worker_counts(twenty, 64, 9) == [9]
    assert worker_counts(twenty, 64, 40, shares_devices=True) == [40]
    for wanted, batch_size in ((21, 64), (7, 6), (0, 64)):
        with refused("workers"):
            worker_counts(twenty, batch_size, wanted)


@pytest.mark.parametrize(
    ("name", "hosts", "workers", "kernels", "codecs"),
    [
        ("allreduce", "ab", 2, (), [None]),
        ("allreduce", "ab", 2, ("cast",), [None, "half", "bfloat16"]),
        ("allreduce", "ab", 2, ("eightbit", "onebit"), [None, "dynamic8", "onebit"]),
        ("host", "ab", 2, ("eightbit",), [None, "dynamic8"]),
        ("tree", "ab", 2, ("eightbit",), [None]),
        # On one host, strategy host encodes nothing; a single worker exchanges nothing.
        ("host", "hh", 2, ("eightbit",), [None]),
        ("allreduce", "hh", 2, ("eightbit",), [None, "dynamic8"]),
        ("allreduce", "hh", 1, ("eightbit",), [None]),
    ],
)
def test_codecs_that_encode_something_at_a_known_speed_are_forecast(
    name, hosts, workers, kernels, codecs
):
    speeds = {"codecs": dict.fromkeys(kernels, codec_speed(1e9, 1e9))}
    joined = [link(hosts[0], hosts[1], 1e6, 1e-3)]
    machine = box("cpu", "cpu", hosts=hosts, links=joined, device=speeds)
    found = Counter(one.codec for one in ranked(machine, find_exchange(name), workers=workers))
    assert found == Counter(codecs)


def gpus(count: int, nbytes_per_s: float) -> Machine:
    links = [link(f"gpu{i}", "h", nbytes_per_s) for i in range(count)]
    return box(*["gpu"] * count, links=links)


@pytest.mark.parametrize("workers", [None, 2])
def test_the_gain_of_workers_ignores_strategies_that_change_training(workers):
    """A faster asynchronous strategy is no gain of more workers."""
    found = ranked(gpus(2, 4e6), ALLREDUCE, STRATEGIES["hogbatch"], workers=workers)
    first, one = found[0], found.alone or found.best_of[1]
    assert (first.strategy, first.workers) == ("allreduce", 2)
    assert max(found, key=lambda each: each.samples_per_s).strategy == "hogbatch"
    assert RankingRows.of(found).alone_samples_per_s == one.samples_per_s
    for each in found:
        differs = each.strategy == "hogbatch" and each.workers > 1
        assert each.is_same_training is not differs
        assert bool(each.notes) is differs


def test_a_plan_without_enough_memory_is_refused_and_needs_no_comparison():
    """A whole batch does not fit into one device, but half of it does."""
    machine = joined(["cpu"] * 2, 4e6, device={"memory_bytes": 12_000_000 + 1000})

    def kept(samples: int) -> Workload:
        layers = tuple(replace(one, kept_nbytes=200 * samples) for one in workload(samples).layers)
        return replace(workload(samples), layers=layers)

    for asked in (2, None):
        found = search(kept, machine, [ALLREDUCE], 8, asked)
        assert [one.workers for one in found] == [2]
        refused_ones = [(one.workers, one.why.split()[0]) for one in found.refused]
        assert refused_ones == ([] if asked else [(1, "cpu0")])
        assert found.worth is None
        assert RankingRows.of(found).alone_samples_per_s is None


def test_all_variants_are_forecast_and_refusals_have_their_reason():
    def unsuited(*_):
        raise InvalidInput("model chain", "no layer can be split")

    def variants(workers: int) -> list:
        return [ALLREDUCE.config(workers=workers, bucket_mb=size) for size in (1, 25)]

    picky = Strategy("picky", ALLREDUCE.config, Planning(unsuited))
    both = replace(ALLREDUCE, name="both", planning=replace(ALLREDUCE.planning, variants=variants))
    found = ranked(joined(["cpu"] * 2, 4e6), both, picky, workers=2)
    assert {(one.strategy, one.config.bucket_mb) for one in found} == {("both", 1), ("both", 25)}
    assert [(one.strategy, one.workers, one.why) for one in found.refused] == [
        ("picky", 2, "model chain: no layer can be split")
    ]


def test_efficiency_is_against_what_the_devices_do_alone_and_the_fastest_are_found():
    pair = ranked(joined(["cpu"] * 2, 4e6), workers=2)[0]
    # A device alone takes 4 s for its 4 samples; together they take 2 s longer.
    update_s = pair.step_s - 6
    assert pair.efficiency == pytest.approx((4 + update_s) / (6 + update_s))
    best = ranked(at_speeds(1.0, 1.0, 8.0, links=[link("h", "h", 4e6)]))[0]
    assert (best.workers, best.devices, best.placement) == (1, ("cpu2",), "fastest")
    assert best.efficiency == pytest.approx(1)


def test_workers_may_be_spread_over_hosts_or_stay_on_one():
    def names(machine: Machine, workers: int) -> dict[str, list[str]]:
        found = placements(machine, workers)
        return {name: [device.name for device in one.devices] for name, one in found.items()}

    machine, listed = box(*["cpu"] * 4, hosts="aabb"), ["cpu0", "cpu1", "cpu2", "cpu3"]
    # The chosen devices are listed first.
    spread = ["cpu0", "cpu2", "cpu1", "cpu3"]
    assert names(machine, 2) == {"as listed": listed, "spread": spread}
    assert names(machine, 4) == {"as listed": listed}  # equal placements are tried once


WORKERS = 8


def net(samples: int) -> Workload:
    return replace(NET, batch_size=samples)


def searched(latency_s: float, **options: int) -> tuple[Machine, Ranking]:
    """Return a ring of GPUs, and its forecasts of strategy subbatch."""
    device = {"codecs": {"eightbit": codec_speed(1e4, 1e4)}}
    links = ring([f"gpu{i}" for i in range(WORKERS)], 1e4, latency_s)
    machine = box(*["gpu"] * WORKERS, links=links, device=device)
    found = search(net, machine, [STRATEGIES["subbatch"]], WORKERS * BATCH, WORKERS, options)
    return machine, found


@pytest.mark.parametrize("latency_s", [1e-6, 1.0])
def test_the_sub_batches_of_the_shortest_step_are_found_for_each_codec(latency_s: float):
    machine, found = searched(latency_s)
    assert {one.codec for one in found} == {None, "dynamic8"}

    def step_s(config: SubBatch) -> float:
        tasks = lambda n: plan(net(BATCH), machine, config, Window(n))  # noqa: E731
        return period(tasks, Roofline.of(machine), 2)

    for one in found:
        named = one.config.activations, one.config.activation_gradients, one.config.gradients
        asked = SubBatch(WORKERS, None, *named)
        shortest = min(step_s(other) for other in sizes(net(BATCH), asked))
        assert step_s(one.config) == pytest.approx(shortest, rel=1e-3)
        assert any("sub_batch=" in note for note in one.notes) == bool(one.config.sub_batch)
    # Expensive messages favour large sub-batches. A requested size is the only one tried.
    whole = (found[0].config.sub_batch or BATCH) == WORKERS * BATCH
    assert whole is (latency_s == 1.0)
    assert {one.config.sub_batch for one in searched(1.0, sub_batch=20)[1]} == {20}


LINKS = [link("a", "b", 1e6), link("a", "a", 1e9), link("b", "b", 1e9)]
FACTS = {"codecs": {"eightbit": codec_speed(4e7, 4e7)}}
SWEEP = sweep(
    lambda samples: replace(chain((0.1, 40_000_000)), batch_size=samples),
    box("cpu", "cpu", hosts="ab", links=LINKS, device=FACTS),
    *(EXCHANGES.values(), 8, parse_range("bandwidth=100M:10G")),
)


@pytest.mark.parametrize(
    ("text", "quantity", "ends"),
    [
        ("bandwidth=100M:10G", "bandwidth", (1e8, 1e10)),
        ("bandwidth=0.5Gbit/s:2 Gbit/s", "bandwidth", (5e8, 2e9)),
        ("latency=10u:1m", "latency", (1e-5, 1e-3)),
        ("latency=1ms:0.1s", "latency", (1e-3, 0.1)),
    ],
)
def test_ranges_have_units_and_evenly_spaced_values_on_a_log_scale(text, quantity, ends):
    parsed = parse_range(text)
    assert parsed.quantity == quantity
    assert (parsed.values[0], parsed.values[-1]) == pytest.approx(ends)
    ratios = [b / a for a, b in itertools.pairwise(parsed.values)]
    assert ratios == pytest.approx([ratios[0]] * len(ratios))


@pytest.mark.parametrize(
    "text",
    ["", "bandwidth", "bandwidth=1G", "bandwidth=2G:1G", "bandwidth=1G:1G", "bandwidth=0:1G",
     "width=1M:1G", "bandwidth=1X:2X", "latency=1M:1k:1", "bandwidth=-1G:1G", "latency=nan:inf"],
)  # fmt: skip
def test_an_invalid_range_is_refused(text):
    with refused("sweep"):
        parse_range(text)


def test_a_codec_is_best_on_a_slow_link_between_hosts_and_none_on_a_fast_one():
    for ranking, nbytes_per_s in ((SWEEP.rankings[0], 1e8 / 8), (SWEEP.rankings[-1], 1e10 / 8)):
        speeds = [one.bandwidth_bytes_per_s for one in ranking[0].machine.links]
        assert speeds == pytest.approx([nbytes_per_s, 1e9, 1e9])  # not the other links
    series = SWEEP.series
    plain, encoded = series["allreduce"], series["allreduce + codec"]
    assert encoded[0] > 2 * plain[0]
    assert plain[-1] > encoded[-1]
    assert list(plain) == sorted(plain)
    first, last = SWEEP.sentences[0], SWEEP.sentences[-1]
    assert first.startswith("100 Mbit/s ")
    assert first.endswith(" + codec")
    assert "10 Gbit/s" in last
    assert last.endswith(" allreduce")
    lines = chart(SWEEP).splitlines()
    names = {line.split(maxsplit=1)[1]: line.split()[0] for line in lines[18:]}
    assert set(names) == set(series)
    assert lines[0].split("|")[1].rstrip()[-1] == names["allreduce"]  # the highest curve


def test_one_whole_step_is_drawn():
    parts = [
        *[(Kind.FORWARD, "compute", 0, 1), (Kind.STEP, "compute", 1, 2)],
        *[(Kind.FORWARD, "compute", 2, 38), (Kind.BACKWARD, "compute", 38, 73)],
        *[(Kind.D2H, "d2h", 56, 65), (Kind.STEP, "compute", 73, 74)],
        *[(Kind.FORWARD, "compute", 74, 145), (Kind.STEP, "compute", 145, 146)],
    ]
    spans = [
        Span(kind, i, "", None, (Resource("gpu", Lane(lane)),), start, end)
        for i, (kind, lane, start, end) in enumerate(parts)
    ]
    first, second, legend = drawing(Timeline(spans, "predicted"), 72).splitlines()
    assert first == "gpu/compute |" + "F" * 36 + "B" * 35 + "U|"
    assert second == "    gpu/d2h |" + "." * 54 + "<" * 9 + "." * 9 + "|"
    assert legend.split()[0] == "7.2e+04"
    # Lanes beyond the first 24 are only counted.
    made = [Span(Kind.FORWARD, 0, "", i, (compute_lane(f"gpu{i}"),), 0.0, 1.0) for i in range(30)]
    lines = drawing(Timeline(made, "predicted"), 1).splitlines()
    assert (len(lines), numbers(lines[24])) == (26, [6])


def question(model: str, name: str) -> tuple[Workload, Machine]:
    """Return a recorded model, and a machine with all its devices."""
    found = recorded(model, 16)
    assert found is not None
    machine = find_machine(name)
    return found, machine.for_workers(machine.num_devices, True).reached


@pytest.mark.parametrize("strategy", ["host", "hierarchy"])
@pytest.mark.parametrize("name", ["two-hosts-gigabit", "2x2xa100-80gb+1xib-hdr"])
def test_the_best_chunk_has_the_shortest_period(name, strategy):
    work, machine = question("resnet18", name)
    known = STRATEGIES[strategy]
    asked, prices = known.config(workers=machine.num_devices), Roofline.of(machine)

    def step_s(size: int) -> float:
        config = replace(asked, chunk=size)
        tasks = lambda n: known.planning.plan(work, machine, config, Window(n))  # noqa: E731
        return period(tasks, prices, 1)

    seconds = {size: step_s(size) for size in candidates(len(work.layers))}
    found = with_best_chunk(work, machine, known, asked)
    assert seconds[found.chunk] == pytest.approx(min(seconds.values()), rel=1e-9)


@pytest.mark.parametrize("name", ["allreduce", "host", "tree", "hierarchy", "wheel", "subbatch"])
@pytest.mark.parametrize(
    ("on", "codec"),
    [("k40-gigabit", None), ("two-hosts-gigabit", "dynamic8"), ("power8-p100", None)],
)
def test_groups_of_layers_take_as_long_as_layers(name, on, codec):
    work, machine = question("resnet18", on)
    known = STRATEGIES[name]
    config = known.config(workers=2)
    config = replace(config, **dict.fromkeys(codec_fields(config), codec))
    if name == "hierarchy":
        config = replace(config, chunk=5)
    windows = Windows(known, work, machine, config)
    for num_steps in (1, 2, 5):
        expected = makespan_s(windows.of_layers(num_steps), windows.model)
        found = makespan_s(windows.of(num_steps), windows.cost)
        assert found == pytest.approx(expected, rel=1e-9)
    spans = steady(windows).timeline.spans
    parts = {layer.name for layer in work.layers}
    assert parts <= {span.part for span in spans}  # so that drawings show every layer


def test_a_strategy_without_exchanges_during_backward_is_planned_in_few_tasks():
    work, machine = question("resnet18", "k40-gigabit")
    tree = STRATEGIES["tree"]
    windows = Windows(tree, work, machine, tree.config(workers=2))
    assert len(windows.of(1)) < len(windows.step) / 5
