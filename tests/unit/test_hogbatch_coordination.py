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


@pytest.mark.parametrize("by_input", [False, True])
@given(text=st.text(max_size=40), times=st.sampled_from([1, 500]))
def test_the_beginning_of_a_reason_arrives(by_input: bool, text: str, times: int):
    reason = text * times
    packet = Failure(by_input, reason).pack()
    assert len(packet) <= MOST_NBYTES
    message = unpack(packet)
    assert message == Failure(by_input, message.reason)
    # A character that the end cuts through is lost, and no other.
    assert reason.startswith(message.reason.rstrip("\N{REPLACEMENT CHARACTER}"))
    assert len(reason.encode()) > 4000 or message.reason == reason


ASKED = ScheduleWork(0).pack()


@pytest.mark.parametrize("packet", [b"", b"\2", b"\1", b"\3more", ASKED + b"\2" + ASKED[1:]])
def test_bytes_that_are_no_message_are_refused(packet: bytes):
    for read in (unpack, ExecuteWork.unpack):
        with pytest.raises(ValueError, match=str(len(packet))):
            read(packet)


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


def test_samples_that_are_not_out_or_not_of_the_epoch_are_refused():
    pool = SampleQueue(8)
    taken = pool.take(4)
    pool.complete(taken)
    with pytest.raises(ValueError, match="0 to 4"):
        pool.give_back(taken)
    pool.take(4)
    with pytest.raises(ValueError, match="4 to 7"):
        pool.complete(range(4, 7))
    outside, disordered = [[range(3, 9)], [range(-1, 2)]], [range(4, 6), range(1, 2)]
    for free in (*outside, disordered, [range(3), range(3, 5)]):
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
def test_a_batch_misses_what_others_add_after_it_has_begun(own, kind, depth, events):
    """Batches given, after so many updates of others; and done, with those that each missed."""
    worker = WorkerProcess(0, WorkerSpec(kind), None, own, -1, depth=depth)  # type: ignore[arg-type]
    for event in events:
        if isinstance(event, str):
            worker.assign(ExecuteWork(Command.TRAIN), int(event))
        else:
            worker.complete(event[0])
            assert worker.staleness == event[1], event
