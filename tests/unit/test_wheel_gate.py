"""The hub's checks of requests, the bound of staleness, and the group of workers."""

import json
import tracemalloc
from itertools import product
from math import nan
from types import SimpleNamespace
from typing import Self

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from paceline.core.cost import compute_lane
from paceline.core.errors import WorkerLost
from paceline.core.machine import DeviceKind
from paceline.core.plan import Kind
from paceline.core.reading import read_peer_record
from paceline.core.timeline import Span
from paceline.measure.device_profile import DeviceProfile, HubLink
from paceline.record.worker_trace import MessageTime, Trace
from paceline.rpc.frames import Message
from paceline.rpc.server import RpcRequest
from paceline.strategies.wheel.answers import Gate
from paceline.strategies.wheel.protocol import Topic
from paceline.strategies.wheel.staleness import HeadGradients, Workers
from paceline.strategies.wheel.worker_group import ProgressDeadline, WorkerGroup
from refusals import refused
from rpc_exchange import Clock

NUM_STEPS, VERSION = 20, 7
PROFILE = DeviceProfile(
    kind=DeviceKind.CPU,
    host="1",
    seconds=((Kind.FORWARD, "fc", 0.5),),
    codecs={},
    link=HubLink(latency_s=0.0, bytes_per_s=1e8, core_bytes_per_s=1e8),
)


@pytest.fixture
def workers() -> Workers:
    found = Workers(2, None)
    for one in (0, 1):
        found.add(one)
    return found


@pytest.fixture
def gate(workers: Workers) -> Gate:
    return Gate(workers, NUM_STEPS, '{"samples": [4]}', lambda: VERSION)


def of(topic: Topic, *parts: bytes, step: int = 0, version: int = 0) -> Message:
    return Message(topic, step, version, parts=parts)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (Message("gossip", 0), "topic"),
        (of(Topic.AGAIN), "topic"),
        (of(Topic.GRADIENTS, version=VERSION + 1), "gradients"),
        (of(Topic.GRADIENTS, version=-1), "gradients"),
        (of(Topic.BEGIN, step=-1), "begin"),
        (of(Topic.BEGIN, step=NUM_STEPS + 1), "begin"),
        (of(Topic.PARAMETERS, step=6), "parameters"),
        (of(Topic.ACTIVATIONS, step=6), "activations"),
        (of(Topic.ACTIVATIONS, step=3), "activations"),
        (of(Topic.GRADIENTS, step=3), "gradients"),
    ],
)
def test_a_request_that_no_honest_worker_makes_is_refused(gate, workers, message, field: str):
    """Worker 0 is at step 4 of 20, and the server at version 7."""
    workers.of(0).next_step = 4
    with refused(field):
        gate.check(0, message)


def test_valid_steps_and_versions_pass(gate, workers):
    workers.add(1, 12)  # a worker that is ahead of others
    workers.of(0).next_step = 4
    gate.check(0, of(Topic.PARAMETERS, step=5, version=VERSION))
    gate.check(0, of(Topic.GRADIENTS, step=4))
    gate.check(0, of(Topic.BEGIN, step=NUM_STEPS))
    gate.check(1, of(Topic.PARAMETERS, step=13))
    gate.check(1, of(Topic.PROBE, step=2**30))


def test_versions_of_a_child_hub_from_before_a_restart_of_its_parent_pass(workers):
    made = [9, 3]
    gate = Gate(workers, NUM_STEPS, "{}", lambda: made[0])
    gate.check(0, of(Topic.GRADIENTS, version=9))
    made.pop(0)
    gate.check(0, of(Topic.GRADIENTS, version=9))


@pytest.mark.parametrize(
    "layout", [b"{" * 10_000, b"\xff", b"", b"[]", b"null", b'{"samples":[5]}']
)
def test_a_layout_that_does_not_match_is_refused(gate, layout: bytes):
    with refused("run"):
        gate.check_layout(of(Topic.BEGIN, layout))
    gate.check_layout(of(Topic.BEGIN, b'{"samples":[4]}'))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *product(("bytes_per_s", "core_bytes_per_s", "cores"), ("0", "-1", "1e400", "NaN", "null")),
        *product(("lost_beside",), ("-1", "1e400", "NaN", "null")),
    ],
)
def test_invalid_profiles_are_refused(gate, field: str, value: str):
    data = PROFILE.model_dump_json()
    assert gate.profile(of(Topic.PROFILE, data.encode())) == PROFILE
    profile = json.loads(data)
    (profile if field in profile else profile["link"])[field] = "here"
    spoilt = json.dumps(profile).replace('"here"', value).encode()
    with refused("profile") as caught:
        gate.profile(of(Topic.PROFILE, spoilt))
    assert field in str(caught.value)


def test_a_record_with_many_unknown_fields_is_refused_without_an_error_for_each(gate):
    fields = ",".join(f'"{number}":0' for number in range(50_001))
    with refused("profile") as caught:
        gate.profile(of(Topic.PROFILE, f"{{{fields}}}".encode()))
    assert "50,000 fields" in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "record"),
    [
        (DeviceProfile, b'{"below":[%s{}]}' % (b"{}," * 100_000)),
        (DeviceProfile, b'{"below":[%s[]]}' % (b"[]," * 100_000)),
        (Trace, b'{"spans":[["load",0,"",0,[%s1],0.0,1.0]]}' % (b"1," * 100_000)),
    ],
    ids=["missing fields", "lists", "lanes"],
)
def test_a_list_of_invalid_items_needs_little_memory(kind: type, record: bytes):
    """An error needs a kilobyte of memory, and may copy the record."""
    tracemalloc.start()
    with refused("record"):
        read_peer_record(TypeAdapter(kind), record, "record")
    _, peak_nbytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_nbytes < 40 * len(record)


def test_a_record_of_too_many_bytes_is_refused_before_it_is_copied():
    class Uncopied(bytearray):
        def __bytes__(self) -> bytes:
            raise AssertionError("copied")

    with refused("trace"):
        read_peer_record(TypeAdapter(Trace), Uncopied(2**25 + 1), "trace")


def test_a_message_has_one_part(gate):
    for parts in ((), (b"{}", b"{}")):
        with refused("failed"):
            gate.profile(of(Topic.FAILED, *parts))


def trace(**changes: object) -> bytes:
    span = Span(Kind.LOAD, 0, "", 0, (compute_lane("cpu1"),), 10.0, 11.0)
    time = MessageTime("labels", 0, 0, 11.0)._replace(**changes)
    return Trace([span], [time], []).as_json()


def test_a_worker_is_done_only_after_its_last_step(gate, workers):
    with refused("done"):
        gate.done(0, of(Topic.DONE, trace()), is_child=False)
    with refused("done"):
        gate.done(0, of(Topic.DONE, trace(), step=12), is_child=True)
    gate.done(0, of(Topic.DONE, trace(), step=NUM_STEPS), is_child=True)
    workers.of(0).next_step = NUM_STEPS
    found, report = gate.done(0, of(Topic.DONE, trace()), is_child=False)
    assert (found.as_json(), report) == (trace(), None)


@pytest.mark.parametrize(
    "told",
    [
        trace(worker=1),
        trace(purpose="nonsense"),
        trace(at_s=nan),
        trace(at_s=-1.0),
        trace(step=-1),
        trace().replace(b'"load"', b'"nonsense"'),
    ],
)
def test_invalid_traces_are_refused(gate, workers, told: bytes):
    workers.of(0).next_step = NUM_STEPS
    with refused("trace"):
        gate.done(0, of(Topic.DONE, told), is_child=False)


@given(
    st.integers(1, 4),
    st.none() | st.integers(0, 3),
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["go", "go", "go", "join", "lose"]))),
)
def test_nobody_is_further_ahead_than_the_bound(num_workers: int, bound: int | None, events: list):
    """Compare with a naive count; some worker can always continue."""
    workers = Workers(num_workers, bound)
    done, live = [0] * num_workers, set()
    for worker, event in events:
        worker %= num_workers
        if event == "lose":
            workers.drop(worker)
            live.discard(worker)
        elif event == "join" or worker not in live:
            workers.add(worker)
            live.add(worker)
        else:
            may = workers.may_begin(worker, done[worker])
            ahead = done[worker] - min(done[one] for one in live)
            assert may == (bound is None or ahead <= bound)
            if may:
                workers.of(worker).complete(done[worker] + 1)
                done[worker] += 1
        assert not live or any(workers.may_begin(one, done[one]) for one in live)


def test_a_half_done_step_is_not_completed_for_other_workers():
    """Even if the worker has already requested its next step, as with several lanes (plan.py)."""
    workers = Workers(2, 1)
    workers.add(0)
    workers.add(1)
    workers.of(1).complete(2)
    workers.of(0).half = HeadGradients(0, 0, [])
    assert workers.may_begin(0, 1)
    assert not workers.may_begin(0, 2)
    assert not workers.may_begin(1, 2)
    workers.drop(0)
    assert workers.may_begin(1, 2)


class Run(WorkerGroup):
    """A group of workers without connections, its clock, and the steps of admitted workers.

    `ended`: the workers whose processes have ended, with the reasons.
    """

    def __init__(self, num_workers: int = 2) -> None:
        self.clock, self.workers, self.ended = Clock(), Workers(num_workers, None), []
        self.admitted: list[tuple[int, int]] = []
        pool = SimpleNamespace(poll=lambda: self.ended)
        options = {"wait_s": 60.0, "deadline_s": 1000.0, "clock": self.clock}
        super().__init__(None, self.workers, pool, **options)

    def reply(self, request: RpcRequest, reply: Message) -> None:
        self.admitted.append((request.worker, reply.step))

    def ask(self, worker: int, step: int) -> None:
        self.wait(RpcRequest(worker, Message("begin", step), b"", 0))

    def begun(self) -> Self:
        """Let all workers begin."""
        for worker in range(len(self.workers.all)):
            self.ask(worker, 0)
        self.begin()
        return self

    def drop_ended(self) -> None:
        for worker, why in self.poll():
            self.drop(worker, why)

    def drop_all(self) -> None:
        for worker in range(len(self.workers.all)):
            self.drop(worker, "has left")


@pytest.mark.parametrize("late", [False, True])
def test_a_run_begins_with_all_workers_or_after_the_wait_without_late_ones(late: bool):
    run = Run()
    run.ask(0, 0)
    assert not run.is_ready
    if late:
        run.clock.now_s += 60.1
    else:
        run.ask(1, 0)
    assert run.is_ready
    run.begin()
    assert run.admitted == [(0, 0)] + [(1, 0)] * (not late)
    if late:
        run.workers.of(0).complete(7)
        run.ask(1, 0)  # a worker does not repeat steps that others have completed
        assert run.admitted[-1] == (1, run.workers.of(1).next_step) == (1, 7)


def test_a_run_without_workers_ends_after_the_wait():
    run = Run()
    run.clock.now_s += 59.9
    assert not run.is_ready
    run.clock.now_s += 0.2
    with pytest.raises(WorkerLost):
        assert run.is_ready
    run = Run().begun()
    for _ in range(2):
        run.drop_all()
    assert run.lost == ["worker 0 has left", "worker 1 has left"]
    run.clock.now_s += 59.9
    run.drop_ended()
    run.ask(0, 0)
    run.drop_all()
    run.clock.now_s += 0.2
    with pytest.raises(WorkerLost):
        run.drop_ended()


def test_a_run_ends_when_all_workers_are_done_or_lost():
    run = Run().begun()
    run.workers.of(0).complete(4)
    assert run.workers.completed == 0
    run.finish(0)
    assert not run.is_over
    run.drop(1, "has left")
    assert (run.is_over, run.workers.completed) == (True, 4)
    run = Run(1).begun()
    run.ended = [(0, "was ended by SIGKILL")]
    with pytest.raises(WorkerLost, match="SIGKILL"):
        run.drop_ended()


def test_after_a_restart_of_the_parent_all_workers_begin_together():
    run = Run().begun()
    run.restart()
    run.ask(0, 3)
    assert len(run.admitted) == 2
    run.ask(1, 2)
    assert run.admitted[2:] == [(0, 0), (1, 0)]


@pytest.mark.parametrize(("usual_s", "allowed_s"), [(0.01, 5.0), (1.0, 20.0)])
def test_a_worker_may_take_twenty_times_its_median_and_at_least_the_deadline(usual_s, allowed_s):
    clock = Clock()
    deadline = ProgressDeadline(5.0, clock)
    for _ in range(5):
        deadline.replied(0)
        clock.now_s += usual_s
        deadline.requested(0)
    clock.now_s += 1000  # the worker waits for the hub
    assert deadline.overdue() == {}
    deadline.replied(0)
    clock.now_s += allowed_s - 0.001
    assert deadline.overdue() == {}
    clock.now_s += 0.002
    assert deadline.overdue() == {0: pytest.approx(allowed_s + 0.001)}
    deadline.forget(0)
    assert deadline.overdue() == {}


def test_the_first_step_has_a_longer_deadline_and_pauses_of_the_hub_do_not_count():
    clock = Clock()
    deadline = ProgressDeadline(5.0, clock)
    deadline.replied(3)
    clock.now_s += 49.5
    assert deadline.overdue() == {}
    deadline.paused(40.0)
    clock.now_s += 40.0
    assert deadline.overdue() == {}
    clock.now_s += 5.0
    assert set(deadline.overdue()) == {3}
