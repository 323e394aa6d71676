"""From what all layers' exchange takes to the single exchange that a plan is calibrated with."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from boxes import ExchangeOnly, box, chain
from paceline.core.calibration import Measurement
from paceline.core.simulate import makespan_s
from paceline.core.strategy import Prober, Window
from paceline.measure.layers import Probes, exchanging, single
from paceline.strategies import EXCHANGES

SIZES = (40_000, 4_000_000, 400_000, 2_000_000)
MODEL = exchanging(chain(*((1.0, nbytes) for nbytes in SIZES)))
MACHINES = {"one host": box("cpu", "cpu"), "two hosts": box("cpu", "cpu", hosts="ab")}


def takes(name: str, machine, measured) -> float:
    """What the layers' exchange takes on the machine that these measurements make."""
    strategy = EXCHANGES[name]
    config = strategy.config(workers=2)
    found = strategy.calibrate(machine, measured, config)
    plan = strategy.plan(MODEL, found, config, Window(1))
    return makespan_s(plan, ExchangeOnly(found))


@settings(max_examples=40)
@given(
    st.sampled_from(sorted(EXCHANGES)),
    st.sampled_from(sorted(MACHINES)),
    st.floats(1e-5, 1e-2),
    st.floats(1.1, 1e3),
)
def test_the_plan_takes_as_long_as_all_layers_did(name, place, small_s, factor):
    machine = MACHINES[place]
    true = (Measurement(1024, small_s), Measurement(MODEL.gradient_nbytes, small_s * factor))
    all_s = takes(name, machine, true)
    prober = Prober(EXCHANGES[name], EXCHANGES[name].config(workers=2), None)
    found = single(prober, machine, MODEL, small_s, all_s)
    assert takes(name, machine, found) == pytest.approx(all_s, rel=1e-3)


def test_layers_that_take_less_than_their_latencies_have_smaller_ones():
    prober = Prober(EXCHANGES["host"], EXCHANGES["host"].config(workers=2), None)
    small, large = single(prober, MACHINES["one host"], MODEL, 1e-3, 1e-3)
    assert small.seconds < 1e-3
    assert takes("host", MACHINES["one host"], (small, large)) == pytest.approx(1e-3, rel=1e-3)


def test_large_models_are_measured_smaller_in_proportion():
    large = exchanging(chain((1.0, 300 * 2**20), (1.0, 100 * 2**20)))
    sizes = {layer.name: layer.gradient_nbytes for layer in large.layers}
    assert sizes == {"l0": 96 * 2**20, "l1": 32 * 2**20}
    assert [layer.name for layer in large.in_backward_order] == ["l1", "l0"]


def test_a_model_with_next_to_no_parameters_is_told_from_the_small_exchange():
    [layer] = exchanging(chain((1.0, 8))).layers
    assert layer.gradient_nbytes == 2048


@pytest.mark.parametrize(
    ("name", "options", "hosts", "num_small"),
    [
        ("allreduce", {}, "aa", 1),
        ("tree", {}, "aa", 1),
        ("host", {}, "aa", 4),
        ("host", {"chunk": 3}, "aa", 2),
        ("host", {}, "ab", 1),  # on the wire each chunk takes its time
    ],
)
def test_small_chunks_of_a_host_are_measured_as_many_at_a_time_as_a_step_has(
    name, options, hosts, num_small
):
    """Alone, each would pay for threads that wake up, which a step of many chunks pays once."""
    config, made = EXCHANGES[name].config(workers=2, **options), []
    own = Prober(EXCHANGES[name], config, lambda sizes: made.append(sizes) or (lambda: None))
    members = [SimpleNamespace(boot_id=host, pid_namespace="1") for host in hosts]
    group = SimpleNamespace(world_size=2, members=members)
    probes = Probes.of(MODEL, group, {name: own})
    of_all, small = made
    assert len(of_all) == len(SIZES)
    assert small == [[1024]] * (len(SIZES) if num_small > 1 else 1)
    machine, round_s = MACHINES["one host"], [1.0, num_small * 1e-3]  # of all, and of small ones
    found = probes.measured([[round_s], [round_s]], machine)
    assert found[name] == single(own, machine, MODEL, 1e-3, 1.0)
