"""The coordinator's queue of samples, and its counts, without processes."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.strategies.hogbatch.config import MOST_WORKERS, Hogbatch, WorkerSpec
from paceline.strategies.hogbatch.messages import ExecuteWork
from paceline.strategies.hogbatch.policy import SpeedTrial
from paceline.strategies.hogbatch.scheduler import BatchScheduler, WorkerProgress

ASKING, OTHER = 3, 5  # the numbers of workers, of which some may be lost, are not their places
SIZE, SECONDS = 8, 1.0  # of each batch
REPORTED = 10.0  # updates of the other worker


def worker(number: int, *batches: int) -> WorkerProgress:
    """A worker of two threads with these assigned batches, of a second and two updates each."""
    spec = WorkerSpec("cpu", 2)
    made = WorkerProgress(number, spec, trial=SpeedTrial(number, spec, {SIZE: SECONDS}))
    made.latest = SIZE, SECONDS
    for batch in batches:
        made.assign(ExecuteWork(batch, size=SIZE), 0)
    return made


def scheduler(*sizes: int, **config: Any) -> tuple[BatchScheduler, Tensor]:
    """A scheduler of epochs of these sizes, and its workers' committed batches."""
    committed = torch.full((MOST_WORKERS,), -1)
    return BatchScheduler(Hogbatch(workers=2, **config), SIZE, sizes, committed), committed


@pytest.mark.parametrize(
    ("own_done", "others_done", "expected"),
    [
        (-1, -1, [2, REPORTED + 2]),  # one of the other's is done when the own batch is
        (-1, 1, [2, REPORTED + 4 + 2]),  # and that is the third
        (4, 1, [2, REPORTED + 4]),  # the next one begins at once
        (4, 3, [2, REPORTED + 8]),
    ],
)
def test_what_a_worker_has_committed_counts_although_nobody_was_told(
    own_done: int, others_done: int, expected
) -> None:
    asking, other = worker(ASKING, 4), worker(OTHER, 0, 1, 2, 3)
    other.counts.updates = REPORTED
    asked, committed = scheduler(64)
    asked.choose_policy([asking, other])
    committed[ASKING], committed[OTHER] = own_done, others_done
    assert asked.expected_updates(asking) == expected


@pytest.mark.parametrize(
    ("kind", "depth", "events"),
    [
        # A batch on cores begins with the end of the one before, also if it was given early;
        # the last one comes after a pause.
        ("cpu", 1, ["3", "3", (5, 2), (9, 4), "20", (21, 1)]),
        # One of a GPU reads the model when the last but one has ended: the fourth with the first.
        ("gpu", 3, ["0"] * 3 + [(5, 5), "6", (7, 7), (9, 9 - 5), (10, 10 - 7), "30", (30, 0)]),
    ],
)
def test_a_batch_misses_what_others_add_after_it_has_begun(kind, depth, events):
    """Events: "updates of others" when assigned; (updates of others, missed) when done."""
    worker = WorkerProgress(0, WorkerSpec(kind), depth)
    for event in events:
        if isinstance(event, str):
            worker.assign(ExecuteWork(), int(event))
        else:
            worker.complete(event[0])
            assert worker.counts.staleness == event[1], event


# The next worker, and its event: it completes its oldest batch, or dies before or after its update.
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
        self.uses = [[0] * size for size in sizes]
        self.turns = itertools.cycle([*steps, (0, "done"), (1, "done")])

    def epoch(self, number: int) -> None:
        self.scheduler.begin_epoch(number)
        while not self.scheduler.queue.is_done:
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
            return [self.scheduler.complete(one, 2, 1.0)]
        self.workers.remove(one)
        found = [work for work, _ in self.scheduler.drop(one)]
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
