"""The profile before a plan: parts of steps, links and rounds, by a clock that tests move."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from groups import group_of
from paceline.core.plan import Kind
from paceline.core.strategy import Prober
from paceline.core.workload import Workload
from paceline.exchange.step import OF_CLASSES, SGD, Share
from paceline.links.group import Group
from paceline.measure import layers as module
from paceline.measure.layers import Profile, profile
from paceline.models import describe
from paceline.planner import forecast
from paceline.strategies import find_exchange
from paceline.strategies.allreduce.config import AllReduce
from ticking import Ticking, Timed

LOAD_S, HELD_UP_S, MARK_S = 1.0, 9.0, 0.125
STEP_S = LOAD_S + 2 + 3 + 5 + 7
LATENCY_S, NBYTES_PER_S = 0.25, 4096.0
NUM_ROUNDS = 9


class OneOfTwo(Group):
    """A rank of two; the other one is held up in the round before it."""

    def gather(self, value):
        is_rounds = isinstance(value[0][0], float)
        return [value, value[1:] + value[:1] if is_rounds else value]


def ranks(number: int) -> Group:
    return group_of(0, number, kind=Group if number == 1 else OneOfTwo)


class Small(nn.Module):
    """A gradient of exactly 8 KiB, in layers that take known times."""

    def __init__(self, clock: Ticking) -> None:
        super().__init__()
        self.first, self.last = Timed(clock, 2, 5), Timed(clock, 3, 7)
        self.rest = nn.Parameter(torch.zeros(2046))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x)) + self.rest.sum()


def exchange_s(nbytes: float, num_ranks: int) -> float:
    """A ring on one host: each rank sends 2 (n - 1) / n of the bytes, all through one link."""
    sent_by_all = 2 * (num_ranks - 1) * nbytes
    return sent_by_all / NBYTES_PER_S + 2 * (num_ranks - 1) * LATENCY_S


@dataclass
class Ring:
    """An exchange that takes as long as a ring's."""

    clock: Ticking
    nbytes: int
    num_ranks: int
    closed: int = 0

    def __call__(self) -> None:
        assert not self.closed
        self.clock.now += exchange_s(self.nbytes, self.num_ranks)

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def clock(monkeypatch) -> Ticking:
    clock = Ticking(MARK_S)
    monkeypatch.setattr(module, "clock_for", lambda device: clock)
    return clock


def profiled(
    clock: Ticking,
    group: Group,
    held_up: bool,
    model: nn.Module | None = None,
    config: AllReduce | None = None,
) -> tuple[Profile, Workload]:
    """Profile a small model whose every third step is held up, if so wanted."""
    model = model or Small(clock)
    inputs = torch.randn(2, 3)

    def source() -> Iterator[Share]:
        for i in range(6):
            clock.now += LOAD_S + HELD_UP_S * (held_up and i % 3 == 2)
            yield Share(inputs, torch.tensor([0, 2]), 1.0)

    workload = describe(model, inputs, "small")
    clock.now = 0.0
    rounds_s = NUM_ROUNDS * (STEP_S + 2 * MARK_S)
    if group.world_size > 1:
        rounds_s += NUM_ROUNDS * (exchange_s(1024, 2) + exchange_s(8192, 2) + 2 * MARK_S)
    seconds = 2 * rounds_s + 1e-6

    def make(sizes: Sequence[Sequence[int]]) -> Ring:
        return Ring(clock, sum(map(sum, sizes)), group.world_size)

    probers = {"allreduce": Prober(find_exchange("allreduce"), config or AllReduce(), make)}
    return profile(
        model, workload, source, SGD().optimizer, OF_CLASSES, group, seconds, probers
    ), workload


def durations(found: Profile, device: str) -> dict[tuple[Kind, str], float]:
    return {(key.kind, key.part): s for key, s in found.durations.items() if key.owner == device}


def test_the_parts_of_a_step_add_up_to_the_untraced_step(clock):
    found, _ = profiled(clock, ranks(1), held_up=False)
    parts = durations(found, "cpu0")
    # A traced step has a dozen marks, each of which takes time; an untraced one has two.
    assert sum(parts.values()) == pytest.approx(STEP_S + 2 * MARK_S)
    assert {key: round(seconds) for key, seconds in parts.items() if seconds > 1} == {
        (Kind.FORWARD, "first"): 2,
        (Kind.FORWARD, "last"): 3,
        (Kind.BACKWARD, "last"): 7,
        (Kind.BACKWARD, "first"): 5,
        (Kind.LOAD, ""): 1,
    }
    assert found.machine.links == ()


def test_ranks_that_wait_for_each_other_pay_for_every_delay_of_any(clock):
    found, _ = profiled(clock, ranks(2), held_up=True)
    # Two of three steps of each rank take 18 s and the third 27 s, but never both ranks' at once:
    # two of three steps of both together take 27 s.
    for device in ("cpu0", "cpu1"):
        whole = sum(durations(found, device).values())
        assert whole == pytest.approx(STEP_S + HELD_UP_S + 2 * MARK_S)


def test_the_link_is_the_one_that_was_measured(clock):
    found, workload = profiled(clock, ranks(2), held_up=False)
    (link,) = found.calibrated(find_exchange("allreduce"))[0].links
    assert workload.gradient_nbytes == 8192
    assert link.bandwidth_bytes_per_s == pytest.approx(NBYTES_PER_S, rel=1e-5)
    assert link.latency_s == pytest.approx(LATENCY_S + MARK_S / 2, rel=1e-5)
    assert link.uses_cores


@pytest.mark.parametrize(
    ("codec", "wire_nbytes"), [(None, 2 * 8192), ("dynamic8", 2 * (2048 + 2 * 4))]
)
def test_a_forecast_from_a_profile_is_the_step_that_was_profiled(clock, codec, wire_nbytes):
    strategy, config = find_exchange("allreduce"), AllReduce(codec=codec)
    found, workload = profiled(clock, ranks(2), held_up=False, config=config)
    machine, cost = found.calibrated(strategy, config)
    predicted = forecast(workload, machine, strategy, config, 4, cost)
    step_s = STEP_S + 2 * MARK_S + exchange_s(8192, 2) + MARK_S
    assert predicted.step_s == pytest.approx(step_s, rel=1e-5)
    assert predicted.samples_per_s == pytest.approx(4 / step_s, rel=1e-5)
    assert predicted.wire_nbytes == wire_nbytes


def test_the_profiled_model_is_not_touched(clock):
    model = Small(clock).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    profiled(clock, ranks(1), held_up=False, model=model)
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("rounds", "held_up_s", "num_steps", "unrest"),
    [
        # Two to warm up, then at least three and at most 400, and as many traced, but at most 100.
        (0, 0, 2 + 3 + 3, 0.0),
        (10_000, 0, 2 + 400 + 100, 0.0),
        (NUM_ROUNDS, 0, 2 + NUM_ROUNDS + NUM_ROUNDS, 0.0),
        # Restless ones are taken twice, and as many traced; quartiles are a step and one held up.
        (NUM_ROUNDS, HELD_UP_S, 2 + 2 * NUM_ROUNDS + NUM_ROUNDS, HELD_UP_S / 2),
    ],
)
def test_the_number_of_rounds_is_bounded_and_doubled_by_unrest(
    clock, rounds: int, held_up_s: float, num_steps: int, unrest: float
):
    model, taken = Small(clock), 0
    share = Share(torch.randn(2, 3), torch.tensor([0, 2]), 1.0)

    def source() -> Iterator[Share]:
        nonlocal taken
        taken += 1
        clock.now += LOAD_S + held_up_s * (taken % 3 == 0)
        yield share

    workload, step_s = describe(model, share.inputs), STEP_S + 2 * MARK_S
    seconds = 2 * rounds * step_s + 1e-6
    found = profile(model, workload, source, SGD().optimizer, OF_CLASSES, ranks(1), seconds, {})
    assert taken == num_steps
    assert found.machine.usual_losses.unrest == pytest.approx(unrest / step_s)
