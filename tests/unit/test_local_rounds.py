"""Rounds, units and outer steps: each unit is trained on once, and torch's SGD is the oracle."""

from collections import Counter
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from paceline.core.errors import InvalidInput
from paceline.strategies.local.config import Local
from paceline.strategies.local.exchange import Exchanged
from paceline.strategies.local.outer import flatten, fragments_of, weighted_sum
from paceline.strategies.local.rounds import OutOfTurn, Rounds
from paceline.strategies.local.units import Units, inner_steps
from refusals import refused

NUM_UNITS = 47


def test_equal_workers_have_the_parts_of_data_parallel_ranks() -> None:
    units = Units(12)
    assert units.take({0: 3, 1: 3}) == {0: [0, 2, 4], 1: [1, 3, 5]}
    assert units.take({0: 3, 1: 3}) == {0: [6, 8, 10], 1: [7, 9, 11]}
    assert units.num_left == 0


def test_what_was_given_back_goes_first_and_the_last_round_is_cut() -> None:
    units = Units(10)
    first = units.take({0: 2, 1: 2})
    units.give_back(first[1])
    assert units.take({0: 2, 2: 2}) == {0: [1, 4], 2: [3, 5]}
    assert units.num_left == 4
    dealt = units.take({0: 9, 2: 3})
    assert {worker: len(own) for worker, own in dealt.items()} == {0: 3, 2: 1}


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ([1.0, 4.0], (16, 4)),
        ([None, None], (10, 10)),
        ([1.0, None], (10, 10)),
        ([1.0, 1e9], (20, 1)),
    ],
)
def test_inner_steps_follow_speeds(seconds: list[float | None], expected: tuple[int, ...]) -> None:
    assert inner_steps(10, seconds) == expected


class Run:
    """A run whose workers are lost and come back, as a hub goes through it."""

    def __init__(self, config: Local, random: Random, num_faults: int, *, balanced: bool) -> None:
        self.rounds: Rounds[int] = Rounds(Units(NUM_UNITS), config, is_balanced=balanced)
        self.config, self.random, self.num_faults = config, random, num_faults
        self.waiting, self.done = set(range(config.workers)), set[int]()
        self.trained: dict[int, list[int]] = {}  # by worker, since it sent its last part
        self.places: dict[int, tuple[int, int, list[int]]] = {}  # round, parts sent, units
        self.applied: Counter[int] = Counter()  # units that are in what was exchanged

    def go_on(self) -> None:
        """Let one thing happen."""
        free = self.rounds.missing
        can_join = self.rounds.is_at_border or not self.rounds.members
        if self.waiting and can_join and self.random.random() < 0.5:
            worker = self.waiting.pop()
            self.rounds.admit(worker)
            self.places[worker] = self.rounds.round, 0, []
        elif free:
            self.work(self.random.choice(sorted(free)))
        elif not self.waiting:
            self.waiting |= set(range(self.config.workers)) - self.done - self.rounds.members.keys()
        if self.rounds.posted and not self.rounds.missing:
            self.complete()

    def work(self, worker: int) -> None:
        """Let a worker train and send its next part, or be lost."""
        self.rounds.note_speed(worker, self.random.choice([1.0, 2.0, 7.0]))
        if self.num_faults and self.random.random() < 0.2:
            self.num_faults -= 1
            self.rounds.drop(worker)
            self.trained.pop(worker, None)
            self.waiting.add(worker)
            return
        number, sent, units = self.places[worker]
        if not sent:
            dealt = self.rounds.units_of(worker, number)
            if dealt is None:
                self.rounds.drop(worker)
                self.done.add(worker)
                return
            units = list(dealt.units)
        begin = self.config.sent_after(sent - 1, len(units)) if sent else 0
        self.trained[worker] = units[begin : self.config.sent_after(sent, len(units))]
        self.places[worker] = number, sent + 1, units
        self.rounds.post(worker, self.rounds.exchange, 0)

    def complete(self) -> None:
        """Complete an exchange, in which all have sent their parts."""
        completed = self.rounds.complete()
        assert completed is not None
        assert list(completed.parts) == sorted(completed.parts)
        for worker in completed.parts:
            self.applied.update(self.trained.pop(worker, []))
            if completed.ends_round:
                self.places[worker] = self.places[worker][0] + 1, 0, []


@given(
    st.integers(1, 4),
    st.integers(1, 9),
    st.integers(1, 3),
    st.integers(0, 60),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_every_unit_is_trained_on_once_whoever_is_lost(
    workers: int, every: int, fragments: int, num_faults: int, balanced: bool, random: Random
) -> None:
    config = Local(workers=workers, sync_every=max(every, fragments), fragments=fragments)
    run = Run(config, random, num_faults, balanced=balanced)
    for _ in range(10_000):
        if run.rounds.is_over and not run.rounds.members:
            break
        run.go_on()
    assert run.applied == Counter(range(NUM_UNITS))
    assert run.rounds.num_done == NUM_UNITS


def test_what_is_out_of_turn_is_refused() -> None:
    rounds: Rounds[int] = Rounds(Units(100), Local(workers=2, sync_every=5))
    with pytest.raises(OutOfTurn):
        rounds.units_of(0, 0)
    rounds.admit(0)
    rounds.admit(1)
    with pytest.raises(OutOfTurn):
        rounds.units_of(0, 2)
    rounds.post(0, 0, 0)
    for exchange in (0, 1):
        with pytest.raises(OutOfTurn):
            rounds.post(0, exchange, 0)
    assert rounds.complete() is None
    with pytest.raises(ValueError, match="border"):
        rounds.admit(2)


def network(layers: int = 5) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(3, 3) for _ in range(layers)))


def test_the_outer_step_is_torchs_nesterov_momentum_on_the_weighted_mean() -> None:
    config = Local(workers=2, outer_learning_rate=0.7, outer_momentum=0.9)
    exchanged = Exchanged(network(), config)
    expected = nn.Parameter(exchanged.outer.values[0].clone())
    optimizer = torch.optim.SGD([expected], 0.7, momentum=0.9, nesterov=True)
    source = torch.Generator().manual_seed(2)
    for _ in range(6):
        first, second = (torch.randn(expected.shape, generator=source) for _ in range(2))
        expected.grad = first * 0.25 + second * 0.75
        optimizer.step()
        exchanged.step(0, [(10, first), (30, second)])
    torch.testing.assert_close(exchanged.outer.values[0], expected.detach(), rtol=2e-6, atol=1e-6)


def test_products_are_rounded_before_they_are_added() -> None:
    # Fused, the first addition would keep the 2**-24 that the product rounds away.
    one = torch.tensor([1 + 2**-12], dtype=torch.float32)
    total = weighted_sum([(1.0, -torch.ones(1)), (float(one), one)])
    assert float(total) == float(one * one) - 1.0


def test_layers_are_dealt_in_turns_and_every_parameter_once() -> None:
    model = network(5)
    found = fragments_of(model, 2)
    layers = [(layer.weight, layer.bias) for layer in model]
    assert [len(one) for one in found] == [6, 4]
    for fragment, numbers in zip(found, ([0, 2, 4], [1, 3]), strict=True):
        own = [one for number in numbers for one in layers[number]]
        assert all(a is b for a, b in zip(fragment, own, strict=True))


def test_a_tied_parameter_belongs_to_one_fragment() -> None:
    model = network(4)
    model[3].weight = model[0].weight
    parameters = [id(one) for fragment in fragments_of(model, 3) for one in fragment]
    assert len(parameters) == len(set(parameters)) == 7


def test_mixing_keeps_a_part_of_the_workers_own_parameters() -> None:
    exchanged = Exchanged(network(), Local(workers=2))
    (fragment,) = exchanged.fragments
    group, own = exchanged.outer.values[0].clone(), flatten(fragment) + 1
    with torch.no_grad():
        for parameter in fragment:
            parameter.add_(1)
    exchanged.outer.load_into(0, fragment, mixing=0.25)
    torch.testing.assert_close(flatten(fragment), 0.25 * own + 0.75 * group)


@pytest.mark.parametrize("count", [6, 9])
def test_more_fragments_than_layers_are_refused(count: int) -> None:
    with refused("fragments"):
        fragments_of(network(), count)


def test_parameters_of_other_types_are_refused() -> None:
    with refused("parameters"):
        fragments_of(network().to(torch.bfloat16), 1)
    mixed = network()
    mixed[0].double()
    with refused("parameters"):
        fragments_of(mixed, 1)


def test_a_codec_takes_no_float64() -> None:
    with refused("codec"):
        Exchanged(network().double(), Local(workers=2, codec="dynamic8"))


@pytest.mark.parametrize("codec", [None, "dynamic8"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_never_sent(codec: str | None, bad: float) -> None:
    exchanged = Exchanged(network(), Local(workers=2, codec=codec))
    gradient = torch.zeros_like(exchanged.outer.values[0])
    assert exchanged.encode(0, gradient) is not None
    gradient[3] = bad
    assert exchanged.encode(0, gradient) is None


@pytest.mark.parametrize("codec", [None, "dynamic8", "onebit"])
def test_what_came_decodes_as_it_does_where_it_was_sent(codec: str | None) -> None:
    there, here = (Exchanged(network(), Local(workers=2, codec=codec)) for _ in range(2))
    gradient = torch.randn_like(there.outer.values[0])
    sent = there.encode(0, gradient)
    assert sent is not None
    unaligned = [_moved(one) for one in sent]
    assert torch.equal(here.decode(0, unaligned), there.decode(0, sent))
    with pytest.raises(InvalidInput):
        here.decode(0, [*unaligned[:-1], unaligned[-1][:-1]])


def _moved(buffer: Tensor) -> Tensor:
    """The same bytes at an odd address, as in the middle of a message."""
    whole = torch.empty(len(buffer) + 1, dtype=torch.uint8)
    whole[1:] = buffer
    return whole[1:]


@pytest.mark.parametrize(("workers", "rate"), [(1, 0.5), (2, 0.6), (4, 0.7), (8, 0.8)])
def test_the_outer_learning_rate_follows_the_scaling_laws(workers: int, rate: float) -> None:
    assert Local(workers=workers).outer_rate == pytest.approx(rate)
    assert Local(workers=workers, outer_learning_rate=0.3).outer_rate == 0.3


@pytest.mark.parametrize(
    "fields",
    [
        {"sync_every": 0},
        {"sync_every": 10, "fragments": 11},
        {"sync_every": 10, "fragments": 2, "delay": 5},
        {"mixing": 1.0},
        {"outer_momentum": -0.1},
        {"codec": "nothing"},
    ],
)
def test_configurations_that_cannot_be_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises((ValueError, InvalidInput), match=next(reversed(fields))):
        Local(**fields)  # type: ignore[arg-type]
