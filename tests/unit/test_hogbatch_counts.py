"""Counts of updates: those a policy is told of, and those of others that a batch has missed."""

import socket
from collections.abc import Iterator

import pytest
import torch

from hogbatches import classifying
from paceline.core.settings import TrainSettings
from paceline.exchange.session import TrainingSession
from paceline.links.group import Group
from paceline.links.shared_memory import SharedTensors
from paceline.models.networks import MLP
from paceline.strategies.hogbatch import STRATEGY, messages
from paceline.strategies.hogbatch.config import MOST_WORKERS, Hogbatch, WorkerSpec
from paceline.strategies.hogbatch.coordinator import Coordinator
from paceline.strategies.hogbatch.messages import Command, ExecuteWork
from paceline.strategies.hogbatch.processes import WorkerProcess

ASKING, OTHER = 3, 5  # the numbers of workers, of which some may be lost, are not their places
SIZE, SECONDS = 8, 1.0  # of each batch
REPORTED = 10.0  # updates of the other worker


@pytest.fixture
def shared() -> Iterator[SharedTensors]:
    none_done = torch.full((MOST_WORKERS,), -1)
    memory = SharedTensors.of({messages.ORDER: torch.arange(64), messages.COMMITTED: none_done}, "")
    yield memory
    memory.close()


@pytest.fixture
def own() -> Iterator[socket.socket]:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, other:
        yield one


def worker(number: int, own: socket.socket, *batches: int) -> WorkerProcess:
    """Two threads that were given these batches, each of a second and two updates."""
    made = WorkerProcess(number, WorkerSpec("cpu", 2), None, own, -1)  # type: ignore[arg-type]
    made.latest = SIZE, SECONDS
    for batch in batches:
        made.assign(ExecuteWork(Command.TRAIN, batch, size=SIZE), 0)
    return made


def coordinator(shared: SharedTensors, *workers: WorkerProcess) -> Coordinator:
    """A coordinator of these workers, none of whose processes runs."""
    settings, group = TrainSettings(model="mlp-4-2"), Group.alone(torch.device("cpu"), 1.0)
    session = TrainingSession(settings, STRATEGY, Hogbatch(workers=2), "run", group, None)
    zeros = torch.zeros(64, 4), torch.zeros(64, dtype=torch.int64)
    recipe = classifying(lambda: MLP((4, 2)), zeros)
    made = Coordinator(session, None, shared.tensors, recipe, [64])  # type: ignore[arg-type]
    made._active = [*workers]
    return made


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
    shared: SharedTensors, own: socket.socket, own_done: int, others_done: int, expected
) -> None:
    asking, other = worker(ASKING, own, 4), worker(OTHER, own, 0, 1, 2, 3)
    other.updates = REPORTED
    asked = coordinator(shared, asking, other)
    # The workers' side of the memory, which they attach by its descriptor.
    committed = SharedTensors(shared.fd, shared.entries).tensors[messages.COMMITTED]
    committed[ASKING], committed[OTHER] = own_done, others_done
    assert asked._expected_updates(asking) == expected


WORK = ExecuteWork(Command.TRAIN)


def completed(worker: WorkerProcess, num_others: int) -> int:
    worker.complete(num_others)
    return worker.staleness


def test_a_batch_on_cores_misses_what_comes_between_the_end_of_the_one_before_and_its_own(own):
    worker = WorkerProcess(0, WorkerSpec("cpu"), None, own, -1)  # type: ignore[arg-type]
    worker.assign(WORK, 3)
    worker.assign(WORK, 3)  # given early
    assert completed(worker, 5) == 2
    assert completed(worker, 9) == 4
    worker.assign(WORK, 20)  # after a pause
    assert completed(worker, 21) == 1


def test_a_batch_of_a_gpu_reads_the_model_when_the_last_but_one_has_ended(own):
    worker = WorkerProcess(0, WorkerSpec("gpu"), None, own, -1, depth=3)  # type: ignore[arg-type]
    for _ in range(3):
        worker.assign(WORK, 0)
    assert completed(worker, 5) == 5
    worker.assign(WORK, 6)
    assert completed(worker, 7) == 7  # it has begun with the first
    assert completed(worker, 9) == 9 - 5
    assert completed(worker, 10) == 10 - 7
    worker.assign(WORK, 30)
    assert completed(worker, 30) == 0
