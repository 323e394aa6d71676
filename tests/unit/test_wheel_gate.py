"""The hub's gate: what an honest worker sends passes, and every other request is refused."""

import json
from math import nan

import pytest

from paceline.core.cost import compute_lane
from paceline.core.machine import DeviceKind
from paceline.core.plan import Kind
from paceline.core.timeline import Span
from paceline.rpc.frames import Message
from paceline.strategies.wheel.gate import Gate
from paceline.strategies.wheel.measure import DeviceProfile
from paceline.strategies.wheel.membership import Workers
from paceline.strategies.wheel.protocol import Topic
from paceline.strategies.wheel.trace import MessageTime, Trace
from refusals import refused

NUM_STEPS, VERSION = 20, 7
PROFILE = DeviceProfile(
    kind=DeviceKind.CPU,
    host="1",
    seconds=((Kind.FORWARD, "fc", 0.5),),
    codecs={},
    link_bytes_per_s=1e8,
    core_bytes_per_s=1e8,
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
        (of(Topic.GRADIENTS, version=VERSION + 1), "gradients"),
        (of(Topic.GRADIENTS, version=-1), "gradients"),
        (of(Topic.BEGIN, step=-1), "begin"),
        (of(Topic.BEGIN, step=NUM_STEPS + 1), "begin"),
        (of(Topic.PARAMETERS, step=6), "parameters"),
        (of(Topic.ACTIVATIONS, step=6), "activations"),
    ],
)
def test_a_request_that_no_honest_worker_makes_is_refused(gate, workers, message, field: str):
    """Worker 0 has reached step 4 of 20, and the server version 7."""
    workers.of(0).next_step = 4
    with refused(field):
        gate.check(0, message)


def test_steps_and_versions_that_may_be_pass(gate, workers):
    gate.begins(1, 12)  # a worker that goes on after others
    workers.of(0).next_step = 4
    gate.check(0, of(Topic.PARAMETERS, step=5, version=VERSION))
    gate.check(0, of(Topic.BEGIN, step=NUM_STEPS))
    gate.check(1, of(Topic.PARAMETERS, step=13))
    gate.check(1, of(Topic.PROBE, step=2**30))


def test_versions_that_a_child_hub_has_had_before_its_parent_began_anew_pass(workers):
    made = [9, 3]
    gate = Gate(workers, NUM_STEPS, "{}", lambda: made[0])
    gate.check(0, of(Topic.GRADIENTS, version=9))
    made.pop(0)
    gate.check(0, of(Topic.GRADIENTS, version=9))


@pytest.mark.parametrize(
    ("layout", "field"),
    [
        *((one, "what it says of its run") for one in (b"{" * 10_000, b"\xff", b"")),
        *((one, "run") for one in (b"[]", b"null", b'{"samples":[5]}')),
    ],
)
def test_a_layout_that_is_none_is_refused(gate, layout: bytes, field: str):
    with refused(field):
        gate.check_layout(of(Topic.BEGIN, layout))
    gate.check_layout(of(Topic.BEGIN, b'{"samples":[4]}'))


@pytest.mark.parametrize("value", ["0", "-1", "1e400", "NaN", "null"])
@pytest.mark.parametrize("field", ["link_bytes_per_s", "core_bytes_per_s", "lost_beside", "cores"])
def test_profiles_that_cannot_be_are_refused(gate, field: str, value: str):
    told = json.loads(PROFILE.model_dump_json())
    data = json.dumps(told | {field: "here"}).replace('"here"', value).encode()
    if (field, value) == ("lost_beside", "0"):
        gate.profile(of(Topic.PROFILE, data))
        return
    with refused("profile") as caught:
        gate.profile(of(Topic.PROFILE, data))
    assert field in str(caught.value)


def test_a_profile_arrives_as_it_was_sent(gate):
    assert gate.profile(of(Topic.PROFILE, PROFILE.model_dump_json().encode())) == PROFILE


def trace(**changes: object) -> bytes:
    span = Span(Kind.LOAD, 0, "", 0, (compute_lane("cpu1"),), 10.0, 11.0)
    time = MessageTime("labels", 0, 0, 11.0)
    in_span = {key: value for key, value in changes.items() if key in Span._fields}
    in_time = {key: value for key, value in changes.items() if key not in Span._fields}
    return Trace([span._replace(**in_span)], [time._replace(**in_time)], []).as_json()


def test_a_worker_is_done_after_its_last_step_alone(gate, workers):
    with refused("done"):
        gate.trace(0, of(Topic.DONE, trace()), is_child=False)
    with refused("done"):
        gate.trace(0, of(Topic.DONE, trace(), step=12), is_child=True)
    gate.trace(0, of(Topic.DONE, trace(), step=NUM_STEPS), is_child=True)
    workers.of(0).next_step = NUM_STEPS
    assert gate.trace(0, of(Topic.DONE, trace()), is_child=False).as_json() == trace()


@pytest.mark.parametrize(
    "told",
    [
        trace(worker=1),
        trace(purpose="nonsense"),
        trace(at_s=nan),
        trace(at_s=-1.0),
        trace(step=-1),
        trace(start_s=nan),
        trace().replace(b'"load"', b'"nonsense"'),
    ],
)
def test_traces_that_cannot_be_are_refused(gate, workers, told: bytes):
    workers.of(0).next_step = NUM_STEPS
    with refused("trace"):
        gate.trace(0, of(Topic.DONE, told), is_child=False)


@pytest.mark.parametrize("parts", [(), (b"{}", b"{}")])
def test_a_message_has_one_part(gate, parts: tuple[bytes, ...]):
    for read in (gate.profile, gate.buffers, gate.words):
        with refused("failed"):
            read(of(Topic.FAILED, *parts))
