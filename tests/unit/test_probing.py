"""Turns to probe: one worker after the other, of a bounded number and size."""

import pytest

from paceline.core.errors import InvalidInput
from paceline.rpc.frames import Message
from paceline.rpc.probing import ProbeTurns
from paceline.rpc.server import RpcRequest


def asks(worker: int, nbytes: int = 100, at: int = 0) -> RpcRequest:
    return RpcRequest(worker, Message("probe", nbytes), b"session", at)


def test_the_others_wait_until_a_workers_turn_has_ended():
    turns = ProbeTurns(1000, 5.0)
    assert turns.reply(asks(0, 64)).parts[0].nbytes == 64
    assert turns.reply(asks(1)) is None
    assert turns.reply(asks(2)) is None
    assert turns.end(1) == []  # it has no turn that could end
    assert turns.reply(asks(0)) is not None
    assert [one.worker for one in turns.end(0)] == [1, 2]
    assert turns.reply(asks(1)) is not None
    assert turns.reply(asks(2)) is None


@pytest.mark.parametrize("nbytes", [-1, 1001, 2**62])
def test_a_probe_of_a_size_that_no_message_has_is_refused(nbytes: int):
    with pytest.raises(InvalidInput, match="at most 1,000"):
        ProbeTurns(1000, 5.0).reply(asks(0, nbytes))


def test_a_worker_may_probe_so_often_and_again_when_it_has_come_back():
    turns = ProbeTurns(1000, 5.0)
    for _ in range(200):
        turns.reply(asks(0))
    with pytest.raises(InvalidInput, match="more than 200 of one worker"):
        turns.reply(asks(0))
    turns.forget(0)
    assert turns.reply(asks(0)) is not None


def test_a_worker_that_is_gone_leaves_its_turn_and_what_it_has_waited_for():
    turns = ProbeTurns(1000, 5.0)
    turns.reply(asks(0))
    for worker in (1, 2):
        turns.reply(asks(worker))
    assert turns.forget(1) == []
    assert [one.worker for one in turns.forget(0)] == [2]


def test_one_that_makes_no_use_of_its_turn_is_overdue():
    turns = ProbeTurns(1000, -1.0)
    assert turns.overdue() is None
    turns.reply(asks(3))
    assert turns.overdue() == 3
    patient = ProbeTurns(1000, 1e9)
    patient.reply(asks(3))
    assert patient.overdue() is None
