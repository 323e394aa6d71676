"""The updates of others that a batch has missed, as the coordinator counts them."""

import socket
from collections.abc import Iterator

import pytest

from paceline.strategies.hogbatch.config import WorkerSpec
from paceline.strategies.hogbatch.messages import Command, ExecuteWork
from paceline.strategies.hogbatch.processes import WorkerProcess

WORK = ExecuteWork(Command.TRAIN)


@pytest.fixture
def own() -> Iterator[socket.socket]:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, other:
        yield one


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
