"""What a rehearsal stands for, and what it should take."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from groups import group_of
from paceline.core.calibration import Measurement
from paceline.core.cost import Totals
from paceline.core.plan import Kind, PriceKey
from paceline.exchange.replicas import ReplicaRunner
from paceline.exchange.session import TrainingSession
from paceline.exchange.setup import TrainingSetup, setup_of
from paceline.measure.layers import Profile
from paceline.measure.this_machine import Speed, this_machine
from paceline.models.paced import QUEUED_S, PacedModel
from paceline.records.machine_file import find_device
from paceline.records.settings import configuration, strategy_of, validated_rehearsal
from paceline.report.terminal import console
from paceline.runs.forecasts import forecast_with
from paceline.runs.progress import TerminalProgress
from paceline.runs.session import paced_device
from refusals import refused

MACHINES = Path(__file__).parents[2] / "machines"
FORWARD_S, BACKWARD_S, UPDATE_S = 0.006, 0.012, 0.003
LAYER_NBYTES = 4 * (64 * 64 + 64)
LATENCY_S = 1e-4


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("p100", "power8-p100/gpu0"),
        ("P100", "power8-p100/gpu0"),
        ("gpu", "8xh100/gpu0"),
        ("gpu2", "8xh100/gpu2"),
        ("Power8-P100/GPU3", "power8-p100/gpu3"),
        ("epyc", "two-core-epyc/cpu0"),
        (f"{MACHINES / 'two-core-epyc.toml'}:cpu1", "two-core-epyc/cpu1"),
    ],
)
def test_a_device_is_found_by_what_people_call_it(name, label, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the files that come with Paceline are found from anywhere
    assert find_device(name).label == label


def test_machine_files_of_the_users_own_come_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "machines").mkdir()
    text = (MACHINES / "power8-p100.toml").read_text()
    own = tmp_path / "machines" / "zoo.toml"
    own.write_text(text.replace('name = "power8-p100"', 'name = "my-p100"'))
    assert find_device("p100").label == "my-p100/gpu0"
    own.write_text("name = 3")
    with refused("machines/zoo.toml"):
        find_device("p100")


@pytest.mark.parametrize("name", ["", "k80", "gpu99", ":"])
def test_a_device_that_is_not_known_is_told_which_are(name):
    with refused("device"):
        find_device(name)


def session(**values: object) -> TrainingSession:
    """The first of two ranks of a rehearsal."""
    settings = validated_rehearsal(values)
    progress = TerminalProgress(console(quiet=True), "rehearsing")
    return TrainingSession(
        settings,
        strategy_of(settings),
        configuration(settings),
        "run",
        group_of(0, 2, "cpu"),
        progress,
        paced_device(settings),
    )


def paced(strategy: str, **settings: object) -> TrainingSession:
    """A network of three layers with equal parameters, on two paced workers."""
    return session(model="mlp-64-64-64-64", device="p100", strategy=strategy, **settings)


TOTALS = {"forward_ms": 6.0, "backward_ms": 12.0, "update_ms": 3.0}


def test_a_paced_model_takes_the_given_totals_and_else_those_of_the_device():
    known = setup_of(paced("host")).times
    assert known is not None
    mixed = setup_of(paced("host", backward_ms=12.0))
    assert isinstance(mixed.model, PacedModel)
    assert mixed.times is not None
    sums = Totals(sum(mixed.times.forward_s), sum(mixed.times.backward_s), mixed.times.update_s)
    assert sums == pytest.approx((sum(known.forward_s), BACKWARD_S, known.update_s))
    assert mixed.model.update_s == known.update_s


def profiled(
    one: TrainingSession, setup: TrainingSetup, exchange: Sequence[Measurement]
) -> Profile:
    """A profile of layers that take exactly what they stand for."""
    times = setup.times
    assert times is not None
    machine = this_machine(one.group, [Speed(1e12, 1e12)] * 2)
    kinds = ((Kind.FORWARD, times.forward_s), (Kind.BACKWARD, times.backward_s))
    parts = {
        (kind, layer.name): seconds
        for kind, column in kinds
        for layer, seconds in zip(setup.workload.layers, column, strict=True)
    }
    parts |= {(Kind.LOAD, ""): 0.0, (Kind.STEP, ""): times.update_s}
    durations = {
        PriceKey(device.name, kind, part): seconds
        for device in machine.devices
        for (kind, part), seconds in parts.items()
    }
    return Profile(machine, durations, {one.strategy.name: tuple(exchange)})


def predicted_s(strategy: str, seconds_per_byte: float, **settings: object) -> float:
    """The step that is predicted if exchanges lie on a known line."""
    exchange = [Measurement(n, LATENCY_S + n * seconds_per_byte) for n in (1000, 2**20)]
    one = paced(strategy, **(TOTALS | settings))
    runner = ReplicaRunner(one, one.strategy.runner().replica)
    runner.profiled = profiled(one, runner.setup, exchange)
    return forecast_with(one, runner, one.strategy, one.config).step_s


# Of 7 bytes that 2 ranks move for each byte of gradients, 4 are copied at once (read, written).
COPY_NBYTES = LAYER_NBYTES * 4 / 7


@pytest.mark.parametrize(
    ("strategy", "seconds_per_byte", "nbytes"),
    [
        # Each copy and each sum fits beside the layer that comes next: the last layer's shows.
        ("host", 1e-8, LAYER_NBYTES),
        # A copy that takes longer than the next layer holds it up.
        ("host", 1e-5, 2 * COPY_NBYTES + LAYER_NBYTES),
        ("allreduce", 1e-8, 3 * LAYER_NBYTES),  # one bucket shows as a whole
    ],
)
def test_the_exchange_that_shows(strategy, seconds_per_byte, nbytes):
    exchange_s = LATENCY_S + nbytes * seconds_per_byte
    step_s = predicted_s(strategy, seconds_per_byte)
    assert step_s == pytest.approx(FORWARD_S + BACKWARD_S + UPDATE_S + exchange_s)


def test_layers_that_are_shorter_than_what_is_queued_make_up_for_a_copy():
    copy_s, backward_s = QUEUED_S / 2, QUEUED_S / 2  # three layers of less than a copy each
    step_s = predicted_s("host", copy_s / COPY_NBYTES, backward_ms=1e3 * backward_s)
    times = setup_of(paced("host", **(TOTALS | {"backward_ms": 1e3 * backward_s}))).times
    assert times is not None
    exchanged_s = times.backward_s[-1] + 2 * copy_s + LATENCY_S + copy_s * 7 / 4
    assert step_s == pytest.approx(FORWARD_S + exchanged_s + UPDATE_S)


def test_more_workers_started_than_asked_for_are_refused():
    with refused("workers"):
        setup_of(session(model="lenet5", device="p100", workers=3))


@pytest.mark.parametrize("kind", [{"device": "p100"}, {"stretch": 2}])
def test_a_model_of_the_users_own_has_to_be_given_a_shape(kind):
    with refused("torch.nn:Identity"):
        setup_of(session(model="torch.nn:Identity", **kind))
    with refused("input_shape"):
        setup_of(session(model="paceline.models.networks:LeNet5", **kind))
    shaped = session(model="paceline.models.networks:LeNet5", input_shape=(1, 32, 32), **kind)
    assert setup_of(shaped).workload.num_parameters == 61_706
