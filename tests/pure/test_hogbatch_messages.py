from math import isnan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.strategies.hogbatch.messages import (
    MOST_NBYTES,
    ExecuteWork,
    Failure,
    Order,
    ScheduleWork,
    read,
)

NUMBERS = st.integers(-(2**63), 2**63 - 1)
FLOATS = st.floats(allow_nan=False)
WORK = st.builds(
    ExecuteWork, st.sampled_from(Order), NUMBERS, NUMBERS, NUMBERS, FLOATS, st.booleans()
)
SCHEDULE = st.builds(ScheduleWork, NUMBERS, NUMBERS, NUMBERS, FLOATS, *[NUMBERS] * 6)


@given(WORK)
def test_work_arrives_as_it_was_sent(work: ExecuteWork):
    assert ExecuteWork.of(work.packed()) == work


@given(SCHEDULE)
def test_a_request_arrives_as_it_was_sent(message: ScheduleWork):
    assert read(message.packed()) == message


def test_a_loss_that_is_no_number_arrives():
    message = read(ScheduleWork(3, loss=float("nan")).packed())
    assert isinstance(message, ScheduleWork)
    assert isnan(message.loss)


@given(st.booleans(), st.text(max_size=9000))
def test_the_beginning_of_a_reason_arrives(by_input: bool, reason: str):
    packet = Failure(by_input, reason).packed()
    assert len(packet) <= MOST_NBYTES
    message = read(packet)
    assert isinstance(message, Failure)
    assert message.by_input == by_input
    # A character that the end cuts through is lost, and no other.
    assert reason.startswith(message.reason.rstrip("\N{REPLACEMENT CHARACTER}"))
    assert len(reason.encode()) > 4000 or message.reason == reason


@given(st.binary(max_size=200))
def test_bytes_that_are_no_message_are_refused(packet: bytes):
    size = len(ScheduleWork(0).packed())
    if len(packet) != len(ExecuteWork(Order.STOP).packed()):
        with pytest.raises(ValueError, match="are no ExecuteWork"):
            ExecuteWork.of(packet)
    is_schedule = packet[:1] == b"\1" and len(packet) == size
    is_failure = packet[:1] == b"\2" and len(packet) > 1
    if not is_schedule and not is_failure:
        with pytest.raises(ValueError, match="no message of a worker"):
            read(packet)
