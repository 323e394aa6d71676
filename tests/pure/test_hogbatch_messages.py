from math import isnan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.strategies.hogbatch.messages import (
    MOST_NBYTES,
    Command,
    ExecuteWork,
    Failure,
    ScheduleWork,
    unpack,
)
from paceline.strategies.hogbatch.policy import MOST_REPORTED
from paceline.strategies.hogbatch.statistics import BatchResult

NUMBERS = st.integers(-(2**63), 2**63 - 1)
FLOATS = st.floats(allow_nan=False)
WORK = st.builds(
    ExecuteWork, st.sampled_from(Command), NUMBERS, NUMBERS, NUMBERS, FLOATS, st.booleans()
)
RESULT = st.builds(BatchResult, NUMBERS, FLOATS, *[NUMBERS] * 7)
SCHEDULE = st.builds(ScheduleWork, NUMBERS, NUMBERS, RESULT)


@given(WORK)
def test_work_arrives_as_it_was_sent(work: ExecuteWork):
    assert ExecuteWork.unpack(work.pack()) == work


@given(st.lists(SCHEDULE, min_size=1, max_size=MOST_REPORTED))
def test_requests_arrive_as_they_were_sent(messages: list[ScheduleWork]):
    packet = b"".join(message.pack() for message in messages)
    assert len(packet) <= MOST_NBYTES
    assert unpack(packet) == tuple(messages)


def test_a_loss_that_is_no_number_arrives():
    messages = unpack(ScheduleWork(3, result=BatchResult(loss=float("nan"))).pack())
    assert not isinstance(messages, Failure)
    assert isnan(messages[0].result.loss)


@given(st.booleans(), st.text(max_size=9000))
def test_the_beginning_of_a_reason_arrives(by_input: bool, reason: str):
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
        with pytest.raises(ValueError, match="are no ExecuteWork"):
            ExecuteWork.unpack(packet)
    is_schedule = bool(packet) and len(packet) % size == 0 and set(packet[::size]) == {1}
    is_failure = packet[:1] == b"\2" and len(packet) > 1
    if not is_schedule and not is_failure:
        with pytest.raises(ValueError, match="no message of a worker"):
            unpack(packet)
