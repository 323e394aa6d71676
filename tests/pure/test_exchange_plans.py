"""Properties of all strategies that exchange gradients every step, and fits of links."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from boxes import box, chain, exchange_s
from paceline.core.errors import InvalidInput
from paceline.core.link_fit import ExchangeSample
from paceline.core.machine import Machine
from paceline.core.plan import Kind
from paceline.core.strategy import Window
from paceline.strategies import EXCHANGES, STRATEGIES
from paceline.strategies.allreduce.config import AllReduce
from paceline.strategies.hierarchy.config import Hierarchy
from paceline.strategies.hogbatch.config import Hogbatch
from paceline.strategies.host.config import HostReduce
from paceline.strategies.local.config import Local
from paceline.strategies.subbatch.config import SubBatch
from paceline.strategies.tree.config import Tree
from paceline.strategies.wheel.config import Wheel
from refusals import refused

every_exchange = pytest.mark.parametrize("name", ["allreduce", "host", "tree", "hierarchy"])
WORK = chain((2, 400), (1, 4000))


@every_exchange
def test_one_worker_exchanges_nothing(name):
    known = STRATEGIES[name]
    tasks = known.planning.plan(WORK, box("cpu"), known.config(workers=1), Window(2)).tasks
    assert {task.kind for task in tasks} == {Kind.LOAD, Kind.FORWARD, Kind.BACKWARD, Kind.STEP}


@every_exchange
@pytest.mark.parametrize(
    ("workers", "kinds", "hosts", "field"),
    [
        (3, ["cpu", "cpu"], "hh", "workers"),
        (2, ["cpu", "cpu"], "ab", "machine box"),
        (2, ["gpu", "gpu"], "ab", "machine box"),
    ],
)
def test_a_machine_without_the_devices_or_links_is_refused(name, workers, kinds, hosts, field):
    known, machine = STRATEGIES[name], box(*kinds, hosts=hosts)
    with refused(field):
        known.planning.plan(WORK, machine, known.config(workers=workers), Window(1))


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        *[(config, {"workers": 0}) for config in (AllReduce, HostReduce, Tree, Hierarchy, Wheel)],
        *[(config, {"chunk": 0}) for config in (HostReduce, Hierarchy)],
        *[(AllReduce, {"bucket_mb": 0}), (AllReduce, {"buckets": 3}), (HostReduce, {"chunks": 3})],
        (Hierarchy, {"between": "trees"}),
        (Hierarchy, {"servers": 1}),  # requires between="servers"
        *[(Wheel, fields) for fields in ({"lanes": 0}, {"gradients": "zip"}, {"lane": 2})],
        *[(Hogbatch, {"cpu_batch": (64, 1)}), (Hogbatch, {"gpu_batch": (0, 8)})],
        *[(Hogbatch, fields) for fields in ({"alpha": 1.0}, {"beta": 0.0})],
        (Local, {"codec": "zip"}),
        *[
            (SubBatch, {field: codec})
            for field in ("activations", "activation_gradients")
            # Allowed are codecs of fixed size without error feedback.
            for codec in ("auto", "threshold:0.1", "zip", "onebit", "e3m0+feedback")
        ],
    ],
)
def test_invalid_settings_are_refused_by_name(config, fields):
    with pytest.raises((InvalidInput, ValidationError)) as caught:
        config(**fields)
    if isinstance(caught.value, InvalidInput):
        assert caught.value.field in {*fields, "codec"}
    else:
        (fault,) = caught.value.errors()
        assert fault["loc"] in {(next(iter(fields)),), ()}


SMALL, LARGE = 1024, 2**22


def measured(latency_s: float, seconds_per_byte: float) -> tuple[ExchangeSample, ExchangeSample]:
    return tuple(ExchangeSample(n, latency_s + n * seconds_per_byte) for n in (SMALL, LARGE))


def exchanging(machine: Machine, strategy: str, nbytes: int, **config):
    known = EXCHANGES[strategy]
    options = known.config(workers=len(machine.devices), **config)
    return known.planning.plan(chain((0, nbytes)), machine, options, Window(1))


@given(
    st.sampled_from(sorted(EXCHANGES)),
    st.sampled_from(["cpu", "gpu"]),
    st.sampled_from(["aa", "aaa", "a" * 8, "ab", "aab", "abbb", "aaabbb"]),
    st.floats(0, 50),  # latency, relative to the transfer time of the large exchange
    st.floats(1e-12, 1e-6),
    st.sampled_from([1e-18, 1e-9]),  # memory: seconds per byte
)
def test_workers_exchange_as_measured(strategy, kind, places, latency, s_per_byte, memory_s):
    latency_s = latency * LARGE * s_per_byte
    # Only CPU workers of one host transfer their messages, and so their sums, themselves.
    carried = kind == "cpu" and set(places) == {"a"}
    facts = {"memory_bandwidth_bytes_per_s": 1 / memory_s} if carried else {}
    machine = box(*[kind] * len(places), hosts=places, device=facts, host=facts)
    found = EXCHANGES[strategy].planning.calibrate(machine, measured(latency_s, s_per_byte))
    assert found.devices == machine.devices
    assert {one.uses_cores for one in found.links} == {carried}
    for nbytes in (SMALL, 100_000, LARGE, 20 * LARGE):
        expected = latency_s + nbytes * s_per_byte
        tasks = exchanging(found, strategy, nbytes)
        assert exchange_s(tasks, found) == pytest.approx(expected, rel=1e-9)


def test_the_time_of_additions_on_gpus_is_not_attributed_to_links():
    device = {"memory_bandwidth_bytes_per_s": 3e9, "call_latency_s": 1e-5}
    known = measured(0.1 * LARGE * 5e-9, 5e-9)
    found = EXCHANGES["tree"].planning.calibrate(box("gpu", "gpu", device=device), known)
    assert exchange_s(exchanging(found, "tree", LARGE), found) == pytest.approx(known[1].seconds)


@pytest.mark.parametrize("strategy", sorted(EXCHANGES))
@pytest.mark.parametrize("large_s", [1e-3, 0.5e-3, 1e-9])
def test_noise_that_makes_the_large_exchange_the_faster_gives_a_machine(strategy, large_s):
    noisy = (ExchangeSample(SMALL, 1e-3), ExchangeSample(LARGE, large_s))
    found = EXCHANGES[strategy].planning.calibrate(box("cpu", "cpu"), noisy)
    assert Machine.model_validate(found.model_dump()) == found
    assert exchange_s(exchanging(found, strategy, LARGE), found) > 0


@pytest.mark.parametrize("codec", ["half", "dynamic8", "e3m0", "onebit", "auto"])
@pytest.mark.parametrize("strategy", ["allreduce", "host"])
@pytest.mark.parametrize(("kind", "places"), [("cpu", "aa"), ("cpu", "aab"), ("gpu", "ab")])
def test_an_exchange_measured_with_a_codec_is_planned_with_that_time(strategy, kind, places, codec):
    known, machine = EXCHANGES[strategy], box(*[kind] * len(places), hosts=places)
    config = known.config(workers=len(places), codec=codec)
    calibrate, known_times = known.planning.calibrate, measured(3e-3, 2e-8)
    found, plain = (calibrate(machine, known_times, one) for one in (config, None))
    if strategy == "allreduce":
        with refused("codec"):  # only the measured codec is known
            exchanging(found, strategy, LARGE, codec="dynamic8" if codec == "onebit" else "onebit")
    for nbytes in (SMALL, LARGE, 20 * LARGE):  # the last one has several pieces
        tasks = exchanging(found, strategy, nbytes, codec=codec)
        # The recorder records whole exchanges, so the plan has the tasks of a plain exchange.
        without = exchanging(plain, strategy, nbytes)
        assert [task.id for task in tasks.tasks] == [task.id for task in without.tasks]
        # Incomplete blocks are rounded up.
        close = pytest.approx(3e-3 + nbytes * 2e-8, rel=1e-2 if nbytes == SMALL else 1e-3)
        assert exchange_s(tasks, found) == close
