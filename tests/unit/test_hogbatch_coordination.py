"""The coordinator's queue of samples, its counts and learning rates, without processes."""

import itertools
import warnings
from collections.abc import Callable
from math import inf
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    SequentialLR,
)

from paceline.strategies.hogbatch.config import MOST_WORKERS, Hogbatch, WorkerSpec
from paceline.strategies.hogbatch.messages import BatchResult, ExecuteWork, SpeedTrial
from paceline.strategies.hogbatch.scheduler import (
    MOST_REPORTED,
    BatchScheduler,
    ScheduledRate,
    WorkerProgress,
)
from refusals import refused

SIZE, SECONDS = 8, 1.0  # of each batch


def worker(
    number: int, *batches: int, threads: int = 2, seconds: float = SECONDS
) -> WorkerProgress:
    """Create a worker with batches of `seconds` and an update per thread."""
    spec = WorkerSpec("cpu", threads)
    made = WorkerProgress(number, spec, trial=SpeedTrial(number, spec, {SIZE: seconds}))
    made.latest = SIZE, seconds
    for batch in batches:
        made.assign(ExecuteWork(batch, size=SIZE), 0)
    return made


def scheduler(*sizes: int, **config: Any) -> tuple[BatchScheduler, Tensor]:
    """Create a scheduler for epochs of these sizes, and the tensor of committed batches."""
    committed = torch.full((MOST_WORKERS,), -1)
    return BatchScheduler(Hogbatch(workers=2, **config), SIZE, sizes, committed), committed


ONE_AND_FOUR = [(1.0, 2, 1), (1.0, 2, 4)]


@pytest.mark.parametrize(
    ("made", "ahead", "done", "expected"),
    [
        # Of the other worker's twenty unfinished batches none counts.
        ([3, 7], [(1.0, 1, 0), (0.001, 1, 20)], [-1, -1], [3, 7]),
        # A batch that ends when the next one begins counts, so equal workers stay equal.
        ([5, 5], [(1.0, 1, 1), (1.0, 1, 1)], [-1, -1], [6, 6]),
        # The next batch begins at 1.0 s; by then the second worker has done three batches of 0.3 s.
        ([10, 20, 30], [(0.5, 4, 2), (0.3, 1, 9), (2.0, 1, 1)], [-1] * 3, [18, 23, 30]),
        # Committed updates count before they are reported.
        ([0, 10], ONE_AND_FOUR, [-1, 1], [2, 10 + 4 + 2]),  # meanwhile the other ends its third
        ([0, 10], ONE_AND_FOUR, [0, 1], [2, 10 + 4]),  # the asking worker's next one begins now
        ([0, 10], ONE_AND_FOUR, [0, 3], [2, 10 + 8]),
    ],
)
def test_batches_ahead_count_if_they_end_before_the_next_one_begins(made, ahead, done, expected):
    """`ahead`: for each worker, a batch's seconds and updates, and the number of its batches.

    `done`: the last batch that each worker has committed, or -1.
    """
    asked, committed = scheduler(64)
    numbers = range(3, 3 + len(made))  # no list indices, since workers may be lost
    workers = []
    for number, updates, (seconds, threads, count) in zip(numbers, made, ahead, strict=True):
        workers.append(worker(number, *range(count), threads=threads, seconds=seconds))
        workers[-1].num_updates = updates
    committed[numbers.start : numbers.stop] = torch.tensor(done)
    asked.choose_policy(workers)
    assert asked.expected_updates(workers[0]) == expected


@pytest.mark.parametrize(
    ("batch_s", "left_s", "depth", "prefetches", "expected"),
    [
        (0.011, 60.0, 1, True, 5),
        (1e-6, 60.0, 1, True, MOST_REPORTED),
        (0.011, 0.0, 1, True, 1),  # at the end of an epoch each worker has one batch
        (0.066, 60.0, 1, True, 1),  # no batch is assigned in advance of a long one
        *[(long_s, 100 * long_s, n, True, n) for long_s in (0.06, 5) for n in (1, 2, 3)],
        # At the end of an epoch a GPU gets no batch for which others would wait. Half of its first
        # batch is done on average; `left_s` counts seconds of all workers.
        *[(1.0, left_s, 3, True, n) for left_s, n in ((0.4, 1), (1.4, 2), (1.6, 3))],
        (inf, 0.0, 3, True, 3),  # before the first result
        # Without prefetching, because learning rates depend on the latest updates.
        *[(0.001, 60.0, depth, False, depth) for depth in (1, 3)],
    ],
)
def test_the_number_of_batches_assigned_in_advance(batch_s, left_s, depth, prefetches, expected):
    num_samples = 10**9  # so many that the assigned ones do not change `left_s`
    asked, _ = scheduler(num_samples, policy="hogbatch", staleness_decay=0.0 if prefetches else 0.1)
    one = worker(0, seconds=batch_s)
    one.depth, one.trial = depth, SpeedTrial(0, one.spec, {1: max(left_s, 1e-12) / num_samples})
    asked.choose_policy([one])
    while asked.next_work(one) is not None:
        pass
    assert len(one.assigned) == expected


@pytest.mark.parametrize(
    ("size", "staleness", "decay", "rate"),
    [(8, 0, 0.0, 1.0), (2, 0, 0.0, 0.25), (8, 9, 0.0, 1.0), (8, 3, 1.0, 0.25)],
)
def test_the_learning_rate_follows_the_batch_and_its_staleness(size, staleness, decay, rate):
    asked, _ = scheduler(size, policy="hogbatch", staleness_decay=decay)
    one = worker(0)
    one.staleness = staleness
    asked.choose_policy([one])
    work = asked.next_work(one)
    assert work is not None
    assert (work.size, work.rate) == (size, rate)


@pytest.mark.parametrize(
    ("kind", "depth", "events"),
    [
        # A CPU worker begins a batch when the previous one ends, even if it was assigned earlier.
        # The last batch is assigned after a pause.
        ("cpu", 1, ["3", "3", (5, 2), (9, 4), "20", (21, 1)]),
        # A GPU reads the model when the batch before the previous one ends: for the third batch
        # at the end of the first.
        ("gpu", 3, ["0"] * 3 + [(5, 5), "6", (7, 7), (9, 9 - 5), (10, 10 - 7), "30", (30, 0)]),
    ],
)
def test_a_batch_misses_what_others_add_after_it_has_begun(kind, depth, events):
    """Count the updates of other workers between the begin and the end of a batch.

    Events: a string when a batch is assigned, a pair (updates, missed) when one is done; `updates`
    are those of other workers so far.
    """
    worker = WorkerProgress(0, WorkerSpec(kind), depth)
    for event in events:
        if isinstance(event, str):
            worker.assign(ExecuteWork(), int(event))
        else:
            worker.complete(BatchResult(), event[0])
            assert worker.staleness == event[1], event


# A worker and its event: it completes its oldest batch, or dies before or after its update.
STEPS = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from(["done", "done", "done", "dies", "dies late"])),
    min_size=1,
    max_size=12,
)


class Drawn:
    """Two workers of a scheduler; new workers with new numbers replace dead ones."""

    def __init__(self, sizes: list[int], steps: list[tuple[int, str]]) -> None:
        self.sizes = sizes
        self.scheduler, self.committed = scheduler(*sizes, policy="hogbatch")
        self.workers, self.numbers = [worker(number) for number in range(2)], itertools.count(2)
        self.scheduler.choose_policy(self.workers)
        self.uses, self.ended_s = [[0] * size for size in sizes], 0
        self.turns = itertools.cycle([*steps, (0, "done"), (1, "done")])

    def epoch(self, number: int) -> None:
        if number:
            self.scheduler.begin_epoch(number)
        while not self.scheduler.is_epoch_done:
            for one in self.workers:
                while self.scheduler.next_work(one) is not None:
                    pass
            place, how = next(self.turns)
            one = self.workers[place % 2]
            for work in self.done_by(one, how) if one.assigned else ():
                for place in work.places:
                    self.uses[number][place] += 1

    def done_by(self, one: WorkerProgress, how: str) -> list[ExecuteWork]:
        if how != "dies":
            self.committed[one.number] = one.assigned[0].batch
        if how == "done":
            self.ended_s += 1
            times_ns = [second * 10**9 for second in (self.ended_s - 1, *[self.ended_s] * 3)]
            return [self.scheduler.complete(one, BatchResult(1.0, *times_ns))]
        self.workers.remove(one)
        found = [work for work, _ in self.scheduler.drop(one, 0)]
        self.workers.append(worker(next(self.numbers)))
        self.scheduler.choose_policy(self.workers)
        return found

    def resume(self) -> None:
        values = self.scheduler.state()
        self.scheduler, committed = scheduler(*self.sizes, policy="hogbatch")
        self.committed = committed.copy_(self.committed)
        self.scheduler.restore(values)
        self.scheduler.choose_policy(self.workers)


@given(st.lists(st.integers(1, 90), min_size=1, max_size=3), STEPS, st.booleans())
def test_every_sample_is_used_once_an_epoch_whoever_dies(sizes, steps, is_resumed):
    drawn = Drawn(sizes, steps)
    for number in range(len(sizes)):
        drawn.epoch(number)
        if is_resumed:
            drawn.resume()
    assert drawn.uses == [[1] * size for size in sizes]
    assert drawn.scheduler.num_samples == sum(sizes)


NUM_STEPS, RATE = 20, 0.3
SCHEDULES: dict[str, Callable[[Optimizer], LRScheduler]] = {
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "warm-up": lambda optimizer: SequentialLR(
        optimizer,
        [LinearLR(optimizer, 0.1, total_iters=5), CosineAnnealingLR(optimizer, NUM_STEPS - 5)],
        milestones=[5],
    ),
    "one cycle": lambda optimizer: OneCycleLR(
        optimizer, 0.7, total_steps=NUM_STEPS + 1, cycle_momentum=False
    ),
}


def sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), RATE, momentum=0.9)


@pytest.mark.parametrize("make", SCHEDULES.values(), ids=SCHEDULES)
def test_a_batch_has_the_rate_of_the_step_that_would_contain_it(make):
    optimizer = sgd(nn.Linear(1, 1))
    schedule = make(optimizer)
    rates = []
    for _ in range(NUM_STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduled = ScheduledRate(sgd, make, SIZE)
        for num_samples in range(0, NUM_STEPS * SIZE, 3):
            expected = rates[num_samples // SIZE] / RATE
            assert scheduled.factor(num_samples) == pytest.approx(expected, rel=1e-12)
    assert len(set(rates)) > 5  # otherwise the comparison would be trivial


def test_the_rate_follows_the_highest_number_of_samples_so_far():
    """Also after resuming, and after the samples of a lost worker are returned."""
    scheduled, resumed = (ScheduledRate(sgd, SCHEDULES["lambda"], SIZE) for _ in range(2))
    for steps, expected in ((4, 1 / 5), (2, 1 / 5), (5, 1 / 6)):
        assert scheduled.factor(steps * SIZE) == pytest.approx(expected)
    assert resumed.factor(5 * SIZE) == pytest.approx(1 / 6)
    assert ScheduledRate(sgd, lambda optimizer: None, SIZE).factor(10**9) == 1.0


@pytest.mark.parametrize(
    ("rate", "schedule"),
    [
        (RATE, lambda one: OneCycleLR(one, 0.7, total_steps=20)),  # changes momentum
        (0.0, SCHEDULES["lambda"]),
    ],
)
def test_a_schedule_that_is_no_factor_of_the_rate_is_refused(rate: float, schedule):
    with refused("schedule"):
        ScheduledRate(lambda one: SGD(one.parameters(), rate, momentum=0.9), schedule, SIZE)
