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

ASKING, OTHER = 3, 5  # worker numbers; no list indices, since workers may be lost
SIZE, SECONDS = 8, 1.0  # of each batch
REPORTED = 10.0  # updates that the other worker has reported


def worker(number: int, *batches: int) -> WorkerProgress:
    """Create a worker of two threads with batches of 1 s and two updates."""
    spec = WorkerSpec("cpu", 2)
    made = WorkerProgress(number, spec, trial=SpeedTrial(number, spec, {SIZE: SECONDS}))
    made.latest = SIZE, SECONDS
    for batch in batches:
        made.assign(ExecuteWork(batch, size=SIZE), 0)
    return made


def scheduler(*sizes: int, **config: Any) -> tuple[BatchScheduler, Tensor]:
    """Create a scheduler for epochs of these sizes, and the tensor of committed batches."""
    committed = torch.full((MOST_WORKERS,), -1)
    return BatchScheduler(Hogbatch(workers=2, **config), SIZE, sizes, committed), committed


@pytest.mark.parametrize(
    ("own_done", "others_done", "expected"),
    [
        (-1, -1, [2, REPORTED + 2]),  # meanwhile the other worker ends its first batch
        (-1, 1, [2, REPORTED + 4 + 2]),  # meanwhile it ends its third batch
        (4, 1, [2, REPORTED + 4]),  # the asking worker's next batch begins now
        (4, 3, [2, REPORTED + 8]),
    ],
)
def test_committed_updates_count_before_they_are_reported(
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
            worker.complete(event[0])
            assert worker.counts.staleness == event[1], event


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
