"""Measurements before a plan: parts of steps, exchanges, rounds and cores."""

from collections.abc import Iterator, Sequence
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from absent_ranks import group_of
from boxes import ExchangeOnly, box, chain
from nets import Net
from paceline.core.link_fit import ExchangeSample
from paceline.core.plan import Kind
from paceline.core.simulate import makespan_s
from paceline.core.strategy import Prober, Window, exchange_name
from paceline.core.workload import Workload
from paceline.exchange import profile as module
from paceline.exchange.profile import Probes, Profile, exchanging, profile, single
from paceline.exchange.setup import TrainingSetup
from paceline.exchange.step import Share
from paceline.links.group import Group, Member
from paceline.measure import timing
from paceline.measure.device_profile import message_speed
from paceline.measure.timing import CoreTime, lost_beside
from paceline.planner import forecast
from paceline.strategies import EXCHANGES, find_exchange
from paceline.strategies.allreduce.config import AllReduce
from paceline.training.models import describe
from ticking import Ticking, Timed

LOAD_S, HELD_UP_S, MARK_S = 1.0, 9.0, 0.125
STEP_S = LOAD_S + 2 + 3 + 5 + 7
LATENCY_S, NBYTES_PER_S = 0.25, 4096.0
NUM_ROUNDS = 9


class OneOfTwo(Group):
    """A group of two ranks; the other rank has the same delays one round earlier."""

    def gather(self, value):
        is_rounds = isinstance(value[0][0], float)
        return [value, value[1:] + value[:1] if is_rounds else value]


def ranks(number: int) -> Group:
    return group_of(0, number, kind=Group if number == 1 else OneOfTwo)


def small(clock: Ticking) -> nn.Module:
    """Return a model with gradients of exactly 8 KiB, and layers with known times."""
    return Net(
        lambda net, x: net.last(net.first(x)) + net.rest.sum(),
        first=Timed(clock, 2, 5),
        last=Timed(clock, 3, 7),
        rest=nn.Parameter(torch.zeros(2046)),
    )


def exchange_s(nbytes: float, num_ranks: int) -> float:
    """Return the time of a ring whose messages share one link.

    Each rank sends 2 (n - 1) / n of the bytes.
    """
    sent_by_all = 2 * (num_ranks - 1) * nbytes
    return sent_by_all / NBYTES_PER_S + 2 * (num_ranks - 1) * LATENCY_S


class Ring:
    """An exchange that takes the time of a ring."""

    def __init__(self, clock: Ticking, nbytes: int, num_ranks: int) -> None:
        self._clock, self._takes_s = clock, exchange_s(nbytes, num_ranks)
        self._is_closed = False

    def __call__(self) -> None:
        assert not self._is_closed
        self._clock.now += self._takes_s

    def close(self) -> None:
        self._is_closed = True


@pytest.fixture
def clock(monkeypatch) -> Ticking:
    clock = Ticking(MARK_S)
    monkeypatch.setattr(module, "clock_for", lambda device: clock)
    return clock


def stepping(clock: Ticking, held_up_s: float) -> Iterator[Share]:
    """Yield the shares of steps; every third step is delayed."""
    for step in count(1):
        clock.now += LOAD_S + held_up_s * (step % 3 == 0)
        yield Share(torch.ones(2, 3), torch.tensor([0, 2]), 1.0)


def set_up(model, workload, source) -> TrainingSetup:
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), 0.01)

    return TrainingSetup(model, workload, source, (), 2.0, optimizer, None)


def profiled(
    clock: Ticking,
    group: Group,
    held_up_s: float = 0.0,
    model: nn.Module | None = None,
    config: AllReduce | None = None,
) -> tuple[Profile, Workload]:
    """Profile a small model."""
    model = model or small(clock)
    workload = describe(model, torch.ones(2, 3), "small")
    clock.now = 0.0
    rounds_s = NUM_ROUNDS * (STEP_S + 2 * MARK_S)
    if group.world_size > 1:
        rounds_s += NUM_ROUNDS * (exchange_s(1024, 2) + exchange_s(8192, 2) + 2 * MARK_S)

    def make(sizes: Sequence[Sequence[int]]) -> Ring:
        return Ring(clock, sum(map(sum, sizes)), group.world_size)

    config = config or AllReduce()
    name = exchange_name("allreduce", config)
    probers = {name: Prober(find_exchange("allreduce"), config, make)}
    setup = set_up(model, workload, lambda epoch: stepping(clock, held_up_s))
    return profile(setup, group, 2 * rounds_s + 1e-6, probers), workload


def durations(found: Profile, device: str) -> dict[tuple[Kind, str], float]:
    return {(key.kind, key.part): s for key, s in found.durations.items() if key.owner == device}


def test_the_parts_of_a_step_add_up_to_the_untraced_step(clock):
    found, _ = profiled(clock, ranks(1))
    parts = durations(found, "cpu0")
    # A traced step has a dozen marks, each of which takes MARK_S; an untraced one has two.
    assert sum(parts.values()) == pytest.approx(STEP_S + 2 * MARK_S)
    assert {key: round(seconds) for key, seconds in parts.items() if seconds > 1} == {
        (Kind.FORWARD, "first"): 2,
        (Kind.FORWARD, "last"): 3,
        (Kind.BACKWARD, "last"): 7,
        (Kind.BACKWARD, "first"): 5,
        (Kind.LOAD, ""): 1,
    }
    assert found.machine.links == ()


def test_ranks_that_wait_for_each_other_have_the_delays_of_all(clock):
    found, _ = profiled(clock, ranks(2), held_up_s=HELD_UP_S)
    # Each rank takes 18 s for two of three steps and 27 s for the third. The long steps of the
    # ranks differ, so two of three common steps take 27 s.
    for device in ("cpu0", "cpu1"):
        whole = sum(durations(found, device).values())
        assert whole == pytest.approx(STEP_S + HELD_UP_S + 2 * MARK_S)


@pytest.mark.parametrize(
    ("codec", "wire_nbytes"), [(None, 2 * 8192), ("dynamic8", 2 * (2048 + 2 * 4))]
)
def test_a_forecast_from_a_profile_is_the_step_that_was_profiled(clock, codec, wire_nbytes):
    strategy, config = find_exchange("allreduce"), AllReduce(codec=codec)
    found, workload = profiled(clock, ranks(2), config=config)
    machine, cost = found.calibrated(strategy, config)
    predicted = forecast(workload, machine, strategy, config, 4, cost)
    step_s = STEP_S + 2 * MARK_S + exchange_s(8192, 2) + MARK_S
    assert predicted.step_s == pytest.approx(step_s, rel=1e-5)
    assert predicted.wire_nbytes == wire_nbytes
    if codec is None:
        (link,) = machine.links  # the measured one
        assert link.bandwidth_bytes_per_s == pytest.approx(NBYTES_PER_S, rel=1e-5)
        assert link.latency_s == pytest.approx(LATENCY_S + MARK_S / 2, rel=1e-5)
        assert link.uses_cores


def test_the_profiled_model_is_not_changed(clock):
    model = small(clock).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    profiled(clock, ranks(1), model=model)
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("rounds", "held_up_s", "num_steps", "unrest"),
    [
        # Two steps warm up, 3 to 400 are measured, and as many are traced, but at most 100.
        (0, 0, 2 + 3 + 3, 0.0),
        (10_000, 0, 2 + 400 + 100, 0.0),
        (NUM_ROUNDS, 0, 2 + NUM_ROUNDS + NUM_ROUNDS, 0.0),
        # Rounds that vary are measured twice; the quartiles are a step and a delayed step.
        (NUM_ROUNDS, HELD_UP_S, 2 + 2 * NUM_ROUNDS + NUM_ROUNDS, HELD_UP_S / 2),
    ],
)
def test_rounds_are_bounded_and_doubled_by_unrest(clock, rounds, held_up_s, num_steps, unrest):
    model, taken = small(clock), count()
    shares = (share for share, _ in zip(stepping(clock, held_up_s), taken, strict=False))
    workload, step_s = describe(model, torch.ones(2, 3)), STEP_S + 2 * MARK_S
    setup = set_up(model, workload, lambda epoch: shares)
    found = profile(setup, ranks(1), 2 * rounds * step_s + 1e-6, {})
    assert next(taken) == num_steps
    assert found.machine.usual_losses.unrest == pytest.approx(unrest / step_s)


SIZES = (40_000, 4_000_000, 400_000, 2_000_000)
MODEL = exchanging(chain(*((1.0, nbytes) for nbytes in SIZES)))
MACHINES = {"one host": box("cpu", "cpu"), "two hosts": box("cpu", "cpu", hosts="ab")}


def takes(name: str, machine, measured) -> float:
    """Return the time of the layers' exchange on a machine calibrated with the samples."""
    strategy = EXCHANGES[name]
    config = strategy.config(workers=2)
    found = strategy.planning.calibrate(machine, measured, config)
    plan = strategy.planning.plan(MODEL, found, config, Window(1))
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
    true = (ExchangeSample(1024, small_s), ExchangeSample(MODEL.gradient_nbytes, small_s * factor))
    all_s = takes(name, machine, true)
    prober = Prober(EXCHANGES[name], EXCHANGES[name].config(workers=2), None)
    found = single(prober, machine, MODEL, small_s, all_s)
    assert takes(name, machine, found) == pytest.approx(all_s, rel=1e-3)


def test_layers_faster_than_the_measured_latencies_have_smaller_latencies():
    prober = Prober(EXCHANGES["host"], EXCHANGES["host"].config(workers=2), None)
    small, large = single(prober, MACHINES["one host"], MODEL, 1e-3, 1e-3)
    assert small.seconds < 1e-3
    assert takes("host", MACHINES["one host"], (small, large)) == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize(
    ("nbytes", "measured"),
    [
        ((300 * 2**20, 100 * 2**20), (32 * 2**20, 96 * 2**20)),
        ((8,), (2048,)),  # to differ from the small exchange
    ],
)
def test_large_models_are_measured_smaller_in_proportion_and_small_ones_larger(nbytes, measured):
    found = exchanging(chain(*((1.0, one) for one in nbytes)))
    assert tuple(layer.gradient_nbytes for layer in found.in_backward_order) == measured


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
def test_a_round_has_as_many_small_chunks_as_a_step(name, options, hosts, num_small):
    """A step of many chunks wakes the threads only once."""
    config, made = EXCHANGES[name].config(workers=2, **options), []
    own = Prober(EXCHANGES[name], config, lambda sizes: made.append(sizes) or (lambda: None))
    members = [Member(rank, rank, host, "1", "cpu") for rank, host in enumerate(hosts)]
    group = SimpleNamespace(world_size=2, members=members)
    probes = Probes(MODEL, group, {name: own})
    of_all, small = made
    assert len(of_all) == len(SIZES)
    assert small == [[1024]] * (len(SIZES) if num_small > 1 else 1)
    machine, round_s = MACHINES["one host"], [1.0, num_small * 1e-3]  # all layers; small chunks
    found = probes.measured([[round_s], [round_s]], machine)
    assert found[name] == single(own, machine, MODEL, 1e-3, 1.0)


@pytest.mark.parametrize(
    ("taken", "workers", "num_cores", "threads", "lost"),
    [
        (0.5, 1, 1, 1, 0.5),  # one core for both
        (0.5, 1, 2, 1, 0.0),  # the second core is idle
        (1.5, 1, 2, 1, 0.5),
        (0.5, 4, 2, 1, 0.5),  # more workers than cores: none is idle
        (0.5, 1, 4, 4, 0.125),  # half a core less for four threads
        (3.0, 1, 1, 1, 0.95),  # computation keeps some of the time
    ],
)
def test_idle_cores_are_used_first(taken, workers, num_cores, threads, lost):
    assert lost_beside(taken, workers, num_cores, threads) == pytest.approx(lost)


def test_processor_time_is_measured_within_calls_only(monkeypatch):
    clock = SimpleNamespace(busy_s=1.0, elapsed_s=5.0)
    monkeypatch.setattr(timing, "time", clock)
    clock.process_time, clock.perf_counter = lambda: clock.busy_s, lambda: clock.elapsed_s

    def work(busy_s: float = 3.0, elapsed_s: float = 2.0) -> None:
        clock.busy_s += busy_s
        clock.elapsed_s += elapsed_s

    timed = CoreTime(work)
    assert (timed.num_cores, timed.busy_s) == (0.0, 0.0)
    for _ in range(3):
        timed()
        work(10.0, 1.0)  # between calls
    assert (timed.num_cores, timed.busy_s) == (pytest.approx(1.5), pytest.approx(3.0))


@pytest.mark.parametrize(
    ("num_cores", "processes", "times"),
    [(1, 3, 1), (2, 3, 2), (16, 1, 2), (16, 4, 8)],  # a process has two threads for messages
)
def test_a_host_handles_messages_with_cores_that_its_processes_can_use(num_cores, processes, times):
    assert message_speed(1e9, num_cores, processes) == times * 1e9
