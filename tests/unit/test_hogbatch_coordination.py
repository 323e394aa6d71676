"""What a coordinator and its workers say to each other, its queue of samples and its counts."""

import socket
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hogbatches import classifying
from paceline.core.settings import TrainSettings
from paceline.exchange.session import TrainingSession
from paceline.links.group import Group
from paceline.links.shared_memory import SharedTensors
from paceline.models.networks import MLP
from paceline.strategies.hogbatch import STRATEGY, messages
from paceline.strategies.hogbatch.config import MOST_WORKERS, Hogbatch, WorkerSpec
from paceline.strategies.hogbatch.coordinator import Coordinator
from paceline.strategies.hogbatch.messages import (
    MOST_NBYTES,
    Command,
    ExecuteWork,
    Failure,
    ScheduleWork,
    unpack,
)
from paceline.strategies.hogbatch.policy import MOST_REPORTED, SampleQueue
from paceline.strategies.hogbatch.processes import WorkerProcess
from paceline.strategies.hogbatch.statistics import BatchResult

NUMBERS = st.integers(-(2**63), 2**63 - 1)
FLOATS = st.floats(allow_nan=False)
WORK = st.builds(
    ExecuteWork, st.sampled_from(Command), NUMBERS, NUMBERS, NUMBERS, FLOATS, st.booleans()
)
RESULT = st.builds(BatchResult, NUMBERS, FLOATS, *[NUMBERS] * 7)
SCHEDULE = st.builds(ScheduleWork, NUMBERS, NUMBERS, RESULT)


@given(WORK, st.lists(SCHEDULE, min_size=1, max_size=MOST_REPORTED))
def test_work_and_requests_arrive_as_they_were_sent(work, messages: list[ScheduleWork]):
    assert ExecuteWork.unpack(work.pack()) == work
    packet = b"".join(message.pack() for message in messages)
    assert len(packet) <= MOST_NBYTES
    assert unpack(packet) == tuple(messages)


@given(st.booleans(), st.text(max_size=40), st.sampled_from([1, 50, 500]))
def test_the_beginning_of_a_reason_arrives(by_input: bool, text: str, times: int):
    reason = text * times
    packet = Failure(by_input, reason).pack()
    assert len(packet) <= MOST_NBYTES
    message = unpack(packet)
    assert isinstance(message, Failure)
    assert message.by_input == by_input
    # A character that the end cuts through is lost, and no other.
    assert reason.startswith(message.reason.rstrip("\N{REPLACEMENT CHARACTER}"))
    assert len(reason.encode()) > 4000 or message.reason == reason


@given(st.binary(max_size=200))
def test_bytes_that_are_no_message_are_refused(packet: bytes):
    size = len(ScheduleWork(0).pack())
    if len(packet) != len(ExecuteWork(Command.STOP).pack()):
        with pytest.raises(ValueError, match=str(len(packet))):
            ExecuteWork.unpack(packet)
    is_schedule = bool(packet) and len(packet) % size == 0 and set(packet[::size]) == {1}
    is_failure = packet[:1] == b"\2" and len(packet) > 1
    if not is_schedule and not is_failure:
        with pytest.raises(ValueError, match=str(len(packet))):
            unpack(packet)


# Who does what: workers 0 to 3 ask for so many samples; then one says it is done, or dies.
EVENTS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 9), st.sampled_from(["done", "done", "dies"])),
    max_size=60,
)


@given(st.integers(0, 50), EVENTS)
def test_every_sample_is_used_once_whoever_asks_and_dies_before_and_after_a_pause(
    num_samples: int, events
):
    """A dead worker's number asks again: that is a worker that has joined late."""
    pool, used = SampleQueue(num_samples), []
    held: dict[int, range] = {}
    for worker, size, how in events:
        if worker in held:
            taken = held.pop(worker)
            (pool.give_back if how == "dies" else pool.complete)(taken)
            used += taken if how == "done" else []
        elif taken := pool.take(size):
            assert 1 <= len(taken) <= size
            held[worker] = taken
        out = [place for part in held.values() for place in part]
        assert len(out) == len(set(out))
        assert not set(out) & set(used)
        assert len(pool) + len(out) + len(used) == num_samples
        assert pool.num_done == len(used)
        assert pool.is_done == (len(used) == num_samples)
    for taken in held.values():  # a pause: all finish what they have
        pool.complete(taken)
        used += taken
    resumed = SampleQueue(num_samples, pool.free) if num_samples else pool
    assert resumed.num_done == pool.num_done == len(used)
    while taken := resumed.take(7):
        resumed.complete(taken)
        used += taken
    assert resumed.is_done
    assert sorted(used) == list(range(num_samples))


def test_what_comes_back_joins_its_neighbours():
    pool = SampleQueue(12)
    first, second, third = pool.take(4), pool.take(4), pool.take(4)
    assert not pool
    for part in (first, third, second):
        pool.give_back(part)
    assert pool.take(12) == range(12)


def test_samples_that_are_not_out_do_not_come_back():
    pool = SampleQueue(8)
    taken = pool.take(4)
    pool.complete(taken)
    with pytest.raises(ValueError, match="0 to 4"):
        pool.give_back(taken)
    pool.take(4)
    with pytest.raises(ValueError, match="4 to 7"):
        pool.complete(range(4, 7))


@pytest.mark.parametrize(
    "free", [[range(3, 9)], [range(-1, 2)], [range(4, 6), range(1, 2)], [range(3), range(3, 5)]]
)
def test_ranges_that_are_no_parts_of_the_epoch_are_refused(free: list[range]):
    with pytest.raises(ValueError, match="8 samples"):
        SampleQueue(8, free)


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


TRAINING = ExecuteWork(Command.TRAIN)


def completed(worker: WorkerProcess, num_others: int) -> int:
    worker.complete(num_others)
    return worker.staleness


def test_a_batch_on_cores_misses_what_comes_between_the_end_of_the_one_before_and_its_own(own):
    worker = WorkerProcess(0, WorkerSpec("cpu"), None, own, -1)  # type: ignore[arg-type]
    worker.assign(TRAINING, 3)
    worker.assign(TRAINING, 3)  # given early
    assert completed(worker, 5) == 2
    assert completed(worker, 9) == 4
    worker.assign(TRAINING, 20)  # after a pause
    assert completed(worker, 21) == 1


def test_a_batch_of_a_gpu_reads_the_model_when_the_last_but_one_has_ended(own):
    worker = WorkerProcess(0, WorkerSpec("gpu"), None, own, -1, depth=3)  # type: ignore[arg-type]
    for _ in range(3):
        worker.assign(TRAINING, 0)
    assert completed(worker, 5) == 5
    worker.assign(TRAINING, 6)
    assert completed(worker, 7) == 7  # it has begun with the first
    assert completed(worker, 9) == 9 - 5
    assert completed(worker, 10) == 10 - 7
    worker.assign(TRAINING, 30)
    assert completed(worker, 30) == 0
