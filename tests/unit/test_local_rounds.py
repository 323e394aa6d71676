"""Rounds and units: whatever becomes of workers, each unit is trained on once."""

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.strategies.local.config import Local
from paceline.strategies.local.rounds import OutOfTurn, Rounds
from paceline.strategies.local.units import Units, inner_steps

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
